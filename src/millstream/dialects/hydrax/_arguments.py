"""What a `Dataloader` is given, checked."""

from collections.abc import Iterable
from typing import Any

from millstream.dialects.hydrax._data_group import DataGroup
from millstream.text.errors import describe_value, require_callable, require_int


def when_and_what(validation: Any) -> tuple[Any, list[DataGroup[Any]]]:
    """When validation comes, and what of."""
    if validation is None:
        return ("epoch", 1), []
    if not isinstance(validation, tuple | list) or len(validation) != 3:
        raise ValueError(
            'Dataloader needs validation=("epoch", n, groups) or ("batch", n, groups). '
            f"Got {describe_value(validation)}."
        )
    return period_of("validation", validation[:2], least=1), groups_of("validation", validation[2])


def period_of(name: str, period: Any, *, least: int) -> tuple[str, int]:
    """So many epochs or batches."""
    if not isinstance(period, tuple | list) or len(period) != 2 or period[0] not in ("epoch", "batch"):
        raise ValueError(f'Dataloader needs {name} to begin with "epoch" or "batch", n. Got {describe_value(period)}.')
    require_int("Dataloader", f"the number of {name}", period[1], least=least)
    return period[0], period[1]


def end_of(end_at: Any) -> tuple[str, int] | None:
    """Where to stop; None goes on."""
    if (
        end_at is None
        or end_at == "never"
        or (isinstance(end_at, tuple | list) and end_at[:1] in (("never",), ["never"]))
    ):
        return None
    return period_of("end_at", end_at, least=0)


def require_start(start_at: Any) -> None:
    """Refuse what is no place to start at."""
    if not isinstance(start_at, tuple | list) or len(start_at) != 2:
        raise ValueError(f"Dataloader needs start_at=(epoch, further batches). Got {describe_value(start_at)}.")
    for name, number in zip(("epoch", "batch"), start_at, strict=True):
        require_int("Dataloader", f"the {name} of start_at", number, least=0)


def groups_of(what: str, groups: Any) -> list[DataGroup[Any]]:
    """One group or several, as a list."""
    listed = [groups] if isinstance(groups, DataGroup) else list(groups) if isinstance(groups, Iterable) else [groups]
    if not listed or not all(isinstance(group, DataGroup) for group in listed):
        raise TypeError(f"Dataloader needs {what} to be a DataGroup, or several. Got {describe_value(groups)}.")
    return listed


def named(groups: list[DataGroup[Any]]) -> dict[str, DataGroup[Any]]:
    """Groups under names with their seeds, from which their keys are made. Two of the same seed have two names."""
    named: dict[str, DataGroup[Any]] = {}
    for group in groups:
        same = sum(other.seed == group.seed for other in named.values())
        named[f"group with seed {group.seed}" + (f" ({same + 1})" if same else "")] = group
    return named


def require_numbers(**numbers: tuple[Any, int]) -> None:
    """Refuse numbers below their least."""
    for name, (number, least) in numbers.items():
        require_int("Dataloader", name, number, least=least)


def require_functions(**functions: Any) -> None:
    """Refuse what cannot be called; only the loader has to be there."""
    for name, function in functions.items():
        if function is not None or name == "loader_func":
            require_callable("Dataloader", name, function)


def require_enough(loaders: int, cachers: int, groups: list[DataGroup[Any]]) -> None:
    """Refuse to load without a process, or to store without a thread."""
    if not loaders and any(group.loader_layouts is not None for group in groups):
        raise ValueError("Dataloader needs a loader_count of at least 1, unless no DataGroup has loader_arrays.")
    if not cachers and any(group.computes_cache and not group.cache_readonly for group in groups):
        raise ValueError("Dataloader needs a cacher_count of at least 1, unless all caches are read-only.")
