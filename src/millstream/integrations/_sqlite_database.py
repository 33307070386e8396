"""An SQLite database that is only read: a connection for every thread, and what tells that it has changed."""

import os
import pathlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millstream.files.changed import FileChanged
from millstream.files.data_files import LocalFile, local_path

Parameters = Sequence[Any] | Mapping[str, Any]

_CACHE_KIB = 16 << 10  # of pages that a connection keeps; SQLite's own 2 MB are little for rows from everywhere


class Database:
    """A database in a file. A copy in another process opens connections of its own.

    Args:
        who: Who speaks in errors.
        path: The file.
        timeout: Seconds to wait for another program that writes to it.
    """

    def __init__(self, who: str, path: str | os.PathLike[str], timeout: float) -> None:
        self._who = who
        self._timeout = timeout
        self.path = os.fspath(LocalFile(who, local_path(who, path)).path)
        self._local = threading.local()
        self._stamp = self._found_stamp()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._local = threading.local()

    def execute(self, statement: str, parameters: Parameters = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a statement, one by one; what has changed meanwhile is for `check` to say."""
        return self._connection.database.execute(statement, parameters)

    def fetch(self, statement: str, parameters: Parameters = ()) -> list[tuple[Any, ...]]:
        """The rows of a statement; `FileChanged` if the database is not the one it was."""
        rows = self._connection.database.execute(statement, parameters).fetchall()
        self.check()
        return rows

    def column_names(self, statement: str, parameters: Parameters = ()) -> list[str]:
        """How the columns of a statement are called."""
        return [name for name, *_ in self._connection.database.execute(statement, parameters).description]

    def check(self) -> None:
        """Refuse to go on if anything has been written to the database, or another file has taken its place."""
        # The file tells of what happened before this connection was made; the connection, of what the file's clock
        # is too coarse for.
        if self._connection.has_news() or self._found_stamp() != self._stamp:
            raise FileChanged(
                f"{self._who} reads {self.path}, and the database has changed since it was opened. "
                "Leave it alone while it is read, and build the source again."
            )

    @property
    def _connection(self) -> "_Connection":
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _Connection(self.path, self._timeout)
        return connection

    def _found_stamp(self) -> tuple[int, ...]:
        """What changes with the file or its log. It is not opened: closing it would drop SQLite's locks."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return ()
        try:
            log = os.stat(f"{self.path}-wal")
        except FileNotFoundError:
            log = None
        # Readers make an empty log, too.
        logged = (log.st_size, log.st_mtime_ns) if log is not None and log.st_size else ()
        return found.st_ino, found.st_size, found.st_mtime_ns, *logged


class _Connection:
    """One connection, closed when its thread ends or the database is forgotten."""

    def __init__(self, path: str, timeout: float) -> None:
        address = f"{pathlib.Path(path).as_uri()}?mode=ro"
        # No other thread uses it, but another may be the one to collect it.
        self.database = sqlite3.connect(address, uri=True, timeout=timeout, check_same_thread=False)
        self.database.execute("PRAGMA trusted_schema = OFF")
        self.database.execute(f"PRAGMA cache_size = {-_CACHE_KIB}")
        self._version = self._found_version()

    def has_news(self) -> bool:
        """Whether anybody has written to the database since this connection was made."""
        return self._found_version() != self._version

    def _found_version(self) -> int:
        return self.database.execute("PRAGMA data_version").fetchone()[0]

    def __del__(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
