"""Strategies by name: those of the package, and those that users register."""

from millstream.states._parallel import FSDP, DataParallel
from millstream.states.strategies import Eager, Jit, Strategy
from millstream.text.errors import describe_value

_strategies: dict[str, Strategy] = {
    "eager": Eager(),
    "jit": Jit(),
    "jit_donate": Jit(donate=True),
    "data_parallel": DataParallel(),
    "data_parallel_donate": DataParallel(donate=True),
    "fsdp": FSDP(),
    "fsdp_donate": FSDP(donate=True),
}


def register_strategy(name: str, strategy: Strategy) -> None:
    """Give a strategy a name that `ManagedState.create` knows.

    Example:
        >>> ms.managed.register_strategy("careful", ms.managed.Eager())
        >>> ms.managed.get_strategy("careful")
        Eager()

    Args:
        name: With dashes or underscores, which mean the same.
        strategy: A value.
    """
    if not isinstance(name, str) or not isinstance(strategy, Strategy):
        raise TypeError(
            "register_strategy needs a name and a managed.Strategy. "
            f"Got {describe_value(name)} and {describe_value(strategy)}."
        )
    if _plain(name) in _strategies:
        raise ValueError(f"register_strategy has a strategy {_plain(name)!r} already: {_strategies[_plain(name)]}.")
    _strategies[_plain(name)] = strategy


def get_strategy(strategy: str | Strategy, caller: str = "get_strategy") -> Strategy:
    """The strategy of a name; a strategy as it is.

    Example:
        >>> ms.managed.get_strategy("jit")
        Jit(donate=False)

    Args:
        strategy: A name or a strategy.
        caller: Who needs it, for errors.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, str) and _plain(strategy) in _strategies:
        return _strategies[_plain(strategy)]
    raise ValueError(
        f"{caller} knows no strategy {describe_value(strategy)}. There are: {', '.join(map(repr, _strategies))}; "
        "register_strategy adds others."
    )


def _plain(name: str) -> str:
    return name.replace("-", "_")
