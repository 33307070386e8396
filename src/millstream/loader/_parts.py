"""Loaders as parts of a larger stream."""

from collections.abc import Callable, Sequence
from typing import Any

from millstream.loader.feed import Cursor, Drawn


class Part:
    """The batches of one loader, drawn one by one. The loader reads ahead from the first to the last.

    Args:
        name: What the loader is called in the stream; "" if it has no name there.
        open_cursor: Gives the cursor; called when the first batch is drawn.
        state: The loader's state before that.
        steps: How many batches there are.

    Attributes:
        name: The same.
        left: How many are still to be drawn.
    """

    def __init__(self, name: str, open_cursor: Callable[[], Cursor], state: Any, steps: int) -> None:
        self.name = name
        self._open_cursor = open_cursor
        self._cursor: Cursor | None = None
        self._state = state
        self.left = steps

    def draw(self) -> Drawn:
        """The next batch; if this raises, the same one may be drawn again."""
        if self._cursor is None:
            self._cursor = self._open_cursor()
        try:
            drawn = self._cursor.draw(self._state)
        except Exception as error:
            if self.name:
                error.add_note(f"This came from the loader {self.name!r}.")
            raise
        assert drawn is not None  # indexed sources have a length
        self._state = drawn[1]
        self.left -= 1
        return drawn

    def pause(self) -> None:
        """End the reading; drawing another batch begins it again."""
        if self._cursor is not None:
            self._cursor.pause()


class JoinedCursor:
    """Draws from several loaders in turn.

    Args:
        parts: Their batches.
        draw: From the state of the whole to what is handed out and the state after it.
        move: From a state and a number of steps to a different such cursor; None if it cannot be moved.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        draw: Callable[[Any], Drawn],
        move: Callable[[Any, int], "JoinedCursor"] | None = None,
    ) -> None:
        self._parts = parts
        self._draw = draw
        self._move = move

    def draw(self, state: Any) -> Drawn:
        """What comes next, and the state after it."""
        return self._draw(state)

    def move(self, state: Any, steps: int) -> "JoinedCursor":
        """A cursor at a different state."""
        if self._move is None:
            raise TypeError("set_state cannot move a StreamIterator. Make one at the state: iterate(state).")
        return self._move(state, steps)

    def pause(self) -> None:
        """End the reading of all loaders; drawing another batch begins it again."""
        for part in self._parts:
            part.pause()
