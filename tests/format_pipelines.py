"""The same small pipelines over every format that people have; packages are imported when a pipeline is built."""

import functools
import io
import json
import pathlib
import sqlite3
import tarfile
import tempfile
from typing import Any

import numpy as np
from pipelines import BATCH, SAMPLES, data, sample

import millstream as ms

FOLDER = tempfile.TemporaryDirectory()


def place(name: str) -> str:
    return f"{FOLDER.name}/{name}"


def table() -> Any:
    """The samples as a table of Arrow."""
    import polars

    return polars.DataFrame(data()).to_arrow()


# Files are written once: sources notice one that changes.


@functools.cache
def parquet_file() -> str:
    """In three row groups."""
    import pyarrow.parquet as pq

    pq.write_table(table(), place("samples.parquet"), row_group_size=4)
    return place("samples.parquet")


@functools.cache
def arrow_file() -> str:
    """In three record batches."""
    import pyarrow as pa

    with pa.ipc.new_file(place("samples.arrow"), table().schema) as file:
        file.write_table(table(), max_chunksize=4)
    return place("samples.arrow")


@functools.cache
def database() -> str:
    connection = sqlite3.connect(place("samples.db"))
    connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, image BLOB, label INTEGER)")
    rows = [(leaf.tobytes(), int(label)) for leaf, label in zip(*data().values(), strict=True)]
    connection.executemany("INSERT INTO samples (image, label) VALUES (?, ?)", rows)
    connection.commit()
    connection.close()
    return place("samples.db")


@functools.cache
def tar_file() -> str:
    with tarfile.open(place("samples.tar"), "w") as tar:
        for number in range(SAMPLES):
            stream = io.BytesIO()
            np.save(stream, data()["image"][number])
            for name, contents in {"image.npy": stream.getvalue(), "label.cls": b"%d" % number}.items():
                info = tarfile.TarInfo(f"{number:04}.{name}")
                info.size = len(contents)
                tar.addfile(info, io.BytesIO(contents))
    return place("samples.tar")


@functools.cache
def safetensors_file() -> str:
    import safetensors.numpy

    safetensors.numpy.save_file(data(), place("samples.safetensors"))
    return place("samples.safetensors")


@functools.cache
def records() -> str:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(place("samples.array_record"), "group_size:1")
    for image, label in zip(*data().values(), strict=True):
        writer.write(image.tobytes() + label.tobytes())
    writer.close()
    return place("samples.array_record")


def from_record(record: bytes) -> dict[str, np.ndarray]:
    return {
        "image": np.frombuffer(record[:6], np.uint8).reshape(2, 3, 1),
        "label": np.frombuffer(record, np.int32, 1, 6)[0],
    }


@functools.cache
def zarr_group() -> str:
    import zarr

    group = zarr.create_group(place("samples.zarr"))
    for name, array in data().items():
        group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(4, *array.shape[1:]))[:] = array
    return place("samples.zarr")


@functools.cache
def token_file() -> str:
    """A document for each sample: its label, and an end."""
    np.stack([np.arange(1, SAMPLES + 1), np.zeros(SAMPLES)], 1).astype(np.uint16).tofile(place("samples.bin"))
    return place("samples.bin")


def labelled(document: dict[str, np.ndarray]) -> dict[str, Any]:
    return {"label": np.int32(document["tokens"][0] - 1)}


@functools.cache
def json_lines() -> str:
    with open(place("samples.jsonl"), "w") as file:
        file.writelines(json.dumps({"label": number, "half": number / 2}) + "\n" for number in range(SAMPLES))
    return place("samples.jsonl")


@functools.cache
def tfrecord_file() -> str:
    from tensorboardX.record_writer import RecordWriter

    writer = RecordWriter(place("samples.tfrecord"))
    for image, label in zip(*data().values(), strict=True):
        writer.write(image.tobytes() + label.tobytes())
    writer.close()
    return place("samples.tfrecord")


@functools.cache
def hdf5_file() -> str:
    import h5py

    with h5py.File(place("samples.h5"), "w") as file:
        for name, array in data().items():
            file.create_dataset(name, data=array, chunks=(4, *array.shape[1:]) if name == "image" else None)
    return place("samples.h5")


def hdf5() -> Any:
    from millstream.integrations.hdf5 import Hdf5Source

    return [Hdf5Source(hdf5_file()), BATCH]


@functools.cache
def lance_folder() -> str:
    """In three fragments."""
    import lance
    import pyarrow as pa

    columns = {"image": pa.FixedShapeTensorArray.from_numpy_ndarray(data()["image"]), "label": data()["label"]}
    lance.write_dataset(pa.table(columns), place("samples.lance"), max_rows_per_file=4, max_rows_per_group=4)
    return place("samples.lance")


def lance() -> Any:
    from millstream.integrations.lance import LanceSource

    return [LanceSource(lance_folder()), BATCH]


