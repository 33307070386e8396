"""Types go from a dataset's items through a batcher to the loop: pyright proves it, and refuses what does not fit."""

import json
import subprocess
import sys

import pytest

RIGHT = """
from typing import assert_type

import numpy as np
from millstream.dialects.loadax import (
    Batcher, CombinedDataset, DataLoader, Dataloader, Dataset, FilteredDataset, InMemoryDataset, Indexable, ListBatcher,
    Loader, MappedDataset, PartialDataset, RangeDataset, SampledDataset, ShardedDataset, ShuffledDataset,
)


def my_fn(x: list[int]) -> int:
    return sum(x)


def label(x: int) -> str:
    return str(x)


def stack(items: list[np.ndarray]) -> np.ndarray:
    return np.stack(items)


class Squares(Dataset[float]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int, /) -> float:
        return index**2.0


class Plain:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> bytes:
        return b""


dataset = RangeDataset(0, 10)
loader = DataLoader(Batcher(my_fn)).batch_size(2).workers(2).prefetch(3).build(dataset)
assert_type(loader, Loader[int])
for batch in loader:
    assert_type(batch, int)

assert_type(dataset[0], int)
assert_type(MappedDataset(dataset, label), MappedDataset[str])
assert_type(dataset.map(label).filter(str.isalpha)[0], str)
assert_type(dataset.map_batch(my_fn)[0], int)
assert_type(dataset.shuffle(3)[0], int)
assert_type(ShuffledDataset(InMemoryDataset(["a"])), ShuffledDataset[str])
assert_type(FilteredDataset(Squares(), bool)[0], float)
assert_type(SampledDataset(PartialDataset(ShardedDataset(Squares(), 2, 0), 0, 1), 1)[0], float)
assert_type(CombinedDataset(dataset, InMemoryDataset(["a"]))[0], int | str)
assert_type(CombinedDataset([dataset, dataset])[0], int)
assert_type(next(iter(Dataloader(Plain(), 2))), list[bytes])
assert_type(next(iter(DataLoader(Batcher(stack)).build([np.ones(3)]))), np.ndarray)
assert_type(DataLoader(ListBatcher[float]()).build(dataset), Loader[list[float]])  # an int is a float
anything: Indexable[str] = ["a"]
"""

WRONG = """
from millstream.dialects.loadax import Batcher, DataLoader, InMemoryDataset, MappedDataset, RangeDataset


def my_fn(x: list[int]) -> int:
    return sum(x)


loader = DataLoader(Batcher(my_fn)).build(RangeDataset(0, 10))
for batch in loader:
    batch.append(1)  # wrong: a batch is an int
DataLoader(Batcher(my_fn)).build(InMemoryDataset(["a"]))  # wrong: items are strings
DataLoader(Batcher(my_fn)).build({1, 2})  # wrong: no index
MappedDataset(InMemoryDataset(["a"]), abs)  # wrong: no absolute value of a string
DataLoader(my_fn)  # wrong: no batcher
DataLoader(Batcher(my_fn)).batch_size("2")  # wrong: no number
"""


def test_pyright_proves_the_types_and_refuses_what_does_not_fit(tmp_path):
    pytest.importorskip("pyright", reason="a tool of development, which not every environment has")
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "right.py", "wrong.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    found = json.loads(ran.stdout)
    assert found["summary"]["filesAnalyzed"] == 2
    diagnostics = found["generalDiagnostics"]
    errors = {(error["file"].rsplit("/", 1)[-1], error["range"]["start"]["line"]) for error in diagnostics}
    expected = {("wrong.py", number) for number, line in enumerate(WRONG.splitlines()) if "# wrong" in line}
    assert len(expected) == 6 and errors == expected, json.dumps(diagnostics, indent=1)
