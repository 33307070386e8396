"""Which batches are still held, and what holds them."""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from millstream.reading.holders import find_holders

_BATCHES = 8  # that are named
_HOLDERS = 3  # per batch that are named
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


def describe_holders() -> str:
    """The batches of all streams that are alive, and what holds their arrays, in words."""
    held = _alive()
    if not held:
        return "No batch is held."
    return "\n".join(["1 batch is held:" if len(held) == 1 else f"{len(held)} batches are held:", *_lines(held)])


def describe_newest(count: int) -> str:
    """What holds the arrays of the batches that were handed out last, of those that are alive."""
    return "\n".join(["The newest batches that are held:", *_lines(_alive()[-count:])])


def _lines(held: list[tuple[int, Any]]) -> list[str]:
    lines, shown = [], held[:_BATCHES]
    for (step, _), holders in zip(shown, find_holders([array for _, array in shown]), strict=True):
        more = f"; and {len(holders) - _HOLDERS} more" if len(holders) > _HOLDERS else ""
        lines.append(f"  batch {step}: {'; '.join(holders[:_HOLDERS]) or 'JAX, or an array made from it'}{more}")
    return lines if len(held) <= _BATCHES else [*lines, f"  and {len(held) - _BATCHES} more"]


def _alive() -> list[tuple[int, Any]]:
    """The step and one array of each batch that is alive."""
    return [(step, array) for step, refs in [*_handed_out] if (array := _first_alive(refs)) is not None]


def _first_alive(refs: list[weakref.ref[Any]]) -> Any:
    return next((array for array in (ref() for ref in refs) if array is not None), None)
