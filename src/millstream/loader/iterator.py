"""Python iteration over the batches of a run."""

import collections
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import GenericAlias, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

import jax
import numpy as np
from jax.typing import ArrayLike

from millstream.loader.feed import Cursor, Drawn, Real
from millstream.pipeline.policy import has_policy, set_policy_state
from millstream.pipeline.state import IterableState, LoaderState, S, checked_step, plain_state, state_from_plain
from millstream.plan.plan import STEP_LIMIT
from millstream.reading.contracts import B, PyTree
from millstream.reading.interrupts import Interrupts, OneThread
from millstream.reading.stats import LoaderStats
from millstream.text.errors import describe_value, require_int, require_mapping
from millstream.text.summaries import never_raising, value_text

# What an iterator yields.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Item = TypeVar("Item", covariant=True, default=tuple[B, jax.Array])
else:
    from typing import TypeVar

    Item = TypeVar("Item", covariant=True)


class BatchIterator(Iterator[Item], Generic[B, S, Item]):
    """Yields (batch, mask), and knows the state to resume from.

    Leaving a `with` block, running to the end, an error and being forgotten all end the reading. Inside a `with`
    block the first Ctrl-C ends the stream after the current batch, the second raises KeyboardInterrupt at the next
    batch (`interrupted` is then True in both cases), the third ends the process.

    It is for one thread at a time, and refuses others meanwhile. `close` may be called from any.

    Example:
        >>> with loader.iterate(state, steps=2) as batches:
        ...     for batch, mask in batches:
        ...         pass
        >>> state = batches.state  # continues with the third batch

    Attributes:
        interrupted: Whether Ctrl-C has ended it.
        real: Which rows of the batch yielded last count: how many, if they are the first ones; if not, the mask.
    """

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)  # `BatchIterator[MyBatch]` is enough: the others have defaults

    def __init__(
        self,
        cursor: Cursor,
        state: S,
        steps: int | None,
        stats: LoaderStats,
        interrupts: Interrupts,
        *,
        ahead: int = 0,
        replay: int | None = None,
    ) -> None:
        self._cursor = cursor
        self._clock = _WaitClock(stats)
        self._interrupts = interrupts
        self._ahead = ahead
        self._replay = replay
        self._one_thread = OneThread(type(self).__name__)
        self.interrupted = False
        self.real: Real = 0
        self._start(state, steps)

    def _start(self, state: Any, steps: int | None) -> None:
        self._steps = steps
        self._undrawn = self._left = sys.maxsize if steps is None else steps
        self._state = self._drawn_state = state
        self._drawn: collections.deque[Drawn | Exception] = collections.deque()
        self._replayed: list[tuple[Any, Real]] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        with self._one_thread:
            self._clock.on_request()
            self._interrupts.waiting = True
            try:
                value = self._next()
            except Exception:
                self._cursor.pause()  # nothing is left running, and the same batch may be asked for again
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
            self._clock.on_delivery()
            return value

    def _next(self) -> Any:
        """What comes next; None at the end."""
        while True:
            if self._interrupts.asked and self._interrupts.check():
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
                drawn = self._cursor.draw(self._drawn_state)
            except Exception as error:
                self._drawn.append(error)
                return
            if drawn is None:
                self._undrawn = 0
                return
            self._undrawn -= 1
            self._drawn_state = drawn[1]
            self._drawn.append(drawn)

    def __len__(self) -> int:
        """Batches this iterator was made for, from first to last."""
        if self._steps is None:
            raise TypeError(
                "An iterator over an IterableSource without a length ends when the pass ends, and has no len(). Give "
                "iterate steps=n, or the source length=n."
            )
        return self._steps

    @property
    def samples(self) -> int:
        """How many rows of the batch yielded last count; where a stage sets the mask, this waits for that mask."""
        if isinstance(self.real, int):
            return self.real
        if isinstance(self.real, jax.Array):
            self.real = np.array(self.real)  # a copy: the mask itself may be donated
        return int(np.count_nonzero(self.real))

    @property
    def state(self) -> S:
        """The state after the batch yielded last."""
        if self._state is None:
            raise RuntimeError(
                "The state is a position in the stream, and batches have overtaken earlier ones that are still to "
                "come. Ask for it at the end, or use an executor with ordered=True."
            )
        return self._state

    def get_state(self) -> dict[str, PyTree]:
        """The position in the stream as plain values, for checkpoints of any kind.

        Example:
            >>> batches = loader.iterate(state)
            >>> batch, mask = next(batches)
            >>> saved = batches.get_state()
            >>> other = loader.iterate(state)
            >>> other.set_state(saved)  # continues with the second batch
        """
        with self._one_thread:
            state, left = self.state, None if self._steps is None else self._left
        if not isinstance(state, LoaderState):
            raise TypeError("get_state has plain values only for indexed sources; a stream has its `.state`, a pytree.")
        return {**plain_state(state), "left": left}

    def set_state(self, saved: Mapping[str, PyTree]) -> None:
        """Continue from what `get_state` gave, of this loader or one like it, with the batches that were left then."""
        state, left = _position(saved)
        with self._one_thread:
            cursor = self._cursor.move(state, left)
            self.close()
            self._cursor = cursor
            self._start(state, left)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"A {type(self).__name__} cannot be pickled or copied: it reads ahead. Keep its `state`, or what "
            "`get_state` gives, and make another one of it: loader.iterate(state)."
        )

    @property
    def has_policy(self) -> bool:
        """Whether a policy makes the batches: the pipeline starts with an environment."""
        return has_policy(self._state)

    def set_policy_state(self, policy_state: PyTree, *, new_episode: ArrayLike | Sequence[bool] | None = None) -> None:
        """Act with another policy state from the next batch on, for a pipeline that starts with an environment.

        Args:
            policy_state: The new one, shaped like the source's template.
            new_episode: What the policy is told at its next step; None leaves it as it is.
        """
        # Such a pipeline is a stream and never drawn ahead, so this is the state of the next batch.
        self._state = self._drawn_state = set_policy_state("set_policy_state", self._state, policy_state, new_episode)

    def pause(self) -> None:
        """End the reading; asking for another batch begins it again."""
        self._cursor.pause()

    def close(self) -> None:
        """End the iteration and release batches made ahead; `state` stays valid."""
        self._undrawn = 0
        self._drawn.clear()
        self._replayed.clear()
        self._cursor.pause()

    def __enter__(self) -> Self:
        self._interrupts.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupts.restore()
        self.close()

    @never_raising
    def __repr__(self) -> str:
        step = f"step {value_text(self._state.step)}, " if isinstance(self._state, LoaderState) else ""
        if self._steps is None:
            left = "to the end of the pass"
        else:
            left = "endless" if self._steps == sys.maxsize else f"{self._left:,} of {self._steps:,} batches left"
        return f"{type(self).__name__}({step}{left})"


