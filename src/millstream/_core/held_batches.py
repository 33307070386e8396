"""Which batches are still held, and by whom."""

import gc
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

_PRUNE = 64  # entries, besides as many as were alive, before dead ones are looked for

_handed_out: list[tuple[int, list[weakref.ref[Any]]]] = []
_limit = _PRUNE
_lock = threading.Lock()


def remember(step: int, arrays: Iterable[Any]) -> None:
    """Note the arrays of a batch that is handed out; they are not kept alive."""
    global _limit
    with _lock:
        if len(_handed_out) >= _limit:
            _handed_out[:] = [entry for entry in _handed_out if any(ref() is not None for ref in entry[1])]
            _limit = 2 * len(_handed_out) + _PRUNE
        _handed_out.append((step, [weakref.ref(array) for array in arrays]))


def describe_holders(most: int = 8) -> str:
    """The batches that are alive, and what holds their arrays, in words."""
    alive = [(step, [a for a in (ref() for ref in refs) if a is not None]) for step, refs in [*_handed_out]]
    alive = [(step, arrays) for step, arrays in alive if arrays]
    if not alive:
        return "No batch is held."
    lines = [f"{len(alive)} batches are held:"]
    for step, arrays in alive[:most]:
        holders = {text for array in arrays for text in _referrers(array, skip=[alive, arrays])}
        lines.append(f"  batch {step}: held by {', '.join(sorted(holders)) or 'JAX, or an array made from it'}")
    if len(alive) > most:
        lines.append(f"  and {len(alive) - most} more")
    return "\n".join(lines)


def _referrers(value: Any, skip: list[Any]) -> list[str]:
    """What refers to a value; a container is named by what holds it in turn."""
    texts = []
    for referrer in gc.get_referrers(value):
        if any(referrer is ours for ours in skip) or _is_ours(referrer) or isinstance(referrer, types.CellType):
            continue
        owner = referrer
        if isinstance(referrer, dict | list | tuple | set):
            outer = [o for o in gc.get_referrers(referrer) if not isinstance(o, types.FrameType | types.CellType)]
            owner = next((o for o in outer if not isinstance(o, list)), referrer)
        texts.append(_name(referrer) if owner is referrer else f"{_name(referrer)} in {_name(owner)}")
    return texts


def _is_ours(value: Any) -> bool:
    return isinstance(value, types.FrameType) and value.f_globals.get("__name__") == __name__


def _name(value: Any) -> str:
    if isinstance(value, types.FrameType):
        return f"a variable of {value.f_code.co_name}() in {value.f_code.co_filename}:{value.f_lineno}"
    if isinstance(value, dict) and "__name__" in value and "__builtins__" in value:
        return f"a global variable of {value['__name__']}"
    size = f" of {len(value)}" if isinstance(value, dict | list | tuple | set) else ""
    return f"a {type(value).__name__}{size}"
