"""Metrics that a state carries: every real row counts once, whatever the metric is made of."""

import collections
import dataclasses
import functools
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import millstream as ms
from millstream.loops.metrics import with_computed

pytestmark = pytest.mark.optimized

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(10, 3)).astype(np.float32)
LABELS = RNG.integers(0, 3, 10).astype(np.int32)
LOSSES = RNG.normal(size=10).astype(np.float32)
HITS = LOGITS.argmax(-1) == LABELS
PADDED = jnp.array([True, True, False, False])


def accuracy(logits, labels):
    return logits.argmax(-1) == labels


def loss(loss):
    return loss


@pytest.fixture
def usual_promotion():
    """Other packages are rarely written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def loader():
    """Ten samples: batches of 4, 4, and 2 with padding."""
    samples = {"logits": LOGITS, "labels": LABELS, "loss": LOSSES}
    return ms.DataLoader([ms.ArraySampleSource(samples), ms.BatchTransform(4)])


@jax.jit
def update(metrics, values, mask):
    return metrics.update(**values, mask=mask)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeanWithoutMask:
    """Made and merged as clu's are, of values alone."""

    total: jax.Array
    rows: jax.Array

    @classmethod
    def empty(cls):
        return cls(jnp.float32(0), jnp.int32(0))

    @classmethod
    def from_model_output(cls, loss):
        return cls(loss.sum(), jnp.int32(loss.shape[0]))

    def merge(self, other):
        return MeanWithoutMask(self.total + other.total, self.rows + other.rows)

    def compute(self):
        return self.total / self.rows.astype(jnp.float32)


def test_padding_does_not_count_for_what_is_made_without_a_mask():
    metrics = ms.loops.Metrics(mean=MeanWithoutMask)
    metrics = metrics.update(loss=jnp.array([2.0, 4.0, 9.0, jnp.nan]), mask=PADDED).update(loss=jnp.array([6.0]))
    assert float(metrics.compute()["mean"]) == 4.0


def batches(*lengths):
    """The samples in order, in batches of that many rows."""
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends, strict=True):
        part = slice(start, end)
        yield {"logits": LOGITS[part], "labels": LABELS[part], "loss": LOSSES[part]}


def poisoned():
    """The samples in batches of four with masks, and NaN in place of padding."""
    for number, batch in enumerate(batches(4, 4, 2)):
        missing = 2 if number == 2 else 0
        logits = np.concatenate([batch["logits"], np.full((missing, 3), np.nan, np.float32)])
        losses = np.concatenate([batch["loss"], np.full(missing, np.nan, np.float32)])
        labels = np.concatenate([batch["labels"], np.zeros(missing, np.int32)])
        yield {"logits": logits, "labels": labels, "loss": losses}, np.arange(4) < 4 - missing


def over_poisoned(metrics):
    for values, mask in poisoned():
        metrics = update(metrics, values, mask)
    return metrics.compute()


def test_the_values_of_an_epoch_are_those_of_all_real_samples(loader, key):
    traced = []

    @jax.jit
    def step(metrics, batch):
        values, mask = batch
        traced.append(mask)
        metrics = metrics.update(**values, mask=mask)
        return ms.logs().add_stateful_metrics(metrics.compute()), metrics

    metrics = ms.loops.Metrics(accuracy=accuracy, loss=loss)
    tasks = {ms.every(1): step, ms.every(epochs=1): lambda metrics: metrics.reset()}
    _, history, _ = ms.loop(metrics, loader, tasks, stop=ms.at(epochs=2), key=key)
    found, losses = history.collect("accuracy", "loss")
    for last in (2, 5):
        assert found[last] == np.float32(HITS.mean())
        assert losses[last] == pytest.approx(LOSSES.mean(), rel=1e-6)
    assert len(traced) == 1


def test_batches_without_a_mask_count_by_their_length():
    metrics = ms.loops.Metrics(accuracy=accuracy, mean=lambda logits, labels: (logits.argmax(-1) == labels).mean())
    for batch in batches(4, 5, 1):
        metrics = metrics.update(**batch)
    assert {name: float(value) for name, value in metrics.compute().items()} == {
        "accuracy": np.float32(HITS.mean()),
        "mean": pytest.approx(HITS.mean()),
    }


def test_one_number_counts_as_often_as_there_are_real_rows():
    metrics = ms.loops.Metrics(loss=loss).update(loss=jnp.float32(1), mask=PADDED)
    metrics = metrics.update(loss=jnp.float32(4), logits=jnp.zeros((4, 3)))
    metrics = metrics.update(loss=jnp.float32(jnp.nan), mask=jnp.zeros(4, bool))
    assert float(metrics.compute()["loss"]) == 3


