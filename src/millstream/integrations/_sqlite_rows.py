"""The rows of a table or a query, by number: their keys are read once, and a batch is fetched by one statement."""

import array
import json
import os
import pathlib
import sqlite3
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.errors import FileChanged
from millstream.files.changed import ABSENT, FileStamp, Stamp, file_changed, file_stamp
from millstream.files.data_files import LocalFile, local_path
from millstream.text.errors import describe_value, require_names

Parameters = Sequence[Any] | Mapping[str, Any]

_CACHE_KIB = 16 << 10  # of pages that a connection keeps; SQLite's own 2 MB are little for rows from everywhere
_FEW = 900  # keys that are bound one by one, which is faster; SQLite has a limit of its own
_MANY = 10_000  # rows, from which on it hurts to go through all of them for every batch


class Database:
    """A database in a file, which waits up to `timeout` seconds for a program that writes to it.

    A copy in another process opens connections of its own.
    """

    def __init__(self, caller: str, path: str | os.PathLike[str], timeout: float) -> None:
        self._caller = caller
        self._timeout = timeout
        self.path = os.fspath(LocalFile(caller, local_path(caller, path)).path)
        self._local = threading.local()
        self._stamp = self._found_stamp()

    @property
    def stamps(self) -> list[FileStamp]:
        """The stamps of the file and its log."""
        return [file_stamp(path) for path in (self.path, f"{self.path}-wal")]

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
        """Refuse to continue if anything has been written to the database, or another file has taken its place."""
        # The file tells of what happened before this connection was made; the connection, of what the file's clock
        # is too coarse for.
        if self._connection.has_news() or self._found_stamp() != self._stamp:
            raise file_changed(self._caller, self.path, kind="database")

    @property
    def _connection(self) -> "_Connection":
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _Connection(self.path, self._timeout)
        return connection

    def _found_stamp(self) -> tuple[Stamp, Stamp]:
        """The stamps of the file and its log. They are not opened: closing them would drop SQLite's locks."""
        log = Stamp.of(f"{self.path}-wal")
        return Stamp.of(self.path), log if log.size else ABSENT  # readers make an empty log, too


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


