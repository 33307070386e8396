"""Faults of those who read, and of those who use what is read: workers, samples, threads, the user's own code."""

import os
import signal
import threading

from worker_processes import children, nurseries

import millstream as ms
from soak import chaos, trouble
from soak.fault import Fault, all_of

TIMEOUT = 3.0  # seconds without a batch, where something may hang


class KilledWorker(Fault):
    """A random worker is killed, or the process that they are forked from, and all of them with it."""

    timed = True
    nursery = 0.25
    warnings = (r"Its batch is read again",)
    signals = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGTERM)

    def strike(self) -> None:
        processes = nurseries() if self.chance.random() < self.nursery else children()
        if processes:
            self.struck += 1
            chaos.kill(self.chance.choice(processes), self.chance.choice(self.signals))


class StoppedWorker(KilledWorker):
    """A random worker is stopped, which looks like one that hangs."""

    signals = (signal.SIGSTOP,)
    nursery = 0.0
    warnings = ()
    timeout = TIMEOUT
    rebuilds = True

    def expects(self, error: BaseException) -> bool:
        return isinstance(error, ms.errors.WorkerStalled) and "worker 0 (pid " in str(error)

    def told(self, error: BaseException) -> None:
        """Be more patient: on a machine with much else to do, workers take that long to start."""
        self.timeout *= 2


class HangingSample(Fault):
    """A sample hangs, once."""

    timeout = TIMEOUT
    rebuilds = True

    def __enter__(self) -> "Fault":
        self.at = ((self.target, "hang once"),)
        self._stall_seconds = ms.reading.settings.stall_seconds
        ms.reading.settings.stall_seconds = self.timeout
        return self

    def fix(self) -> None:
        ms.reading.settings.stall_seconds = self._stall_seconds
        self.struck = int((self.folder / f"hang-{self.target}").exists())
        (self.folder / "released").touch()

    def told(self, error: BaseException) -> None:
        """Readers that hang are let go only at the end; new ones, with more patience, read in their place."""
        self.timeout *= 2
        ms.reading.settings.stall_seconds = self.timeout

    def expects(self, error: BaseException) -> bool:
        return isinstance(error, ms.errors.WorkerStalled)


class RaisingSample(Fault):
    """A sample raises, once or always."""

    @property
    def at(self) -> tuple[tuple[int, str], ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ((self.target, "raise once" if self.name.endswith("once") else "raise"),)

    def __enter__(self) -> "Fault":
        self.struck = 1
        return self

    def expects(self, error: BaseException) -> bool:
        named = f"sample {self.index}." in all_of(error)
        return isinstance(error, trouble.BadSample) and self.case.on_error == "raise" and named


class DeadlySample(Fault):
    """A sample ends every worker that reads it."""

    warnings = KilledWorker.warnings

    def __enter__(self) -> "Fault":
        self.at = ((self.target, self.chance.choice(["SIGKILL", "SIGSEGV", "SIGABRT"])),)
        self.struck = 1
        return self

    def expects(self, error: BaseException) -> bool:
        named = f"reading sample {self.index}. " in str(error)
        return isinstance(error, ms.errors.WorkerCrashed) and self.case.on_error == "raise" and named


class ClosedLoader(Fault):
    """The loader is closed by another thread."""

    timed = True

    def strike(self) -> None:
        if self.loader is not None:
            self.struck = 1
            closing = threading.Thread(target=self.loader.close)
            closing.start()
            closing.join()

    def expects(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and "have been ended" in str(error)


class RaisingStep(Fault):
    """The user's own code raises."""

    def strike(self) -> None:
        self.struck = 1
        raise ZeroDivisionError("of the user")

    def expects(self, error: BaseException) -> bool:
        return isinstance(error, ZeroDivisionError)


class Interrupt(Fault):
    """Ctrl-C at some moment."""

    timed = True

    def __enter__(self) -> "Fault":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return super().__enter__()

    def strike(self) -> None:
        self.struck = 1
        os.kill(os.getpid(), signal.SIGINT)

    def expects(self, error: BaseException) -> bool:
        return isinstance(error, KeyboardInterrupt)
