"""The configuration of a run as plain values."""

import argparse
import dataclasses
import enum
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from millstream.callbacks._secrets import MASK, is_secret, masked_text
from millstream.text.errors import describe_value

_CALLER = "record"
_DEEPEST, _MOST = 16, 10_000  # levels, and values


def plain_config(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts of numbers, texts, lists and None; what looks like a secret is masked.

    Args:
        config: A dict, dataclass or `argparse.Namespace`; None for nothing.
    """
    if config is None:
        return {}
    entries = _entries(config)
    if entries is None:
        raise TypeError(
            f"{_CALLER} needs config as a dict, a dataclass or an argparse.Namespace. Got {describe_value(config)}."
        )
    return _Config().plain_entries("config", entries, 0)


def _entries(value: Any) -> Mapping[Any, Any] | None:
    """The names and values of what is like a dict; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return vars(value) if isinstance(value, argparse.Namespace) else None


class _Config:
    """Counts what it makes plain."""

    def __init__(self) -> None:
        self._count = 0

    def plain_entries(self, path: str, entries: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        made = {}
        for name, value in entries.items():
            if not isinstance(name, str):
                raise TypeError(f"{_CALLER} needs names in config that are text. {path} has {describe_value(name)}.")
            secret = is_secret(name) and isinstance(value, str) and value
            made[name] = MASK if secret else self._plain(f"{path}[{name!r}]", value, depth)
        return made

    def _plain(self, path: str, value: Any, depth: int) -> Any:
        self._count += 1
        if depth >= _DEEPEST or self._count > _MOST:
            raise ValueError(
                f"{_CALLER} takes config with at most {_DEEPEST} levels and {_MOST:,} values. {path} is beyond that. "
                "Give what tells this run from others."
            )
        if isinstance(value, enum.Enum):
            return value.name
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return masked_text(value)
        if isinstance(value, os.PathLike):
            return os.fsdecode(value)
        if isinstance(value, int | float | np.integer | np.floating | np.bool_):
            number = value.item() if isinstance(value, np.generic) else value
            return str(number) if isinstance(number, float) and not math.isfinite(number) else number
        if isinstance(value, list | tuple):
            return [self._plain(f"{path}[{number}]", each, depth + 1) for number, each in enumerate(value)]
        entries = _entries(value)
        if entries is not None:
            return self.plain_entries(path, entries, depth + 1)
        raise TypeError(
            f"{_CALLER} needs config of plain values: numbers, text, True, False, None, lists and dicts of these. "
            f"{path} is {describe_value(value)}. Give its name, or leave it out."
        )
