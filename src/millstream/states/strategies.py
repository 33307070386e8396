"""How the steps of a managed state run: compiled or not, on which devices, and what becomes of the old state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from millstream.reading.contracts import PyTree
from millstream.text.errors import require_int

Traced = Callable[..., tuple[PyTree, PyTree]]  # (state, batch, elapsed) -> (logs, state)


class Strategy:
    """Where a managed state lies and how its steps run. Subclass it, as a frozen dataclass, to write your own.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Loud(ms.managed.Jit):
        ...     def compile(self, traced):
        ...         print("compiling", traced.__name__)
        ...         return super().compile(traced)

    Attributes:
        donate: Whether a step takes over the memory of the state it is given, which cannot be used afterwards. The
            state then owns its arrays: those given to `create` and `replace` are copied.
    """

    donate: bool = False

    def place(self, tree: PyTree) -> PyTree:
        """Put arrays of a new state where they belong."""
        return tree

    def constrain(self, tree: PyTree) -> PyTree:
        """Inside a program, have the compiler keep the arrays of a state where they belong."""
        return tree

    def compile(self, traced: Traced) -> Traced:
        """What runs a step, given as a pure function of (state, batch, elapsed) to (logs, state)."""
        raise NotImplementedError

    def lift_batch_size(self, batch_size: int) -> int:
        """The rows of a batch of this process in which each of its devices has `batch_size` rows of its own.

        Example:
            >>> ms.managed.get_strategy("data-parallel").lift_batch_size(32) == 32 * jax.local_device_count()
            True
        """
        require_int(f"{type(self).__name__}.lift_batch_size", "batch_size", batch_size, least=1)
        return batch_size


@dataclasses.dataclass(frozen=True)
class Eager(Strategy):
    """Operation by operation, uncompiled: to look inside a step with `print` or a debugger.

    What a step compiles itself, such as `lax.scan`, is opened by a `with jax.disable_jit():` around it.

    Example:
        >>> ms.managed.get_strategy("eager")
        Eager()
    """

    def compile(self, traced: Traced) -> Traced:
        return traced


@dataclasses.dataclass(frozen=True)
class Jit(Strategy):
    """Compiled, on the devices that state and batch are on.

    Example:
        >>> ms.managed.get_strategy("jit_donate")
        Jit(donate=True)

    Args:
        donate: See `Strategy`.
    """

    donate: bool = False

    def compile(self, traced: Traced) -> Traced:
        return jitted(traced, donate=self.donate)


def jitted(traced: Traced, *, donate: bool) -> Traced:
    """A step compiled; if it donates, it refuses a state that it has had before."""
    if not donate:
        return jax.jit(traced)
    compiled = jax.jit(traced, donate_argnums=(0,))

    def run(state: Any, batch: PyTree, elapsed: Any = None) -> tuple[Any, Any]:
        # JAX may end the whole process over arrays on several devices that are gone. Only its arrays can tell whether
        # they are ready, not traced values; asking for that takes 0.1 us, and two isinstance take 0.4.
        if hasattr(state.step, "is_ready") and state.step.is_deleted():
            raise RuntimeError(
                f"{traced.__name__} was given a state whose memory an earlier step has taken over, because its "
                "strategy donates. Continue with the state that step returned, or use a strategy that does not donate."
            )
        return compiled(state, batch, elapsed)

    return run
