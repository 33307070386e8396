"""Arguments that are one of a few words."""

from collections.abc import Iterable

from millstream._core.errors import describe_value


def require_choice(who: str, name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse anything else, and say what there is."""
    words = list(choices)
    if value not in words:
        listed = ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"
        raise ValueError(f"{who} needs {name} {listed}. Got {describe_value(value)}.")
