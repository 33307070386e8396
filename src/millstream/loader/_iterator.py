"""Python iteration over the batches of a run."""

import collections
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import jax

from millstream._core.contracts import PyTree
from millstream._core.policy import set_policy_state


class BatchIterator(Iterator[tuple[PyTree, jax.Array]]):
    """Yields (batch, mask), and knows the state to go on from.

    Example:
        >>> batches = loader.iterate(state, steps=2)
        >>> for batch, mask in batches:
        ...     pass
        >>> state = batches.state  # continues with the third batch
    """

    def __init__(
        self,
        draw: Callable[[PyTree], tuple[PyTree, PyTree, jax.Array]],
        state: PyTree,
        steps: int,
        ahead: int,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._draw = draw
        self._steps = steps
        self._undrawn = steps
        self._ahead = ahead
        self._on_close = on_close
        self._state = self._drawn_state = state
        self._drawn: collections.deque[Any] = collections.deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[PyTree, jax.Array]:
        # The device computes the batches ahead while the caller works on this one.
        while self._undrawn and len(self._drawn) <= self._ahead:
            self._drawn.append(self._draw(self._drawn_state))
            self._drawn_state = self._drawn[-1][1]
            self._undrawn -= 1
        if not self._drawn:
            self.close()
            raise StopIteration
        batch, self._state, mask = self._drawn.popleft()
        return batch, mask

    def __len__(self) -> int:
        """Batches this iterator was made for, from first to last."""
        return self._steps

    @property
    def state(self) -> PyTree:
        """The state after the batch yielded last."""
        return self._state

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
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