@functools.cache
def mds_folder() -> str:
    rows = [image.tobytes() + label.tobytes() for image, label in zip(*data().values(), strict=True)]
    places = np.cumsum([4 * (SAMPLES + 2), *map(len, rows)]).astype(np.uint32)
    contents = np.uint32(SAMPLES).tobytes() + places.tobytes() + b"".join(rows)
    shard = {"format": "mds", "version": 2, "compression": None, "samples": SAMPLES, "zip_data": None}
    shard |= {"column_names": ["image", "label"], "column_encodings": ["ndarray:uint8:2,3,1", "int32"]}
    shard |= {"column_sizes": [6, 4], "raw_data": {"basename": "a.mds", "bytes": len(contents)}}
    folder = pathlib.Path(place("mds"))
    folder.mkdir()
    (folder / "a.mds").write_bytes(contents)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return str(folder)


@functools.cache
def prepared_folder() -> str:
    """In three shards of Arrow."""
    source = ms.ArraySampleSource(data(), ordering="sequential")
    ms.prepare(source, place("prepared"), format="arrow", samples_per_shard=4)
    return place("prepared")


def unpacked(key: str, files: dict[str, bytes]) -> dict[str, Any]:
    return {"image": np.load(io.BytesIO(files["image.npy"])), "label": np.int32(files["label.cls"])}


def polars_frame() -> Any:
    import polars

    from millstream.integrations.polars import PolarsSource

    return [PolarsSource(polars.DataFrame(data())), BATCH]


def pandas_frame() -> Any:
    import pandas

    from millstream.integrations.pandas import PandasSource

    return [PandasSource(pandas.DataFrame({name: list(leaf) for name, leaf in data().items()})), BATCH]


def pandas_rows() -> Any:
    import pandas

    from millstream.integrations.pandas import PandasRows

    return [ms.DatasetSource(PandasRows(pandas.DataFrame({"label": data()["label"]}))), BATCH]


def arrow(source: Any) -> Any:
    from millstream.integrations.arrow import ArrowSource

    return [ArrowSource(source), ms.BatchTransform(4, pad_last_batch=False)]


def parquet(**options: Any) -> Any:
    from millstream.integrations.parquet import ParquetSource

    return [ParquetSource(parquet_file(), **options), BATCH]


def sqlite() -> Any:
    from millstream.integrations.sqlite import SqliteSource

    arrays = {"image": ((2, 3, 1), np.uint8)}
    return [SqliteSource(database(), table="samples", columns=["image", "label"], arrays=arrays), BATCH]


def hugging_face() -> Any:
    import datasets

    from millstream.integrations.huggingface import HuggingFaceSource

    features = datasets.Features(image=datasets.Array3D((2, 3, 1), "uint8"), label=datasets.Value("int32"))
    rows = {name: leaf.tolist() for name, leaf in data().items()}
    return [HuggingFaceSource(datasets.Dataset.from_dict(rows, features)), BATCH]


def grain() -> Any:
    import grain

    from millstream.integrations.grain import GrainSource

    return [GrainSource(grain.MapDataset.source([sample(index) for index in range(SAMPLES)])), BATCH]


def array_record() -> Any:
    from millstream.integrations.array_record import ArrayRecordSource

    return [ArrayRecordSource(records(), from_record), BATCH]


def zarr() -> Any:
    from millstream.integrations.zarr import ZarrSource

    return [ZarrSource(zarr_group()), BATCH]


def tar() -> Any:
    from millstream.integrations.webdataset import WebDatasetSource

    return [WebDatasetSource(tar_file(), sample_fn=unpacked), BATCH]


def safetensors() -> Any:
    from millstream.integrations.safetensors import SafetensorsSource

    return [SafetensorsSource([safetensors_file()]), BATCH]


FORMATS = {
    "host, Polars": polars_frame,
    "host, pandas": pandas_frame,
    "host, pandas rows": pandas_rows,
    "host, Arrow table": lambda: arrow(table()),
    "host, Arrow file": lambda: arrow(arrow_file()),
    "host, Parquet": parquet,
    "host, Parquet, little kept": lambda: parquet(cache_bytes=0),
    "host, SQLite": sqlite,
    "host, Hugging Face": hugging_face,
    "host, Grain": grain,
    "host, ArrayRecord": array_record,
    "host, zarr": zarr,
    "host, tar": tar,
    "host, safetensors": safetensors,
    "host, token file": lambda: [ms.sources.TokenFileSource(token_file(), np.uint16, end_token=0).map(labelled), BATCH],
    "host, JSON lines": lambda: [ms.sources.JsonlSource(json_lines()), BATCH],
    "host, prepared": lambda: [ms.sources.PreparedSource(prepared_folder()), BATCH],
    "host, MDS": lambda: [ms.sources.MdsSource(mds_folder()), BATCH],
    "host, HDF5": hdf5,
    "host, Lance": lance,
    "host, TFRecord": lambda: [ms.sources.TFRecordSource(tfrecord_file()).map(from_record), BATCH],
}
