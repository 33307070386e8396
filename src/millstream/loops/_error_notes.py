"""What else can be said of an error that a step has raised: what it was given, and the usual reasons."""

from typing import Any

import jax

from millstream.loops._dataset import Loader
from millstream.loops._run_parts import RunParts
from millstream.loops.callback import Callback, arguments
from millstream.text.errors import describe_leaf, table

_CALLERS = ("millstream.loops.callback", "millstream.loops._burst")  # where functions of the user's are called
_ABOUT_VALUES = (TypeError, ValueError, AttributeError, LookupError)
_PAIR = "Over a DataLoader a step gets the pair (batch, mask). Begin it with: batch, mask = batch."
_OBJECTS = (
    "The samples of this loader are Python objects, so a batch is a list of them. To get arrays, put "
    "ms.HostMapTransform(fn) after the source, where fn(sample) encodes text and the like as arrays of numbers."
)
_SINGLE = (
    "The loader has no BatchTransform, so a step gets a single sample. Put ms.BatchTransform(32) after the source."
)


def error_notes(error: BaseException, parts: RunParts) -> list[str]:
    """Notes for an error that came from a function of the user's."""
    task, batch = parts.calling, parts.loop_state.batch
    if task is None or isinstance(task.callback, Callback) or not isinstance(error, _ABOUT_VALUES) or _is_ours(error):
        return []
    if arguments(task.name, task.callback) < 2:
        return []
    if not isinstance(parts.dataset, Loader):
        return [] if batch is None else [_given("batch", batch)]
    is_pair = isinstance(batch, tuple) and len(batch) == 2
    if "tuple" in str(error) and (is_pair or batch is None):  # callbacks of a fused loop see no batch
        return [_PAIR]
    if not is_pair:
        return []
    batch, mask = batch
    if isinstance(batch, list) and any(not hasattr(leaf, "shape") for leaf in jax.tree.leaves(batch)):
        return [_OBJECTS]
    return [_given("batch", batch), *([_SINGLE] if getattr(mask, "shape", None) == () else [])]


def _given(name: str, batch: Any) -> str:
    leaves = jax.tree.leaves_with_path(batch)
    shown = table((f"{name}{jax.tree_util.keystr(path)}", describe_leaf(leaf)) for path, leaf in leaves)
    return f"The batch of this step was\n{shown}"


def _is_ours(error: BaseException) -> bool:
    """Whether a check of this package has raised it, which has said all there is to say."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return module.startswith("millstream.") and module not in _CALLERS