class KeyedRows:
    """Rows in the order of their keys.

    Values enter a statement as parameters only, names of tables and columns after they were found in the database.

    Args:
        caller: The caller's name, for errors.
        database: Where they are.
        table: The name of a table, or None.
        query: A SELECT statement, or None.
        parameters: Values for the placeholders of the query.
        key: The column that tells rows apart; None for the number that SQLite gives every row of a table.
        columns: The columns to fetch; None for all of them.
    """

    def __init__(
        self,
        caller: str,
        database: Database,
        table: str | None,
        query: str | None,
        parameters: Parameters,
        key: str | None,
        columns: Sequence[str] | None,
    ) -> None:
        self._caller = caller
        self._database = database
        self.stamps = database.stamps
        self._parameters = parameters
        if table is not None:
            self._require_table(table)
        # A query ends in a new line, so that a comment in it cannot hide the bracket.
        origin = _quoted(table) if table is not None else f"({str(query).rstrip().rstrip(';')}\n)"
        known = database.column_names(f"SELECT * FROM {origin} LIMIT 0", parameters)
        self.columns = known if columns is None else self._known("columns", columns, known)
        self._key = self._row_number(table, known) if key is None else _quoted(*self._known("key", [key], known))
        self._all_keys = f"SELECT {self._key} FROM {origin} ORDER BY {self._key}"
        chosen = ", ".join([self._key, *map(_quoted, self.columns)])
        self._some_rows = f"SELECT {chosen} FROM {origin} WHERE {self._key} IN "
        self._keys = self._read_keys()
        self._warn_of_scans()

    def __len__(self) -> int:
        return len(self._keys)

    def fetch(self, indices: np.ndarray) -> list[tuple[Any, ...]]:
        """The rows at `indices`, in this order, each with its key in front."""
        wanted = self._keys[indices].tolist()
        try:
            found = {row[0]: row for row in self._with_keys(wanted)}
            return [found[key] for key in wanted]
        except (sqlite3.Error, FileChanged) as error:
            raise self._unreadable(indices, error) from error
        except KeyError as error:
            key = error.args[0]
            raise FileChanged(
                f"{self._caller} reads {self._database.path}, and sample {indices[wanted.index(key)]}, the row with "
                f"{self._key} {key!r}, is not there any more. Leave the database alone while it is read, and build the "
                "source again."
            ) from None

    def _with_keys(self, wanted: list[Any]) -> list[tuple[Any, ...]]:
        return self._database.fetch(*self._statement(wanted))

    def _statement(self, wanted: list[Any]) -> tuple[str, Parameters]:
        """The statement for the rows with some keys, and what is bound to it."""
        if isinstance(self._parameters, dict):
            name = (
                max((*self._parameters, "wanted_keys"), key=len) + "_"
            )  # longer than all of the user's, so none of them
            listed = f"(SELECT value FROM json_each(:{name}))"
            return self._some_rows + listed, {**self._parameters, name: json.dumps(wanted)}
        if len(wanted) > _FEW:
            listed = "(SELECT value FROM json_each(?))"
            return self._some_rows + listed, (*self._parameters, json.dumps(wanted))
        return f"{self._some_rows}({', '.join('?' * len(wanted))})", (*self._parameters, *wanted)

    def _unreadable(self, indices: np.ndarray, error: Exception) -> FileChanged:
        """What is raised when a batch cannot be read; it names the first sample that cannot be."""
        said = (
            f"{self._caller} cannot read {self._database.path}: {error}." if isinstance(error, sqlite3.Error) else error
        )
        for index, key in zip(indices.tolist(), self._keys[indices].tolist(), strict=True):
            try:
                self._with_keys([key])
            except (sqlite3.Error, FileChanged):
                return FileChanged(f"{said} This was at sample {index}, the row with {self._key} {key!r}.")
        return FileChanged(f"{said} This was at samples {describe_value(indices.tolist())}.")

    def _require_table(self, table: str) -> None:
        found = self._database.fetch("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name")
        if (table,) not in found:
            raise ValueError(
                f"{self._caller} needs the name of a table or view in {self._database.path}. "
                f"Got {describe_value(table)}; there are {[name for (name,) in found]}."
            )

    def _known(self, argument: str, chosen: Iterable[str], known: list[str]) -> list[str]:
        names = require_names(self._caller, argument, chosen)
        if not names or len(set(names)) < len(names) or not set(names) <= set(known):
            raise ValueError(
                f"{self._caller} needs {argument} that are there, each once. Got {describe_value(chosen)}; there are "
                f"{known}."
            )
        return names

    def _row_number(self, table: str | None, known: list[str]) -> str:
        """What the number is called that SQLite gives every row of a table."""
        taken = {name.lower() for name in known}
        name = next((name for name in ("rowid", "_rowid_", "oid") if name not in taken), None)
        if table is not None and name is not None:
            try:
                if self._database.fetch(f"SELECT {name} FROM {_quoted(table)} LIMIT 1") != [(None,)]:
                    return name
            except sqlite3.OperationalError:
                pass  # a view, or a table that was made without; some builds have NULL there
        raise ValueError(
            f"{self._caller} needs key= for a query, a view and a table without rowid: a column of whole numbers or "
            f"text that tells rows apart. There are {known}."
        )

    def _read_keys(self) -> np.ndarray:
        try:
            numbers = array.array("q", (key for (key,) in self._database.execute(self._all_keys, self._parameters)))
            keys = np.array(numbers, np.int64)
            same = int(np.count_nonzero(keys[1:] == keys[:-1]))
        except TypeError:  # something that is not a whole number
            texts = [key for (key,) in self._database.execute(self._all_keys, self._parameters)]
            kinds = {type(key).__name__ for key in texts}
            if kinds != {"str"}:
                raise ValueError(
                    f"{self._caller} needs whole numbers or text as keys, one kind of them. {self._key} has values of "
                    f"the types {sorted(kinds)}."
                ) from None
            keys, same = np.array(texts, object), len(texts) - len(set(texts))
        self._database.check()
        if same:
            raise ValueError(
                f"{self._caller} needs a key that tells rows apart. {self._key} has {len(keys) - same:,} values in "
                f"{len(keys):,} rows."
            )
        return keys

    def _warn_of_scans(self) -> None:
        """Say so if every batch goes through all rows."""
        if len(self) < _MANY:
            return
        statement, bound = self._statement(self._keys[:1].tolist())
        plan = self._database.fetch(f"EXPLAIN QUERY PLAN {statement}", bound)
        steps = [step for *_, step in plan if step.startswith("SCAN ") and not step.startswith("SCAN json_each")]
        if steps:
            warnings.warn(
                f"{self._caller} has {len(self):,} rows, and SQLite goes through all of them for every batch "
                f"({steps[0]}). Make an index on {self._key}, or write what the query gives into a table of its own.",
                stacklevel=4,
            )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
