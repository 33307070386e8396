"""The loaders of the soak's cases: every kind of source, over files that are written once."""

import contextlib
import io
import os
import pathlib
import sqlite3
import tarfile
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import millstream as ms
from soak import trouble as readers
from soak.cases import GROUP, Case, Part
from soak.trouble import Trouble


def double(value: Any, mask: Any) -> Any:
    return {**value, "x": value["x"] * 2}


def jitter(value: Any, mask: Any, key: Any) -> Any:
    noise = (jax.random.key_data(key)[0] >> 8).astype(jnp.float32) * np.float32(2**-24)  # exact, so no rounding differs
    return {**value, "x": value["x"] + noise}


def samples_of(part: Part) -> dict[str, np.ndarray]:
    """All samples of a part as arrays."""
    rows = [readers.sample(part.first + index) for index in range(part.samples)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def written(part: Part, folder: pathlib.Path) -> pathlib.Path:
    """The file, or folder, with the samples of a part; written if it is not there.

    A program may be ended while it writes, so what is there under this name is whole.
    """
    path = folder / f"{part.first}-{part.samples}.{part.source}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            begun = pathlib.Path(aside) / path.name
            _WRITERS[part.source](samples_of(part), begun)
            with contextlib.suppress(OSError):  # another program was faster, and has put the same there
                begun.rename(path) if begun.is_dir() else os.link(begun, path)
    return path


def _write_npy(arrays: dict[str, np.ndarray], path: pathlib.Path) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def _write_csv(arrays: dict[str, np.ndarray], path: pathlib.Path) -> None:
    header = ",".join(["index", *(f"x{column}" for column in range(readers.WIDTH))])
    rows = [f"{i},{','.join(repr(float(x)) for x in xs)}" for i, xs in zip(*arrays.values(), strict=True)]
    path.write_text("\n".join([header, *rows]) + "\n")


def _write_sqlite(arrays: dict[str, np.ndarray], path: pathlib.Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, 'index' INTEGER, x BLOB)")
    rows = [(int(i), x.tobytes()) for i, x in zip(*arrays.values(), strict=True)]
    connection.executemany("INSERT INTO samples ('index', x) VALUES (?, ?)", rows)
    connection.commit()
    connection.close()


def _table(arrays: dict[str, np.ndarray]) -> Any:
    import pyarrow as pa

    xs = pa.FixedSizeListArray.from_arrays(pa.array(arrays["x"].reshape(-1)), readers.WIDTH)
    return pa.table({"index": pa.array(arrays["index"]), "x": xs})


def _write_parquet(arrays: dict[str, np.ndarray], path: pathlib.Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(_table(arrays), path, row_group_size=GROUP)


def _write_arrow(arrays: dict[str, np.ndarray], path: pathlib.Path) -> None:
    import pyarrow as pa

    table = _table(arrays)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=GROUP)


def _write_tar(arrays: dict[str, np.ndarray], path: pathlib.Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number, (index, x) in enumerate(zip(*arrays.values(), strict=True)):
            stream = io.BytesIO()
            np.save(stream, x)
            for name, data in {"x.npy": stream.getvalue(), "index": b"%d" % index}.items():
                info = tarfile.TarInfo(f"{number:04}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def _write_images(arrays: dict[str, np.ndarray], path: pathlib.Path) -> None:
    from PIL import Image

    (path / "all").mkdir(parents=True)
    for number, index in enumerate(arrays["index"]):
        Image.fromarray(readers.packed(int(index))).save(path / "all" / f"{number:04}.png")


_WRITERS = {
    "npy": _write_npy,
    "csv": _write_csv,
    "sqlite": _write_sqlite,
    "parquet": _write_parquet,
    "arrow": _write_arrow,
    "tar": _write_tar,
    "images": _write_images,
}


def source_of(part: Part, folder: pathlib.Path) -> list[Any]:
    """A source of a part's samples, and the stages that bring them into one form."""
    order = part.ordering
    if part.source == "arrays":
        return [ms.ArraySampleSource(samples_of(part), ordering=order)]
    if part.source == "function":
        return [ms.DiskSampleSource(part.samples, readers.Reader(part.first), ordering=order)]
    if part.source == "fill":
        items = range(part.first, part.first + part.samples)
        spec = {"index": ((), np.int32), "x": ((readers.WIDTH,), np.float32)}
        return [ms.sources.FillSource(items, readers.fill, spec, ordering=order)]
    if part.source == "items":
        return [ms.DatasetSource(readers.Items(part.first, part.samples), ordering=order)]
    return _source_of_file(part.source, str(written(part, folder)), order)


def _source_of_file(kind: str, path: str, order: ms.Shuffle) -> list[Any]:
    if kind == "npy":
        return [ms.NpySource(path, ordering=order)]
    if kind == "csv":
        dtypes = {"index": np.int32} | {f"x{column}": np.float32 for column in range(readers.WIDTH)}
        return [ms.CsvSource(path, dtype=dtypes, ordering=order), ms.HostMapTransform(readers.from_columns)]
    if kind == "images":
        return [ms.ImageFolderSource(path, ordering=order), ms.HostMapTransform(readers.from_picture)]
    if kind == "sqlite":
        from millstream.integrations.sqlite import SqliteSource

        arrays = {"x": ((readers.WIDTH,), np.float32)}
        return [SqliteSource(path, table="samples", columns=["index", "x"], arrays=arrays, ordering=order)]
    if kind == "parquet":
        from millstream.integrations.parquet import ParquetSource

        return [ParquetSource(path, ordering=order, cache_bytes=0)]
    if kind == "arrow":
        from millstream.integrations.arrow import ArrowSource

        return [ArrowSource(path, ordering=order)]
    from millstream.integrations.webdataset import WebDatasetSource

    return [WebDatasetSource(path, ordering=order), ms.HostMapTransform(readers.from_files)]


def loader_of(case: Case, files: pathlib.Path, trouble: Trouble, cache: pathlib.Path, timeout: float | None) -> Any:
    """The loader of a case.

    Args:
        case: The case.
        files: Where its files are.
        trouble: What goes wrong at samples.
        cache: Where batches are kept, if they are.
        timeout: How long to wait for a batch; None for the usual time.
    """
    options: dict[str, Any] = {"prefetch": case.prefetch, "on_error": case.on_error}
    limits = {"ordered": case.ordered, "timeout": timeout}
    if case.executor == "threads":
        options["executor"] = ms.Threads(case.workers, **limits)
    elif case.executor == "processes":
        options["executor"] = ms.Processes(case.workers, **limits)
    if case.cached:
        options["cache"] = ms.BatchCache(cache)
    loaders = []
    for part in case.parts:
        stages = source_of(part, files)
        if case.executor != "in graph":
            stages.append(ms.HostMapTransform(trouble))
        stages += _maps_of(part, case.buffered)
        loaders.append(ms.DataLoader(stages, **options))
    return loaders[0] if len(loaders) == 1 else ms.loader.MixedLoader(loaders, interleave=case.interleaved)


def _maps_of(part: Part, buffered: bool) -> list[Any]:
    if buffered:
        return [ms.BufferTransform(8, 6, part.batches[0][0], "sequential")]
    host = {"doubled": ms.HostMapTransform, "shaken": ms.RandomHostMapTransform}
    batches = [
        ms.BatchTransform(size, drop_last=ending == "drop", pad_last_batch=ending == "pad")
        for size, ending in part.batches
    ]
    stages: list[Any] = [] if part.host_map is None else [host[part.host_map](getattr(readers, part.host_map))]
    if part.device_map in ("before", "random"):
        stages.append(ms.MapTransform(double) if part.device_map == "before" else ms.RandomMapTransform(jitter))
    return [*stages, *batches, *([ms.MapTransform(double)] if part.device_map == "after" else [])]


def words_of(seed: int) -> np.ndarray:
    """The key of a run with this seed, as its raw words: those of `jax.random.key`, without starting JAX."""
    return np.array([0, seed], np.uint32)
