"""What the processes of a run tell each other about checkpoints."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # nothing public waits for the other processes without using the devices
from jax.experimental import multihost_utils

from millstream.errors import DamagedCheckpoint, NoCheckpoint, StorageFailed

_PATIENCE = 600.0  # seconds to wait for the others; a process that dies ends the others faster

# What other processes raise too, so that all of them can act on it in the same way.
_KINDS = {kind.__name__: kind for kind in (DamagedCheckpoint, NoCheckpoint, StorageFailed)}

_saves = itertools.count()


def next_save() -> int:
    """A number for a save, the same in all processes, which all save in the same order."""
    return next(_saves)


def is_first() -> bool:
    """Whether this process is the one that names and deletes."""
    return jax.process_index() == 0


def meet(name: str) -> None:
    """Wait until all processes are here. It may be called in any thread and uses no device.

    Args:
        name: Of the place, used once.
    """
    if jax.process_count() > 1:
        client: Any = distributed.global_state.client
        client.wait_at_barrier(f"millstream-{name}", int(_PATIENCE * 1000))


def any_of(flag: bool) -> bool:
    """Whether a flag is set in any process; all of them wait here. For the main thread."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array([flag]))))


def _told_by_first(text: str) -> str:
    """What process 0 says; the others' own texts are ignored. For the main thread: it runs a program on the devices."""
    if jax.process_count() == 1:
        return text
    data = np.frombuffer(text.encode(), np.uint8)
    (length,) = np.asarray(multihost_utils.broadcast_one_to_all(np.array([len(data)], np.uint32))).tolist()
    padded = np.zeros(length, np.uint8)
    padded[: len(data)] = data[:length]
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()


def on_process_zero(action: Callable[[], Any]) -> Any:
    """What process 0 gets by an action; where that fails, all processes fail. For the main thread.

    Args:
        action: Gives something that JSON can hold.
    """
    error, said = None, ""
    if is_first():
        try:
            said = json.dumps({"result": action()})
        except Exception as raised:
            error, said = raised, json.dumps({"error": [type(raised).__name__, str(raised)]})
    heard = json.loads(_told_by_first(said))
    if error is not None:
        raise error
    if "error" in heard:
        name, text = heard["error"]
        raise _KINDS[name](text) if name in _KINDS else RuntimeError(f"Process 0 failed: {name}: {text}")
    return heard["result"]