def test_a_function_that_asks_for_the_mask_gets_it():
    def masked_mean(loss, mask):
        return jnp.sum(jnp.where(mask, loss, 0)) / jnp.sum(mask, dtype=jnp.float32)

    assert float(over_poisoned(ms.loops.Metrics(mean=masked_mean))["mean"]) == pytest.approx(LOSSES.mean(), rel=1e-6)


def test_a_row_may_have_several_values_and_a_mask_several_axes():
    values = jnp.arange(12.0).reshape(2, 2, 3)
    mask = jnp.array([[True, True], [True, False]])
    metrics = ms.loops.Metrics(loss=loss)
    assert float(metrics.update(loss=values, mask=mask).compute()["loss"]) == 4
    assert float(metrics.update(loss=values, mask=jnp.array([True, False])).compute()["loss"]) == 2.5


def test_two_parts_can_be_merged():
    first, second = (ms.loops.Metrics(accuracy=accuracy, loss=loss).update(**batch) for batch in batches(7, 3))
    values = first.merge(second).compute()
    assert float(values["accuracy"]) == np.float32(HITS.mean())
    assert float(values["loss"]) == pytest.approx(LOSSES.mean(), rel=1e-6)


def test_metrics_without_rows_are_nan():
    metrics = ms.loops.Metrics(accuracy=accuracy, loss=loss)
    assert all(np.isnan(value) for value in metrics.compute().values())
    updated = metrics.update(**next(batches(4)), mask=jnp.zeros(4, bool))
    assert all(np.isnan(value) for value in updated.compute().values())
    assert all(np.isnan(value) for value in updated.update(**next(batches(4))).reset().compute().values())


def test_a_value_that_is_not_finite_is_not_hidden():
    for value in (np.inf, -np.inf, np.nan):
        metrics = ms.loops.Metrics(loss=loss).update(loss=jnp.array([1, value, 2]))
        np.testing.assert_equal(float(metrics.update(loss=jnp.ones(3)).compute()["loss"]), value)


@functools.partial(jax.jit, static_argnums=1)
def many(metrics, steps):
    def step(metrics, number):
        value = 1 + jnp.sin(number.astype(jnp.float32))
        return metrics.update(loss=value, mask=jnp.arange(128) < 100 + number % 3), None

    return jax.lax.scan(step, metrics, jnp.arange(steps))[0]


def test_long_epochs_lose_nothing_to_rounding():
    steps = 300_000  # 30 million rows: a count in float32 ends at 16.8 million
    metrics = many(ms.loops.Metrics(loss=loss), steps)
    numbers = np.arange(steps)
    counts = 100 + numbers % 3
    values = (1 + np.sin(numbers.astype(np.float32))).astype(np.float64)
    assert float(metrics.compute()["loss"]) == pytest.approx((values * counts).sum() / counts.sum(), rel=3e-7)
    total, lost = np.asarray(jax.tree.leaves(metrics)[0], np.float64)
    assert total[1] + lost[1] == counts.sum()
    twice = metrics.merge(metrics)
    assert float(twice.compute()["loss"]) == pytest.approx(float(metrics.compute()["loss"]), rel=3e-7)


def test_metrics_are_carried_by_scans_and_compiled_once(count_compilations):
    metrics = ms.loops.Metrics(accuracy=accuracy, loss=loss)
    values, mask = next(poisoned())
    metrics = update(metrics, values, mask)
    metrics.compute()
    with count_compilations() as compiled:
        for _ in range(3):
            metrics = update(metrics, values, mask)
            metrics.compute()
        update(ms.loops.Metrics(accuracy=accuracy, loss=loss), values, mask)
    assert compiled == [0]
    assert jax.tree.structure(metrics) == jax.tree.structure(ms.loops.Metrics(accuracy=accuracy, loss=loss))
    assert jax.tree_util.tree_leaves_with_path(metrics)[0][0][0] == jax.tree_util.DictKey("accuracy")


def test_metrics_of_nnx_count_real_rows(usual_promotion):
    average = nnx.metrics.Average("loss")
    metrics = ms.loops.Metrics(
        accuracy=nnx.metrics.Accuracy(),
        loss=average,
        both=nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()),
    )
    values = over_poisoned(metrics)
    assert float(values["accuracy"]) == float(values["both_accuracy"]) == np.float32(HITS.mean())
    assert float(values["loss"]) == float(values["both_loss"]) == pytest.approx(LOSSES.mean(), rel=1e-6)
    assert int(average.count[...]) == 0  # what was given is as it was
    *_, (values, mask) = poisoned()
    uncompiled = ms.loops.Metrics(loss=average).update(**values, mask=mask)  # XLA would make a selection of a product
    assert float(uncompiled.compute()["loss"]) == pytest.approx(LOSSES[8:].mean(), rel=1e-6)


