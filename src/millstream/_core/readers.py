"""A few threads that run tasks. They never keep the interpreter alive, and end when nobody holds the pool."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Task = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


class Readers:
    """A pool of daemon threads, started with the first task.

    Example:
        >>> readers = Readers(2)
        >>> readers.submit(pow, 2, 5).result()
        32
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads: list[threading.Thread] = []
        # The threads know the queue alone, so that a forgotten pool is collected, and its threads with it.
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._end = weakref.finalize(self, _end, self._tasks, count)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Run a function in one of the threads."""
        if not self._threads:
            make = lambda number: threading.Thread(  # noqa: E731
                target=_work, args=(self._tasks,), daemon=True, name=f"millstream-reader-{number}"
            )
            self._threads = [make(number) for number in range(self._count)]
            for thread in self._threads:
                thread.start()
        future: Future[Any] = Future()
        self._tasks.put((function, arguments, future))
        return future

    def close(self) -> None:
        """End the threads after the tasks they are at; closing twice does no harm."""
        self._end()


def _end(tasks: "queue.SimpleQueue[_Task | None]", count: int) -> None:
    try:
        while True:
            waiting = tasks.get_nowait()
            if waiting is not None:
                waiting[2].cancel()
    except queue.Empty:
        pass
    for _ in range(count):
        tasks.put(None)


def _work(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        function, arguments, future = task
        if future.set_running_or_notify_cancel():
            try:
                result = function(*arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        del task, function, arguments, future  # a waiting thread holds on to nothing
