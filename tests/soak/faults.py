"""All kinds of faults by their names."""

from soak import reading_faults as reading
from soak import storage_faults as storage
from soak.fault import Fault

ALWAYS = ("sample that always raises", "deadly sample")  # whose batches never come whole

KINDS: dict[str, type[Fault]] = {
    "nothing": Fault,
    "killed worker": reading.KilledWorker,
    "stopped worker": reading.StoppedWorker,
    "hanging sample": reading.HangingSample,
    "sample that raises once": reading.RaisingSample,
    "sample that always raises": reading.RaisingSample,
    "deadly sample": reading.DeadlySample,
    "slow disk": storage.SlowDisk,
    "full disk, cache": storage.FullDisk,
    "full disk, checkpoint": storage.FullDisk,
    "full shared memory": storage.FullMemory,
    "changed file": storage.ChangedFile,
    "closed by another thread": reading.ClosedLoader,
    "step that raises": reading.RaisingStep,
    "few descriptors": storage.FewDescriptors,
    "interrupt": reading.Interrupt,
    "damaged cache": storage.DamagedCache,
    "damaged checkpoint": storage.DamagedCheckpoint,
}
