"""Batches of several pipelines side by side, such as of an environment and of recorded data."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from millstream.loader.build import build
from millstream.loader.loader import Stage
from millstream.pipeline.state import key_words
from millstream.plan.keys import named_key
from millstream.reading.contracts import IndexedSource, PyTree, Stream
from millstream.text.errors import describe_leaf, describe_value, differences, require_mapping, require_text
from millstream.text.summaries import never_raising, value_text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CombinedStream:
    """A stream whose batches are those of several, one after the other along the rows; see `combine`."""

    parts: tuple[Stream, ...]
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @never_raising
    def __repr__(self) -> str:
        return f"{type(self).__name__}({value_text(dict(zip(self.names, self.parts, strict=True)))})"

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch of the first part."""
        return self.parts[0].steps_per_epoch

    def init_state(self, key: jax.Array | np.ndarray) -> tuple[PyTree, ...]:
        """The states of all parts, each with a key of its own."""
        words = key_words("init_state", key)
        keys = [jnp.stack(named_key(words, f"millstream combine 1 {name}")) for name in self.names]
        return tuple(part.init_state(own) for part, own in zip(self.parts, keys, strict=True))

    def next(self, state: tuple[PyTree, ...]) -> tuple[PyTree, jax.Array, tuple[PyTree, ...]]:
        """The batches of all parts as one, its mask, and the states after it."""
        values, masks, states = zip(*map(_next, self.parts, state), strict=True)
        return jax.tree.map(lambda *rows: jnp.concatenate(rows), *values), jnp.concatenate(masks), states

    def element_spec(self) -> PyTree:
        """The shape and dtype of one batch."""
        state = jax.eval_shape(self.init_state, jax.random.key(0))
        return jax.eval_shape(lambda state: self.next(state)[0], state)


def _next(part: Stream, state: PyTree) -> tuple[PyTree, jax.Array, PyTree]:
    return part.next(state)


def combine(
    parts: Mapping[str, Sequence[Stage] | Stream | IndexedSource],
) -> CombinedStream:
    """Batches of several pipelines as one: rows of an environment, and of data that were recorded before.

    Each batch has a batch of every part, so their batch sizes say how much comes from where. An indexed source goes
    through its epochs, a stream continues where it is, and a run resumes exactly.

    Example:
        >>> def rows(first):
        ...     return [ms.ArraySampleSource({"x": first + np.arange(8)}, "sequential"), ms.BatchTransform(2)]
        >>> loader = ms.DataLoader([ms.rl.combine({"online": rows(0), "offline": rows(100)})])
        >>> batch, mask = next(loader.iterate(loader.init_state(jax.random.key(0))))
        >>> batch["x"].tolist()
        [0, 1, 100, 101]

    Args:
        parts: By name, a list of stages whose first is a source, as for a `DataLoader`; or what such a list makes.
            Their batches have the same structure, dtypes and shapes, but for the number of rows.
    """
    require_mapping("combine", "parts", parts, "a dict of pipelines, such as {'online': [...], 'offline': [...]}")
    if not parts:
        raise ValueError("combine needs at least one part. Got none.")
    built = {}
    for name, part in parts.items():
        require_text("combine", "the name of a part", name)
        if isinstance(part, Mapping | str):
            raise TypeError(f"combine needs {name!r} to be a list of stages. Got {describe_value(part)}.")
        built[name] = build(part)
    specs = {name: _rows_spec(name, stream) for name, stream in built.items()}
    (first, expected), *others = specs.items()
    for name, spec in others:
        if differing := differences(expected, spec, (f"in {first!r}", f"in {name!r}")):
            raise ValueError(f"combine needs batches whose rows are alike. They differ in\n{differing}")
    return CombinedStream(tuple(built.values()), tuple(built))


def _rows_spec(name: str, stream: Stream) -> dict[str, str]:
    """The shape and dtype of one row of a stream's batches and of its mask, by leaf."""
    state = jax.eval_shape(stream.init_state, np.zeros(2, np.uint32))
    value, mask, _ = jax.eval_shape(stream.next, state)
    rows = {leaf.shape[:1] for leaf in jax.tree.leaves((value, mask))}
    if len(rows) != 1 or () in rows:
        found = ", ".join(map(describe_leaf, jax.tree.leaves(value)))
        raise ValueError(
            f"combine needs {name!r} to give batches, with a row for each sample. Got {found}. Add a BatchTransform."
        )
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), {"batch": value, "mask": mask})
    leaves = jax.tree_util.tree_leaves_with_path(row)
    return {jax.tree_util.keystr(path, simple=True, separator="."): describe_leaf(leaf) for path, leaf in leaves}
