"""Loops inside of loops, which a bar or a writer of the outer one leaves alone."""

from millstream.loops.loop_state import LoopState


def is_inside(loop_state: LoopState, outer: LoopState | None) -> bool:
    """Whether a loop runs inside of another one; of none, if that is None."""
    parent = loop_state.parent
    while parent is not None and parent is not outer:
        parent = parent.parent
    return parent is not None
