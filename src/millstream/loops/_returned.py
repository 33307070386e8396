"""What a callback has returned: logs, a state, or both."""

from typing import Any

import jax

from millstream.loops.logs import Logs, as_logs
from millstream.loops.loop_state import LoopState
from millstream.loops.metrics import with_computed
from millstream.text.errors import describe_value


def absorb(loop_state: LoopState, output: Any, callback: str) -> None:
    """Take in what a callback returned: logs, a state, or both.

    Args:
        loop_state: Whose state and logs change.
        output: Anything but None.
        callback: The callback's name, for errors.
    """
    if type(output) is tuple and len(output) == 2 and _is_pair(output, loop_state.state):
        new, output = output
        if new is not None:
            _add_logs(loop_state, new if type(new) is Logs else as_logs(callback, new))
        if output is not None:
            loop_state.state = output
    elif isinstance(output, Logs):
        _add_logs(loop_state, output)
    elif type(output) in (tuple, dict, list) and type(loop_state.state) not in (type(output), type(None)):
        raise TypeError(
            f"{callback} may return nothing, ms.logs(), a state, or (logs, state). The state is "
            f"{describe_value(loop_state.state)}, and it returned {describe_value(output)}."
        )
    else:
        loop_state.state = output


def _is_pair(output: tuple[Any, Any], state: Any) -> bool:
    """Whether a tuple is (logs, state), and not a state that is a tuple."""
    if isinstance(output[0], Logs):
        return True
    if output[0] is not None and type(output[0]) is not dict:
        return False
    if type(state) is not tuple:
        return True
    if output[0] is None:
        return jax.tree.structure(output) != jax.tree.structure(state)
    return jax.tree.structure(output[1]) == jax.tree.structure(state)


def _add_logs(loop_state: LoopState, new: Logs) -> None:
    new = with_computed(new)
    # Logs are taken over as they are, and copied when more come: a callback may hand out the same object every time.
    loop_state.logs = (
        Logs({name: dict(old) for name, old in loop_state.logs.items()}).merge(new) if loop_state.logs else new
    )