def test_a_metric_of_nnx_that_knows_no_mask_is_updated_row_by_row(usual_promotion):
    values = over_poisoned(ms.loops.Metrics(loss=nnx.metrics.Welford("loss")))
    assert float(values["loss_mean"]) == pytest.approx(LOSSES.mean(), rel=1e-5)
    assert float(values["loss_standard_deviation"]) == pytest.approx(LOSSES.std(), rel=1e-5)


def test_metrics_of_nnx_keep_their_types(usual_promotion):
    metrics = ms.loops.Metrics(loss=nnx.metrics.Welford("loss"), accuracy=nnx.metrics.Accuracy())
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(metrics)]
    reset = metrics.update(**next(batches(4))).reset()
    assert [leaf.dtype for leaf in jax.tree.leaves(reset)] == dtypes
    with pytest.raises(TypeError, match=r"Metrics cannot merge a Welford"):
        metrics.merge(metrics)


def test_metrics_of_clu_count_real_rows(usual_promotion):
    clu = pytest.importorskip("clu.metrics")
    both = clu.Collection.create(accuracy=clu.Accuracy, loss=clu.Average.from_output("loss"))
    metrics = ms.loops.Metrics(accuracy=clu.Accuracy, loss=clu.Average.from_output("loss"), both=both, own=both.empty())
    values = over_poisoned(metrics)
    for prefix in ("", "both_", "own_"):
        assert float(values[f"{prefix}accuracy"]) == np.float32(HITS.mean())
        assert float(values[f"{prefix}loss"]) == pytest.approx(LOSSES.mean(), rel=1e-6)
    first, second = (metrics.update(**batch) for batch in batches(7, 3))
    assert float(first.merge(second).compute()["both_accuracy"]) == np.float32(HITS.mean())
    assert np.isnan(first.reset().compute()["accuracy"])
    assert "tensorflow" not in sys.modules


def test_metrics_of_clu_that_collect_on_the_host_are_refused():
    clu = pytest.importorskip("clu.metrics")
    with pytest.raises(TypeError, match=r"Metrics needs all to hold .* FromOutputs holds none"):
        ms.loops.Metrics(all=clu.CollectingMetric.from_outputs(("loss",)))


class Largest(eqx.Module):
    """A metric whose methods return new ones, and which begins with a number of Python's."""

    value: jax.Array | float = -np.inf

    def update(self, loss):
        return Largest(jnp.maximum(self.value, loss.max()))

    def merge(self, other):
        return Largest(jnp.maximum(self.value, other.value))

    def compute(self):
        return self.value

    def reset(self):
        return Largest()


