"""Which source suits data that are not one yet, as a line to write."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

_TABLES = {
    ("pandas", "DataFrame"): "millstream.integrations.pandas.PandasSource(frame)",
    ("polars", "DataFrame"): "millstream.integrations.polars.PolarsSource(frame)",
    ("polars", "LazyFrame"): "millstream.integrations.polars.PolarsSource(frame.collect())",
    ("pyarrow", "Table"): "millstream.integrations.arrow.ArrowSource(table)",
    ("datasets", "Dataset"): "millstream.integrations.huggingface.HuggingFaceSource(dataset)",
    ("grain", "MapDataset"): "millstream.integrations.grain.GrainSource(dataset)",
    ("zarr", "Array"): "millstream.integrations.zarr.ZarrSource(array)",
}


def table_source(value: Any) -> str | None:
    """The source for a table of another package, such as a DataFrame; None for anything else."""
    found = (_TABLES.get((kind.__module__.partition(".")[0], kind.__name__)) for kind in type(value).__mro__)
    return next((f"Write {source}." for source in found if source is not None), None)


def source_advice(value: Any) -> str | None:
    """What to write to make a source of some data; None if nothing is known to do it."""
    if line := table_source(value):
        return line
    if hasattr(value, "iterate") and hasattr(value, "init_state"):
        return "That is a loader already; loader.replace(...) changes its options."
    if isinstance(value, str | os.PathLike):
        return (
            "Files are read by ms.NpySource, ms.CsvSource, ms.ImageFolderSource and the sources in "
            "millstream.integrations."
        )
    if _is_array(value) or (isinstance(value, Mapping) and any(map(_is_array, value.values()))):
        return "Wrap arrays: ms.ArraySampleSource(data)."
    if _has_items(value):
        return "Wrap anything with a length and [index]: ms.DatasetSource(it)."
    if isinstance(value, Iterable):
        return ITERABLE
    return None


ITERABLE = (
    "What can only be iterated has no index. Draw it in order, from a function that makes it for every epoch: "
    "ms.sources.IterableSource(make). Or make a list of its samples: ms.DatasetSource(list(samples)). If it yields "
    "whole batches, give it to ms.train_loop as the dataset, without a DataLoader."
)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _has_items(value: Any) -> bool:
    if isinstance(value, Mapping) or not hasattr(type(value), "__getitem__"):
        return False
    try:
        return len(value) >= 0
    except Exception:
        return False
