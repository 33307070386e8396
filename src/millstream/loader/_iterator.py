"""Python iteration over the batches of a run."""

import collections
import operator
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from millstream._core.contracts import PyTree
from millstream._core.errors import describe_value
from millstream._core.interrupts import Interrupts
from millstream._core.policy import set_policy_state
from millstream._core.state import LoaderState
from millstream._core.stats import Clock, LoaderStats

# How many samples a batch has, if these are its first rows; if not, its mask, read when somebody asks.
Real = int | np.ndarray | jax.Array

# What is handed out, or None for a batch that is left out; the state after it; which of its rows count.
Drawn = tuple[Any, PyTree, Real]


class BatchIterator(Iterator[Any]):
    """Yields (batch, mask), and knows the state to go on from.

    Leaving a `with` block, running to the end, an error and being forgotten all end the reading. Inside of a `with`
    block the first Ctrl-C ends the stream after the current batch, the second raises KeyboardInterrupt at the next
    batch (`interrupted` is then True in both cases), the third ends the process.

    Example:
        >>> with loader.iterate(state, steps=2) as batches:
        ...     for batch, mask in batches:
        ...         pass
        >>> state = batches.state  # continues with the third batch

    Attributes:
        interrupted: Whether Ctrl-C has ended it.
        real: Which rows of the batch yielded last count: how many, if they are the first ones; if not, the mask.
    """

    def __init__(
        self,
        draw: Callable[[PyTree], Drawn],
        state: PyTree,
        steps: int,
        ahead: int,
        stats: LoaderStats,
        *,
        pause: Callable[[], None] = lambda: None,
        replay: int | None = None,
        interrupts: Interrupts,
        again: Callable[..., "BatchIterator"] | None = None,
    ) -> None:
        self._again = again
        self._draw = draw
        self._steps = steps
        self._undrawn = steps
        self._left = steps
        self._ahead = ahead
        self._clock = Clock(stats)
        self._pause = pause
        self._state = self._drawn_state = state
        self._drawn: collections.deque[Drawn | Exception] = collections.deque()
        self._replayed: list[tuple[Any, Real]] = []
        self._replay = replay
        self._interrupts = interrupts
        self.interrupted = False
        self.real: Real = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._clock.asked()
        self._interrupts.waiting = True
        try:
            value = self._next()
        except Exception:
            self._pause()  # nothing is left running, and the same batch may be asked for again
            raise
        except BaseException:  # an interrupt
            self.interrupted = True
            self.close()
            raise
        finally:
            self._interrupts.waiting = False
        if value is None:
            self.close()
            raise StopIteration
        self._clock.answered()
        return value

    def _next(self) -> Any:
        """What comes next; None at the end."""
        while True:
            if self._interrupts.check():
                self.interrupted = True
                return None
            if self._replay is not None and len(self._replayed) == self._replay and self._undrawn:
                self._undrawn -= 1
                self._left -= 1
                value, self.real = self._replayed[self._undrawn % self._replay]
                return value
            self._draw_ahead()
            if not self._drawn:
                return None
            drawn = self._drawn.popleft()
            if isinstance(drawn, Exception):
                raise drawn
            value, self._state, real = drawn
            self._left -= 1
            if value is not None:
                self.real = real
                if self._replay is not None:
                    self._replayed.append((value, real))
                return value

    def _draw_ahead(self) -> None:
        """Draw this batch and those that are computed while the caller works on it."""
        while self._undrawn and len(self._drawn) <= self._ahead:
            if self._drawn and isinstance(self._drawn[-1], Exception):
                return  # it is raised after the good batches that came before it
            try:
                drawn = self._draw(self._drawn_state)
            except Exception as error:
                self._drawn.append(error)
                return
            self._undrawn -= 1
            self._drawn_state = drawn[1]
            self._drawn.append(drawn)

    def __len__(self) -> int:
        """Batches this iterator was made for, from first to last."""
        return self._steps

    @property
    def samples(self) -> int:
        """How many rows of the batch yielded last count; where a stage sets the mask, this waits for that mask."""
        if isinstance(self.real, jax.Array):
            self.real = np.array(self.real)  # a copy: the mask itself may be donated
        return self.real if isinstance(self.real, int) else int(np.count_nonzero(self.real))

    @property
    def state(self) -> PyTree:
        """The state after the batch yielded last."""
        if self._state is None:
            raise RuntimeError(
                "The state is a position in the stream, and batches have overtaken earlier ones that are still to "
                "come. Ask for it at the end, or use an executor with ordered=True."
            )
        return self._state

    def get_state(self) -> dict[str, Any]:
        """The position in the stream as plain values, for checkpoints of any kind.

        Example:
            >>> batches = loader.iterate(state)
            >>> batch, mask = next(batches)
            >>> saved = batches.get_state()
            >>> other = loader.iterate(state)
            >>> other.set_state(saved)  # goes on with the second batch
        """
        state = self.state
        if not isinstance(state, LoaderState):
            raise TypeError("get_state has plain values only for indexed sources; a stream has its `.state`, a pytree.")
        return {
            "key": np.asarray(state.key).tolist(),
            "step": int(state.step),
            "left": self._left,
            "origin": [list(pair) for pair in state.origin],
        }

    def set_state(self, saved: dict[str, Any]) -> None:
        """Go on from what `get_state` gave, of this loader or one like it, with as many batches as were left then."""
        if self._again is None:
            raise TypeError(f"set_state cannot move a {type(self).__name__}. Make one at the state: iterate(state).")
        try:
            origin = tuple((what, words) for what, words in saved["origin"])
            words = np.array([operator.index(word) for word in saved["key"]], np.uint32)
            step, left = np.array(operator.index(saved["step"]), np.uint32), operator.index(saved["left"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(
                "set_state needs what get_state gave: a dict with key, step, left and origin. "
                f"Got {describe_value(saved)}."
            ) from None
        moved = self._again(LoaderState(words, step, origin), steps=left)  # pyright: ignore[reportArgumentType]
        self.close()
        self.__dict__.update(moved.__dict__)

    def set_policy_state(self, policy_state: PyTree, *, new_episode: Any = None) -> None:
        """Act with another policy state from the next batch on, for a pipeline that starts with an environment.

        Args:
            policy_state: The new one, shaped like the source's template.
            new_episode: What the policy is told at its next step; None leaves it as it is.
        """
        # Such a pipeline is a stream and never drawn ahead, so this is the state of the next batch.
        self._state = self._drawn_state = set_policy_state("set_policy_state", self._state, policy_state, new_episode)

    def close(self) -> None:
        """End the iteration and let go of batches made ahead; `state` stays valid."""
        self._undrawn = 0
        self._drawn.clear()
        self._replayed.clear()
        self._pause()

    def __enter__(self) -> Self:
        self._interrupts.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupts.restore()
        self.close()