@jax.tree_util.register_pytree_node_class
class Rows:
    """A metric that is changed, and heeds a mask."""

    def __init__(self, count=0):
        self.count = count

    def update(self, mask):
        self.count += jnp.sum(mask, dtype=jnp.int32)

    def compute(self):
        return {"real": self.count}

    def reset(self):
        self.count = 0

    def tree_flatten(self):
        return (self.count,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@pytest.mark.parametrize("largest", [Largest, Largest()])
def test_any_object_with_update_compute_and_reset_is_a_metric(largest, count_compilations):
    rows = Rows()
    metrics = ms.loops.Metrics(largest=largest, rows=rows)
    values, reset = over_poisoned(metrics), metrics.reset()
    with count_compilations() as compiled:
        again = over_poisoned(reset)
    assert compiled == [0]
    for found in (values, again):
        assert (float(found["largest"]), int(found["rows_real"])) == (LOSSES.max(), 10)
    assert rows.count == 0
    assert float(metrics.reset().compute()["largest"]) == -np.inf
    first, second = (ms.loops.Metrics(largest=largest).update(**batch) for batch in batches(7, 3))
    assert float(first.merge(second).compute()["largest"]) == LOSSES.max()


def test_a_mean_of_a_padded_batch_is_refused():
    metrics = ms.loops.Metrics(accuracy=lambda logits, labels: (logits.argmax(-1) == labels).mean())
    values, mask = next(poisoned())
    with pytest.raises(ValueError, match=r"one number from <lambda> .* padding would count") as caught:
        metrics.update(**values, mask=mask)
    assert caught.value.__notes__ == ["Raised in the metric 'accuracy' of Metrics.update(logits, labels, loss, mask)."]


def test_mistakes_are_refused_and_named():
    metrics = ms.loops.Metrics(accuracy=accuracy)
    with pytest.raises(TypeError, match=r"was not given labels, which accuracy asks for. It was given logits"):
        metrics.update(logits=LOGITS)
    with pytest.raises(TypeError, match=r"needs mask to be a bool for each row. Got shape \(10,\), float32"):
        metrics.update(logits=LOGITS, labels=LABELS, mask=np.ones(10, np.float32))
    with pytest.raises(ValueError, match=r"one number or one value per row from loss. .* got shape \(3,\)"):
        ms.loops.Metrics(loss=loss).update(loss=jnp.ones(3), mask=PADDED)
    with pytest.raises(ValueError, match=r"same kinds. These are Metrics\(accuracy\), the others Metrics\(loss\)"):
        metrics.merge(ms.loops.Metrics(loss=loss))
    with pytest.raises(TypeError, match=r"Metrics needs loss to be a function .* Got 3"):
        ms.loops.Metrics(loss=3)
    with pytest.raises(TypeError, match=r"Metrics: max is called with keyword arguments, which it does not accept"):
        ms.loops.Metrics(loss=max)
    with pytest.raises(TypeError, match=r"Metrics needs count to hold .* Host is not a pytree"):
        ms.loops.Metrics(count=Host())
    with pytest.raises(ValueError, match=r"needs a Growing to keep its structure and shapes"):
        ms.loops.Metrics(all=Growing()).update(loss=jnp.ones(3))


class Host:
    """A metric that is not a pytree."""

    def update(self, loss): ...
    def compute(self):
        return {"mean": 1.5}

    def reset(self): ...


class Growing(eqx.Module):
    """A metric that keeps all it gets."""

    values: jax.Array = eqx.field(default_factory=lambda: jnp.zeros(0))

    def update(self, loss):
        return Growing(jnp.concatenate([self.values, loss]))

    def compute(self):
        return np.median(self.values)  # on the host

    def reset(self):
        return Growing()


def test_logs_without_metric_objects_are_as_they_are():
    logs = ms.logs().add_metric("loss", jnp.float32(1)).add_output("text", "x").add_entry("mine", "list", [1])
    assert with_computed(logs) is logs


def test_metric_objects_in_logs_become_their_values(usual_promotion):
    metrics = ms.loops.Metrics(accuracy=accuracy).update(**next(batches(10)))
    average, welford = nnx.metrics.Average(), nnx.metrics.Welford()
    average.update(values=LOSSES)
    welford.update(values=LOSSES)
    logs = ms.logs().add_metric("loss", 0.5).add_metric("average", average)
    logs.add_stateful_metric("test", metrics).add_stateful_metric("loss", welford)
    logs.add_entry("mine", "host", Host()).add_entry("mine", "median", Growing(jnp.arange(3.0)))
    plain = with_computed(logs)
    assert list(plain) == ["metrics", "stateful_metrics", "mine"]
    assert {name: float(value) for name, value in plain.metrics.items()} == {
        "loss": 0.5,
        "average": pytest.approx(LOSSES.mean(), rel=1e-6),
    }
    assert float(plain.stateful_metrics.test_accuracy) == np.float32(HITS.mean())
    assert float(plain.stateful_metrics.loss_standard_deviation) == pytest.approx(LOSSES.std(), rel=1e-6)
    assert (plain.mine.host_mean, float(plain.mine.median)) == (1.5, 1.0)
    assert isinstance(logs.metrics.average, nnx.metrics.Average)


def test_metric_objects_may_hold_functions_and_sizes(usual_promotion):
    class Scaled(eqx.Module):
        total: jax.Array
        fn: Any = jnp.square
        size: int = 2

        def compute(self):
            return self.fn(self.total + jnp.zeros(self.size)).sum()

    plain = with_computed(ms.logs().add_metric("scaled", Scaled(jnp.float32(3))))
    assert float(plain.metrics.scaled) == 18


def test_metric_objects_in_logs_are_computed_by_one_program(usual_promotion, count_compilations):
    Pair = collections.namedtuple("Pair", ["logs", "state"])

    @jax.jit
    def step(metrics):
        metrics = metrics.update(**next(batches(4)))
        return Pair(ms.logs().add_stateful_metric("all", metrics), metrics)

    logs, metrics = step(ms.loops.Metrics(accuracy=accuracy, loss=loss))
    with_computed(logs)
    with count_compilations() as compiled:
        for _ in range(3):
            logs, metrics = step(metrics)
            assert set(with_computed(logs).stateful_metrics) == {"all_accuracy", "all_loss"}
    assert compiled == [0]
