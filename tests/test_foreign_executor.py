"""The contract of executors is open: one from outside the package gives the same batches through every door."""

import jax
import numpy as np
import pytest
from conftest import assert_trees_equal
from futures_executor import Futures
from pipelines import PIPELINES
from test_contract import ALL, make_loader, take

import millstream as ms

pytestmark = pytest.mark.optimized

INDEXED = [name for name in ALL if isinstance(make_loader(name).pipeline, type(make_loader("pad").pipeline))]


@pytest.mark.parametrize("name", INDEXED)
def test_every_pipeline_gives_the_same_batches(name, key):
    own = make_loader(name)
    state, steps = own.init_state(key), own.steps_per_epoch + 3
    seen, _ = take(own, state, steps)
    foreign = ms.DataLoader(ALL[name](), executor=Futures(2))
    assert_trees_equal(list(foreign.iterate(foreign.init_state(key), steps=steps)), seen)
    foreign.close()


def test_it_serves_stepping_scanning_and_a_lack_of_order(key):
    own = make_loader("pad")
    state = own.init_state(key)
    pairs, _ = take(own, state, own.steps_per_epoch)
    with ms.DataLoader(PIPELINES["pad"](), executor=Futures(2)) as foreign:
        assert_trees_equal(take(foreign, state, foreign.steps_per_epoch)[0], pairs)
        _, total, _ = foreign.scan_epoch(state, 0, lambda total, batch, mask: (total + batch["label"].sum(), None))
        assert int(total) == sum(int(np.sum(batch["label"])) for batch, _ in pairs)
        assert foreign.stats().batches == 2 * foreign.steps_per_epoch
        assert foreign.verify(steps=4, hosts=[1, 2], executors=[Futures(3)], progress=False).ok
    unordered = foreign.replace(executor=Futures(2, ordered=False))
    labels = [np.asarray(batch["label"])[np.asarray(mask)] for batch, mask in unordered.iterate(state)]
    assert sorted(np.concatenate(labels).tolist()) == sorted(np.concatenate([b["label"][m] for b, m in pairs]).tolist())


def test_errors_and_skipped_samples_come_through(key):
    def read(index):
        if index == 5:
            raise OSError("5.png is cut short")
        return np.int32(index)

    source = ms.DiskSampleSource(8, read, ordering="sequential", sample_spec=jax.ShapeDtypeStruct((), np.int32))
    loader = ms.DataLoader([source, ms.BatchTransform(4)], executor=Futures(2))
    batches = loader.iterate(loader.init_state(key))
    next(batches)
    with pytest.raises(OSError, match=r"5\.png"):
        next(batches)
    skipping = loader.replace(on_error="skip item")
    masks = [mask.tolist() for _, mask in skipping.iterate(skipping.init_state(key))]
    assert masks == [[True] * 4, [True, False, True, True]]


def test_what_is_no_executor_is_refused_by_name():
    for wrong in (Futures, "threads", 4, object()):
        with pytest.raises(TypeError, match=r"DataLoader needs an executor: InGraph\(\), Threads\(4\)"):
            ms.DataLoader(PIPELINES["pad"](), executor=wrong)  # pyright: ignore[reportArgumentType, reportCallIssue]
