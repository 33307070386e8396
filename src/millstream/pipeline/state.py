"""The state of a pipeline: a key and a step, and static words on which pipeline they belong to."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from millstream.text import html
from millstream.text.errors import describe_leaf, describe_value, differences, whole_number
from millstream.text.summaries import never_raising, value_text

Origin = tuple[tuple[str, str], ...]
_FROM_STEP = re.compile(r" from step ([\d,]+)$")


def strong_or_none(leaf: Any) -> jax.Array | None:
    """What `strong` makes of a leaf; None if JAX has no array for it, such as for text or an int of more bits."""
    is_number = isinstance(leaf, bool | int | float | complex) or (hasattr(leaf, "dtype") and hasattr(leaf, "ndim"))
    try:
        return strong(leaf) if is_number else None
    except (TypeError, ValueError, OverflowError):
        return None


def strong(leaf: Any) -> jax.Array:
    """An array or a number as an array of a dtype of its own: a state with a weak one would compile a step twice."""
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype) if getattr(array, "weak_type", False) else array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoaderState:
    """Where a run is: batch number `step` of the run with this key comes next.

    Attributes:
        key: The raw data of the run's key, uint32.
        step: Batches drawn so far, uint32.
        origin: What the pipeline is, in words; static, so a state of a different pipeline is refused at no cost.
    """

    key: jax.Array
    step: jax.Array
    origin: Origin = dataclasses.field(metadata={"static": True})

    @never_raising
    def __repr__(self) -> str:
        return f"{type(self).__name__}(key={self._key_text()}, step={value_text(self.step)})"

    @html.never_raising
    def _repr_html_(self) -> str:
        return html.html_names([("key", self._key_text()), ("step", value_text(self.step)), *self.origin])

    def _key_text(self) -> str:
        is_one = not is_traced(self.key) and np.ndim(self.key) == 1
        return str(np.asarray(self.key).tolist()) if is_one else value_text(self.key)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class IterableState(LoaderState):
    """Where a run over an `IterableSource` is.

    Attributes:
        progress: How far the pass is, uint32: passes that are over, samples given and items drawn in this one, and two
            words of a hash of the item drawn last.
    """

    progress: jax.Array


# The type of a loader's states: streams have their own.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    S = TypeVar("S", default=LoaderState)
else:
    from typing import TypeVar

    S = TypeVar("S")


def plain_state(state: LoaderState) -> dict[str, Any]:
    """A state as values that JSON has."""
    progress = {"progress": np.asarray(state.progress).tolist()} if isinstance(state, IterableState) else {}
    place = {"key": np.asarray(state.key).tolist(), "step": int(state.step), **progress}
    return {**place, "origin": [list(pair) for pair in state.origin]}


def state_from_plain(saved: Mapping[str, Any]) -> LoaderState:
    """The state that `plain_state` has written down; anything else raises some error."""
    origin = tuple((what, words) for what, words in saved["origin"])
    words: dict[str, Any] = {
        name: np.asarray(saved[name], np.uint32) for name in ("key", "step", "progress") if name in saved
    }
    return (IterableState if "progress" in words else LoaderState)(origin=origin, **words)


def is_traced(tree: Any) -> bool:
    """Whether a value belongs to a program that is being traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def key_words(caller: str, key: Any) -> jax.Array:
    """The raw uint32 words of a typed or legacy key."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        words = jax.random.key_data(key)
    else:
        words = key
    legal = isinstance(words, jax.Array | np.ndarray) and words.dtype == np.uint32
    if not legal or words.ndim == 0 or words.shape[-1] not in (2, 4):
        found = describe_leaf(key) if isinstance(key, jax.Array | np.ndarray) else describe_value(key)
        raise TypeError(f"{caller} needs a key such as jax.random.key(0). Got {found}.")
    if words.ndim != 1:
        raise ValueError(
            f"{caller} needs one key. Got an array of {words.shape[:-1]} keys; "
            "for a state each, write jax.vmap(loader.init_state)(keys)."
        )
    return words if isinstance(words, jax.Array) else jnp.asarray(words)  # the latter is slow even for one of JAX


def checked_step(caller: str, step: Any, most: int) -> Any:
    """A step as an int, or as it is if it is a traced integer, whose value is not known yet."""
    if isinstance(step, Tracer) and step.ndim == 0 and jnp.issubdtype(step.dtype, np.integer):
        return step
    return whole_number(caller, "step", step, least=0, most=most)


def first_state(key: Any, step: Any, limit: int, origin: Origin) -> LoaderState:
    """The state of the run with this key before batch number `step`, of a pipeline that can count to `limit`."""
    words = key_words("init_state", key)
    return LoaderState(words, step_array(checked_step("init_state", step, limit - 1)), origin)


def step_array(step: Any) -> jax.Array:
    """A step as states have it, without the program that `jnp.asarray` compiles for a number."""
    if isinstance(step, Tracer):
        return step.astype(np.uint32)
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.uint32(step))


def from_step(start: int, what: str) -> str:
    """What to call something that holds from a step on."""
    return f"{what} from step {start:,}"


def without_steps(words: Iterable[Sequence[str]]) -> dict[str, str]:
    """What is said of a pipeline, without what holds from a step on."""
    return until_step(words, -1)


def until_step(words: Iterable[Sequence[str]], step: int) -> dict[str, str]:
    """What is said of a pipeline, without what holds from `step` on or later."""
    found = {}
    for what, said in words:
        start = _FROM_STEP.search(what)
        if start is None or int(start[1].replace(",", "")) < step:
            found[what] = said
    return found


def check_position(caller: str, state: Any, limit: int) -> int:
    """The step of a state; refuses one whose key or step was tampered with."""
    key_words(caller, state.key)
    return checked_step(caller, state.step, limit)


def check_origin(caller: str, state: Any, origin: Origin) -> None:
    """Refuse a state that a different pipeline made, naming what differs."""
    if not isinstance(state, LoaderState):
        raise TypeError(f"{caller} needs a state from loader.init_state(key). Got {describe_value(state)}.")
    if state.origin == origin:
        return
    differing = differences(dict(state.origin), dict(origin), ("in the state", "here"))
    raise ValueError(
        f"{caller} got a state of a different pipeline. They differ in\n{differing}\n"
        "Make a state with this loader's init_state(key), or, to continue at the same step on purpose, "
        "with loader.init_state(state.key, step=int(state.step))."
    )
