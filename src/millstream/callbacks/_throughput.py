"""How fast a loop is, and what it waits for."""

import dataclasses
import threading
import time

import jax

from millstream.loops.callback import Callback
from millstream.loops.elapsed import Elapsed
from millstream.loops.log_entries import Logs
from millstream.loops.loop_state import LoopState, Waits
from millstream.text.errors import require_positive

_EVENT = "/jax/core/compile/backend_compile_duration"
_CALLER = "throughput"


class _Total:
    """Seconds of all compilations of this process since somebody first asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listens = False
        self._seconds = 0.0

    def seconds(self) -> float:
        """The seconds so far; the first call begins to count."""
        with self._lock:
            if not self._listens:
                jax.monitoring.register_event_duration_secs_listener(self._hear)
                self._listens = True
            return self._seconds

    def _hear(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            with self._lock:  # programs can be compiled in several threads
                self._seconds += duration_secs


compile_seconds = _Total().seconds


@dataclasses.dataclass(frozen=True)
class _Moment:
    """What had been counted at a moment."""

    steps: int
    samples: int
    clock: float
    data: float
    evaluation: float
    compiling: float


class throughput(Callback):
    """Log how fast a loop is, over the time since it was last called: use it every 100 steps, say, or every 10 seconds.

    It adds to the collection `throughput`, and waits for nothing: the host is at most two steps ahead of the device.
    In `callbacks=` it is called at the end of each epoch.

    - `seconds`: The time measured over, without tests and other loops inside this one.
    - `samples_per_second`, `steps_per_second`.
    - `step_time`: Seconds per step.
    - `data_wait`: The share of the time spent waiting for batches, from 0 to 1.
    - `compile_time`: Seconds that XLA compiled, anywhere in the process.
    - `flops_per_second`, and `mfu`, the share of what the devices could do; if `flops_per_step` and `peak_flops` are
      given.

    Example:
        >>> batches = [np.ones(4)] * 20
        >>> tasks = {ms.every(1): lambda state: state + 1, ms.every(10): ms.callbacks.throughput()}
        >>> _, history, _ = ms.loop(0, batches, tasks)
        >>> len(history.collect("samples_per_second"))
        2

        By hand, where waiting for data cannot be told from the rest:

        >>> meter, logs = ms.callbacks.throughput(), ms.logs()
        >>> for elapsed, batch in ms.loops.elapse(batches):
        ...     logs.updates = meter(elapsed)

    Args:
        flops_per_step: Floating-point operations of one step, of all devices together; for a compiled step,
            `step.lower(...).compile().cost_analysis()["flops"]` estimates them.
        peak_flops: How many per second all devices together are capable of.
    """

    def __init__(self, *, flops_per_step: float | None = None, peak_flops: float | None = None) -> None:
        for name, value in (("flops_per_step", flops_per_step), ("peak_flops", peak_flops)):
            if value is not None:
                require_positive(_CALLER, name, value)
        if peak_flops is not None and flops_per_step is None:
            raise ValueError(f"{_CALLER} needs flops_per_step for peak_flops to be of use.")
        self._flops_per_step = flops_per_step
        self._peak_flops = peak_flops
        self._last: _Moment | None = None
        compile_seconds()

    def start(self, loop_state: LoopState) -> None:
        """A loop begins, and with it the first window."""
        self._last = _moment(loop_state.elapsed, loop_state.waits)

    def __loop_callback__(self, loop_state: LoopState) -> Logs | None:
        return self._measure(_moment(loop_state.elapsed, loop_state.waits), waits=True)

    def on_epoch_end(self, state: object, batch: object, elapsed: Elapsed, loop_state: LoopState) -> Logs | None:
        """Measure at the end of an epoch."""
        return self.__loop_callback__(loop_state)

    def __call__(self, elapsed: Elapsed) -> Logs | None:
        """Use it by hand; None the first time, which begins the first window."""
        return self._measure(_moment(elapsed, Waits()), waits=False)

    def _measure(self, now: _Moment, *, waits: bool) -> Logs | None:
        last = self._last
        if last is not None and now.steps == last.steps:
            return None
        self._last = now
        if last is None or now.steps < last.steps:  # by hand, a new run begins without a word
            return None
        steps, samples = now.steps - last.steps, now.samples - last.samples
        seconds = (now.clock - last.clock) - (now.evaluation - last.evaluation)
        entries = {
            "seconds": seconds,
            "samples_per_second": samples / seconds,
            "steps_per_second": steps / seconds,
            "step_time": seconds / steps,
            "compile_time": now.compiling - last.compiling,
        }
        if waits:
            entries["data_wait"] = (now.data - last.data) / seconds
        if self._flops_per_step is not None:
            entries["flops_per_second"] = self._flops_per_step * steps / seconds
            if self._peak_flops is not None:
                entries["mfu"] = entries["flops_per_second"] / self._peak_flops
        return Logs().add_entries("throughput", entries)


def _moment(elapsed: Elapsed, waits: Waits) -> _Moment:
    return _Moment(elapsed.steps, elapsed.samples, time.perf_counter(), waits.data, waits.evaluation, compile_seconds())
