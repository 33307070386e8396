"""Lance datasets as sources."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.errors import FileChanged
from millstream.files.changed import FileStamp, describe_samples, file_changed, file_unreadable
from millstream.files.data_files import local_path
from millstream.integrations._chunked import as_columns
from millstream.integrations._table import Row, TableSource, check_options, chosen_columns, rows_of
from millstream.plan.ordering import Ordering
from millstream.reading.contracts import PyTree
from millstream.text.errors import needs, require_int

_CALLER = "LanceSource"
_PLACE = re.compile(r",? ?/\S+\.rs:\d+:\d+")  # of an error in Lance's own code, on the machine that built it


class LanceSource(TableSource):
    """The rows of one version of a Lance dataset, in any order, read as they are needed.

    The version is fixed when the source is built: what is appended, updated or deleted later is not seen, in this
    process or in workers. Rows that the version has deleted are left out. Threads read at the same time, and worker
    processes open the same version for themselves.

    Numbers and bools stay what they are, tensors and lists of numbers become arrays; text, gaps and the like stay
    Python's own values. A `HostMapTransform` gets lists of any length, and makes them equal.

    Example:
        >>> import lance, pyarrow as pa
        >>> from millstream.integrations.lance import LanceSource
        >>> table = pa.table({"wind": [3.5, 4.5, 5.5], "town": ["Ulm", "Bonn", "Kiel"]})
        >>> dataset = lance.write_dataset(table, "weather.lance")
        >>> source = LanceSource("weather.lance", columns=["wind"])
        >>> dataset = lance.write_dataset(table, "weather.lance", mode="append")
        >>> source.read(np.array([2, 0]))
        {'wind': array([5.5, 3.5], dtype=float32)}
        >>> len(source), len(LanceSource("weather.lance"))
        (3, 6)

    Args:
        path: The folder of the dataset.
        columns: The columns to read; all of them by default.
        version: The number or the tag of the version to read; the latest by default.
        row_fn: Makes a sample of a row, a dict of Python's own values.
        ordering: "shuffle" for a new order every epoch, "sequential", or a `Shuffle`.
        prefetch_size: How many samples are read before they are needed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        *,
        version: int | str | None = None,
        row_fn: Callable[[Row], PyTree] | None = None,
        ordering: Ordering = "shuffle",
        prefetch_size: int = 64,
    ) -> None:
        with needs(_CALLER, "pylance", "lance"):
            import lance  # noqa: F401
        check_options(_CALLER, ordering, prefetch_size, row_fn)
        if version is not None and not isinstance(version, str):
            require_int(_CALLER, "version", version, least=1, most=(1 << 63) - 1)
        table = _LanceTable(_folder(path), version, columns)
        super().__init__(_CALLER, table, ordering, prefetch_size, row_fn)


class _LanceTable:
    """The rows of a version of a dataset. A copy in another process opens that version again.

    Attributes:
        blocks: How many rows each fragment has.
        stamps: Of the version, which the names of its files tell from others.
    """

    divides_blocks = True

    def __init__(self, path: str, version: int | str | None, columns: Sequence[str] | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._dataset = _open(path, version)
        with _understood(self._damaged):
            self._version: int = self._dataset.version
            schema = self._dataset.schema
            fragments = self._dataset.get_fragments()
            self.blocks = np.array([fragment.metadata.num_rows for fragment in fragments], np.int64)
            self.stamps: Sequence[FileStamp] = (_stamp(path, self._dataset),)
        self._columns = chosen_columns(_CALLER, schema.names, columns)
        for name in self._columns:
            if str(getattr(schema.field(name).type, "extension_name", "")).startswith("lance.blob"):
                raise ValueError(
                    f"{_CALLER} does not read blobs. {path} has some in column {name!r}. Choose other columns with "
                    "columns=[...], and read blobs with lance's take_blobs in a function of your own."
                )

    def __len__(self) -> int:
        return int(self.blocks.sum())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_dataset", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._dataset, self._lock = None, threading.Lock()

    def take(self, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        """The rows at `indices`, an array for each column."""
        table, places = self._read(indices)
        return {name: column.take(places, axis=0) for name, column in as_columns(table).items()}

    def samples(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices` as functions on the host get them."""
        return rows_of(self.take(indices))

    def rows(self, indices: np.ndarray) -> Sequence[Row]:
        """The rows at `indices`, each as a dict of Python's own values."""
        table, places = self._read(indices)
        return table.take(places).to_pylist()

    def _read(self, indices: np.ndarray) -> tuple[Any, np.ndarray]:
        """The rows at `indices`, each once, as an Arrow table, and where each index is in it."""
        wanted, places = np.unique(indices, return_inverse=True)
        with _understood(lambda error: file_unreadable(_CALLER, self._path, indices, error)):
            table = self._opened(indices).take(wanted, columns=self._columns)
            table.validate(full=True)  # a damaged file could point anywhere
            if len(table) != len(wanted):
                raise ValueError(f"{len(table)} rows came for {len(wanted)}")
        return table, places

    def _opened(self, indices: np.ndarray) -> Any:
        """The dataset, which may have been replaced by one that has a version of this number, too."""
        with self._lock:
            if self._dataset is None:
                dataset = _open(self._path, self._version)
                if (_stamp(self._path, dataset),) != self.stamps:
                    raise file_changed(_CALLER, self._path, f"noticed at {describe_samples(indices)}", "dataset")
                self._dataset = dataset
            return self._dataset

    def _damaged(self, error: Exception) -> ValueError:
        return _not_a_dataset(self._path, error)


def _stamp(path: str, dataset: Any) -> FileStamp:
    """The name of a dataset, its rows, and its version with a hash of what the version says of its files."""
    fragments = [fragment.metadata.to_json() for fragment in dataset.get_fragments()]
    files = hashlib.sha256(json.dumps(fragments, sort_keys=True).encode()).hexdigest()[:32]
    return os.path.basename(path), dataset.count_rows(), f"version {dataset.version}, {files}"


def _folder(path: str | os.PathLike[str]) -> str:
    """The absolute path of a folder that is there."""
    found = pathlib.Path(os.path.abspath(local_path(_CALLER, path)))
    if not found.exists():
        raise FileNotFoundError(f"{_CALLER}: {found} does not exist.")
    if not (found / "_versions").is_dir():
        raise ValueError(
            f"{_CALLER} needs the folder of a Lance dataset, which has a folder _versions in it. {found} has none."
        )
    return str(found)


def _open(path: str, version: int | str | None) -> Any:
    """A version of a dataset."""
    import lance

    def refused(error: Exception) -> Exception:
        latest = None if version is None else _open(path, None)  # which says so if the dataset is damaged
        if latest is None:
            return _not_a_dataset(path, error)
        return ValueError(
            f"{_CALLER} cannot open version {version!r} of {path}, whose latest is {latest.version}: {error}. "
            "Choose one of those that dataset.versions() and dataset.tags.list() have."
        )

    with _understood(refused):
        return lance.dataset(path, version=version)


def _not_a_dataset(path: str, error: Exception) -> ValueError:
    return ValueError(f"{_CALLER} cannot open {path} as a Lance dataset: {error}. It is cut short or damaged.")


@contextlib.contextmanager
def _understood(refused: Callable[[Exception], Exception]) -> Iterator[None]:
    """Around calls of Lance: what it raises, panics included, which are no `Exception`, becomes an error of ours."""
    try:
        yield
    except FileChanged:  # which is one of ours
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt, SystemExit
        text = _PLACE.sub("", str(error).partition("\n")[0])
        raise refused(ValueError(text)) from None
