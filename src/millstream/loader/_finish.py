"""From samples that were read on the host to the batch that is handed out: compiled stages, and placement."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from millstream.loader._program import Program, finishing
from millstream.pipeline.host_calls import call_and_wait
from millstream.pipeline.pipeline import Pipeline
from millstream.pipeline.static_part import split
from millstream.reading.batch_holders import remember
from millstream.reading.contracts import PyTree
from millstream.reading.host_source import HostSource
from millstream.reading.read_config import ReadConfig
from millstream.reading.reading import ReadBatch
from millstream.reading.samples import SampleSpec

_IN_TRANSIT = 2  # batches on their way to a device, or whose mask is on its way to the host

# XLA copies what only passes through a program. Above this size placing an array on its own is faster than that.
_LARGE = 1 << 19


@dataclasses.dataclass(frozen=True)
class _Described(HostSource):
    """A source as far as compiled stages know it, so that pipelines of equal shape share their programs."""

    sample_spec: SampleSpec  # pyright: ignore[reportIncompatibleVariableOverride]
    ordering: Any = "sequential"  # pyright: ignore[reportIncompatibleVariableOverride]


class Finish:
    """Makes batches of rows that were read on the host.

    Args:
        pipeline: The pipeline.
        program: The same, for compiled programs.
        device: A device or sharding for the batches; None leaves it to JAX.
    """

    def __init__(self, pipeline: Pipeline, program: Program, device: Any) -> None:
        host = pipeline.host
        assert host is not None
        self._host = host
        self._tolerant = host.tolerant
        self._objects = pipeline.objects is not None
        self._placement = pipeline.placement
        self._mesh = program.mesh
        self._device = device
        self._is_keyed = pipeline.is_keyed
        self._layout = host.layout(pipeline.plan)
        self._plain = all(stage.batches or stage.passive for stage in pipeline.stages)
        if not isinstance(host.source.sample_spec, SampleSpec):
            return
        described = ReadConfig(_Described(host.source.sample_spec), on_error=host.on_error)
        with program.own_mesh():
            described = dataclasses.replace(pipeline.planned_on_host(), host=described)
            static, _ = split(described)
            made, self._passing = _trace(dataclasses.replace(described, placement=None))
            self._structure = jax.tree.structure(made)
            self._shardings = self._row_shardings(made[0])
            self._large = {out: row for out, row in self._passing.items() if self._layout.places[row][1] >= _LARGE}
            finished = finishing(static, tuple(self._large))
            self._finished = functools.partial(call_and_wait, finished) if program.effects else finished

    def __call__(self, key: Any, numbers: np.ndarray | None, filled: ReadBatch) -> tuple[PyTree, Any]:
        """The batch that was read, and its mask.

        Args:
            key: The run's raw key data.
            numbers: The coordinates of its step.
            filled: What was read.
        """
        request = filled.request
        assert request is not None
        if self._objects:
            return self._object_batch(filled)
        rows: list[Any] = filled.rows
        if self._placement is not None:
            rows = list(map(self._on_device, rows, self._shardings))
        elif self._device is not None:
            rows = [place(leaf, self._device) for leaf in rows]
        leaves = self._pass_through(rows, filled) if self._plain else self._run_stages(key, numbers, rows, filled)
        if self._placement is not None:
            if self._placement.hands_over:
                leaves = [self._placement.hand_over(leaf) for leaf in leaves]
        elif self._device is not None:
            leaves = [place(leaf, self._device) for leaf in leaves]
        remember(request.step, leaves[:-1])  # the last one is the mask
        return jax.tree.unflatten(self._structure, leaves)

    def _pass_through(self, rows: list[Any], filled: ReadBatch) -> list[Any]:
        """The leaves of a batch that has no compiled stages."""
        if self._placement is not None:
            return [*rows, self._on_device(self.mask(filled))]
        large = [isinstance(leaf, jax.Array) or leaf.nbytes >= _LARGE for leaf in rows]
        # Every batch gets a mask of its own, since a step may donate it.
        copied, mask = _copy_small(
            [leaf for leaf, whole in zip(rows, large, strict=True) if not whole], self._layout.axes
        )
        small = iter(copied)
        leaves = [_whole(leaf) if whole else next(small) for leaf, whole in zip(rows, large, strict=True)]
        full = filled.samples == self._layout.rows and not filled.report.failed
        return [*leaves, mask if full else self._on_device(self.mask(filled))]

    def _run_stages(self, key: Any, numbers: np.ndarray | None, rows: list[Any], filled: ReadBatch) -> list[Any]:
        """The leaves of a batch that goes through compiled stages."""
        passing, given = self._large, rows
        if passing:
            given = [None if row in passing.values() else leaf for row, leaf in enumerate(rows)]
        intact = self._on_device(self._host.intact(filled, self._layout.axes)) if self._tolerant else None
        key = key if self._is_keyed else None
        if self._mesh is None:
            made = self._finished(key, numbers, given, intact)
        else:
            with jax.set_mesh(self._mesh):  # whatever the caller's
                made = self._finished(key, numbers, given, intact)
        if not passing:
            return made
        rest = iter(made)
        return [
            _whole(rows[passing[number]]) if number in passing else next(rest)
            for number in range(self._structure.num_leaves)
        ]

    def mask(self, filled: ReadBatch) -> np.ndarray:
        """Which of the rows that this process has are samples, and could be read."""
        assert filled.request is not None
        real = filled.request.real.reshape(self._layout.axes)
        return real & self._host.intact(filled, self._layout.axes)

    def _object_batch(self, filled: ReadBatch) -> tuple[Any, np.ndarray]:
        objects = filled.rows[0]
        value = objects.reshape(-1)[0] if self._host.source.whole_batches else objects.tolist()
        return value, self.mask(filled)

    def _row_shardings(self, batch: PyTree) -> list[NamedSharding | None]:
        """Where rows are placed: those that no stage changes as the batch has them, others divided by rows alone."""
        shardings: list[NamedSharding | None] = [None] * len(self._layout.places)
        if self._placement is not None:
            for out, sharding in enumerate(self._placement.of_leaves(batch)):
                if out in self._passing:
                    shardings[self._passing[out]] = sharding
        return shardings

    def _on_device(self, array: np.ndarray, sharding: NamedSharding | None = None) -> jax.Array:
        """What this process has of an array with a row per sample, as a JAX array of all rows."""
        placement, rows = self._placement, self._host.rows
        return jnp.asarray(array) if placement is None or rows is None else placement.place(array, rows[0], sharding)


def count_in_transit(program: Program, masked: bool, device: Any) -> int:
    """How many finished batches an iterator draws before they are asked for."""
    # A batch for a different device is on its way while the caller works on the ones before it. So is a mask that has
    # to be read: it was computed before the step that the device is busy with.
    return _IN_TRANSIT if (masked or device is not None) and not program.effects else 0


def _trace(pipeline: Pipeline) -> tuple[Any, dict[int, int]]:
    """The shapes of (batch, mask), and which of their leaves are rows that no stage changes or looks at."""
    assert pipeline.host is not None
    axes = pipeline.host.layout(pipeline.plan).axes
    intact = jax.ShapeDtypeStruct(axes, np.dtype(bool)) if pipeline.host.tolerant else None
    words, numbers, rows = pipeline.planned_specs()

    def at(*given: Any) -> Any:
        return pipeline.planned(*given, apart=True)

    traced, shape = jax.make_jaxpr(at, return_shape=True)(words, numbers, rows, intact)
    inputs = traced.jaxpr.invars[2 : 2 + len(rows)]
    used = {id(variable) for equation in traced.jaxpr.eqns for variable in equation.invars}
    passing = {}
    for number, out in enumerate(traced.jaxpr.outvars):
        row = next((row for row, variable in enumerate(inputs) if variable is out and id(out) not in used), None)
        if row is not None:
            passing[number] = row
    return shape, passing


@functools.partial(jax.jit, static_argnums=1)
def _copy_small(leaves: list[Any], axes: tuple[int, ...]) -> tuple[list[Any], jax.Array]:
    """Small arrays, all at once, and the mask of a batch with these axes in which all rows count.

    For small arrays a compiled program that copies is the fastest way to the device.
    """
    return leaves, jnp.ones(axes, bool)


def as_placed(tree: PyTree, device: Any) -> PyTree:
    """A tree of arrays where they are wanted."""
    return tree if device is None else jax.tree.map(lambda leaf: place(leaf, device), tree)


def place(leaf: Any, placement: Any) -> jax.Array:
    """An array where it is wanted. A sharding fits arrays with fewer axes too: a mask has fewer than the images."""
    if isinstance(placement, jax.sharding.NamedSharding):
        placement = jax.sharding.NamedSharding(placement.mesh, jax.sharding.PartitionSpec(*placement.spec[: leaf.ndim]))
    elif isinstance(leaf, jax.Array) and leaf.devices() == {placement}:
        return leaf
    return jax.device_put(leaf, placement)


def _whole(leaf: Any) -> jax.Array:
    """Aligned host memory as a JAX array, without a copy where the device is the host."""
    if isinstance(leaf, jax.Array):
        return leaf
    device = jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.devices(device)[0] if isinstance(device, str) else device
    return jax.make_array_from_callback(leaf.shape, jax.sharding.SingleDeviceSharding(device), lambda _: leaf)