class _WaitClock:
    """Tells waiting for a stream from working with its batches.

    Args:
        stats: Where to add up.
    """

    def __init__(self, stats: LoaderStats) -> None:
        self._stats = stats
        self._returned: float | None = None

    def on_request(self) -> None:
        """A batch is asked for, now."""
        self._asked = time.perf_counter()
        if self._returned is not None:
            self._stats.loop += self._asked - self._returned

    def on_delivery(self) -> None:
        """It is handed out, now."""
        waited = time.perf_counter() - self._asked
        if self._returned is None:
            self._stats.first += waited
        else:
            self._stats.idle += waited
        self._returned = self._asked + waited
        self._stats.batches += 1


def _position(saved: Any) -> tuple[LoaderState, int | None]:
    """The state and the number of batches left that `get_state` has written down."""
    try:
        require_mapping("set_state", "saved", saved)
        left = saved["left"]
        for name in ("key", "progress") if "progress" in saved else ("key",):
            if not all(0 <= int(word) < 1 << 32 for word in saved[name]):
                raise ValueError(f"set_state needs a {name} of numbers from 0 to 4,294,967,295. Got {saved[name]}.")
        checked_step("set_state", saved["step"], STEP_LIMIT)
        state = state_from_plain(saved)
    except (KeyError, TypeError):
        raise TypeError(
            "set_state needs what get_state has given: a dict with key, step, left and origin. "
            f"Got {describe_value(saved)}."
        ) from None
    if left is not None or not isinstance(state, IterableState):
        require_int("set_state", "left", left, least=0)
    return state, left
