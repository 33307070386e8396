"""What is for one thread at a time."""

import threading
from typing import Any


class OneThread:
    """A block that a second thread is refused while one is inside, as Python's generators refuse it.

    It is a dict with one entry: `setdefault` is atomic, and an interrupt that comes between it and the block leaves the
    entry to the thread that has made it, which may enter again.

    Args:
        what: What is used, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._inside: dict[str, int] = {}

    def __enter__(self) -> None:
        own = threading.get_ident()
        if self._inside.setdefault("thread", own) != own:
            raise ValueError(
                f"{self._what} is already executing in another thread, and is for one thread at a time. Give every "
                "thread an iterator of its own, or draw in one thread and hand batches on in a queue."
            )

    def __exit__(self, *error: Any) -> None:
        self._inside.pop("thread", None)
