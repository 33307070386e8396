"""How long XLA has been compiling."""

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


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
