"""The page of troubleshooting shows messages as they are: each is produced here, and no other is on the page."""

import os
import pathlib
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import millstream as ms
from millstream.integrations.polars import PolarsSource

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()
# Blocks that show the output of a program stand right after it, and are compared where documents are run.
SHOWN = re.findall(r"(?<!```\n)\n```text\n(.*?)\n```", PAGE, re.DOTALL)
KEY = jax.random.key(0)
FRAME: Any = np.zeros(3)


def make_loader(*stages, samples=10, batch_size=4):
    source = ms.ArraySampleSource({"x": np.arange(float(samples))})
    return ms.DataLoader([source, *stages, ms.BatchTransform(batch_size)])


def train(step, **options):
    return ms.train_loop(0, make_loader(), {ms.on_train_step: step}, **options)


def read_all(read, **options):
    loader = ms.DataLoader([ms.DiskSampleSource(8, read), ms.BatchTransform(4)], executor=ms.Processes(1, **options))
    return list(loader.iterate(loader.init_state(KEY)))


def ragged():
    rows = [{"ids": np.arange(index % 5 + 1, dtype=np.int32)} for index in range(40)]
    loader = ms.DataLoader([ms.DatasetSource(rows), ms.BatchTransform(8)])
    return list(loader.iterate(loader.init_state(KEY)))


def reader(fault, at):
    """A function that goes to workers by value: they need not load this module, and JAX with it."""

    def read(index):
        if ms.reading.is_worker() and index == at:
            fault()
        return {"x": np.float32(index)}

    return read


def unreadable():
    def fault():
        raise OSError("cannot read 5.jpg")

    return fault


def step(state, batch):
    return batch[0]["x"].sum(), state


def loss_step(state, batch):
    return ms.logs().add_metric("loss", batch[0]["x"].sum()), state


def nan_step(state, batch):
    return ms.logs().add_metric("loss", jnp.nan), state


images = {"image": np.zeros((60, 8, 8), np.uint8), "label": np.zeros(59, np.int32)}
CASES = {
    "rows": lambda: ms.ArraySampleSource(images),
    "text": lambda: ms.ArraySampleSource({"x": np.array(["a", "b"])}),
    "int64": lambda: ms.ArraySampleSource({"x": np.array([2**40])}),
    "ragged": ragged,
    "if": lambda: make_loader(ms.MapTransform(lambda value, mask: value if value["x"] > 0 else {"x": 0.0})),
    "numpy": lambda: make_loader(ms.MapTransform(lambda value, mask: {"x": np.sort(value["x"])})),
    "drop": lambda: ms.DataLoader(
        [ms.ArraySampleSource({"x": np.arange(10.0)}), ms.BatchTransform(64, drop_last=True)]
    ),
    "package": lambda: PolarsSource(FRAME),
    "key": lambda: make_loader().init_state(0),  # pyright: ignore[reportArgumentType]
    "state": lambda: make_loader(samples=20).iterate(make_loader().init_state(KEY)),
    "sample": lambda: read_all(reader(unreadable(), at=5)),
    "crash": lambda: read_all(reader(lambda: os._exit(3), at=2)),
    "stall": lambda: read_all(reader(lambda: time.sleep(100), at=2), timeout=4.0),
    "stop": lambda: train(step, key=KEY),
    "no key": lambda: train(step, stop=3),
    "returned": lambda: train(step, stop=3, key=KEY),
    "monitor": lambda: train(
        loss_step, stop=ms.at(epochs=3), key=KEY, callbacks=[ms.callbacks.early_stopping("val_loss", patience=2)]
    ),
    "nan": lambda: train(nan_step, stop=3, key=KEY, callbacks=[ms.callbacks.terminate_on_nan()]),
    "resume": lambda: train(loss_step, stop=3, key=KEY, resume=True),
}


@pytest.mark.filterwarnings("ignore:Worker 0")  # one that is replaced is warned about
@pytest.mark.parametrize(("name", "shown"), list(zip(CASES, SHOWN, strict=True)), ids=list(CASES))
def test_a_message_on_the_page_is_the_one_that_is_raised(name, shown, monkeypatch):
    if name == "package":
        monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(Exception) as found:
        CASES[name]()
    # Long lines are broken on the page.
    text = r"\s+".join(map(re.escape, shown.split())).replace(r"\.\.\.", ".*")
    assert re.match(text, str(found.value)), str(found.value)
