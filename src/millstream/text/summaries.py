"""What things are in a few words, for `repr`: arrays as `f32[64,10]`, trees of them, and calls as they are written.

Nothing here reads data, waits for a device or raises.
"""

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from millstream.text.errors import function_name

_SHOWN = 6  # entries of a container
_DEEPEST = 4  # containers inside each other
_LETTERS = {"bfloat": "bf", "float": "f", "int": "i", "uint": "u", "complex": "c"}


def never_raising(summary: Callable[[Any], str]) -> Callable[[Any], str]:
    """A `__repr__` that names the class alone if it fails: what users have written may be part of it."""

    @functools.wraps(summary)
    def text(value: Any) -> str:
        try:
            return summary(value)
        except Exception:
            return f"<{type(value).__name__}>"

    return text


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of an array that need not be there."""

    shape: tuple[int, ...]
    dtype: Any


def array_text(shape: Iterable[int], dtype: Any) -> str:
    """Dtype and shape of an array, as JAX prints them.

    Example:
        >>> array_text((64, 10), np.dtype(np.float32))
        'f32[64,10]'
    """
    name = str(dtype).rpartition(".")[2]
    found = re.fullmatch(r"(bfloat|float|int|uint|complex)(\d\w*)", name)
    short = name if found is None else f"{_LETTERS[found[1]]}{found[2]}"
    return f"{short}[{','.join(map(str, shape))}]"


@never_raising
def value_text(value: Any) -> str:
    """A value in a few words: numbers and short texts as they are, arrays by dtype and shape, others by their type.

    Example:
        >>> value_text({"image": np.zeros((2, 8), np.uint8), "label": [1, 2.5], "fn": len})
        '{image: u8[2,8], label: [1, 2.5], fn: len}'
    """
    return _value_text(value, 0)


def leaf_texts(tree: Any) -> list[tuple[str, str]]:
    """The path of each array of a tree, "" for an array alone, and its dtype and shape.

    Example:
        >>> leaf_texts({"image": np.zeros((2, 8), np.uint8), "meta": {"label": np.zeros(2, np.int32)}})
        [('image', 'u8[2,8]'), ('meta.label', 'i32[2]')]
    """
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), value_text(leaf)) for path, leaf in leaves]


def call_text(value: Any) -> str:
    """A dataclass as the call that makes it, without arguments that are as by default.

    Example:
        >>> call_text(ms.BatchTransform(4, drop_last=True))
        'BatchTransform(4, drop_last=True)'
    """
    arguments = []
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            arguments.append(value_text(given))
        elif given is not field.default and not _is_equal(given, field.default):
            arguments.append(f"{field.name}={value_text(given)}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def fields_text(value: Any) -> str:
    """A dataclass with its fields, without those that are empty.

    Example:
        >>> @dataclasses.dataclass
        ... class Row:
        ...     step: int
        ...     values: Any
        ...     note: str = ""
        >>> fields_text(Row(3, np.zeros(4)))
        'Row(step=3, values=f64[4])'
    """
    shown = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
    known = {name: value_text(given) for name, given in shown.items() if not _is_empty(given)}
    return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in known.items())})"


def object_text(value: Any) -> str:
    """An object as the call that makes it, as far as it has kept the arguments under their names.

    Example:
        >>> class Limit:
        ...     def __init__(self, steps, strict=False):
        ...         self._steps = steps
        >>> object_text(Limit(3))
        'Limit(steps=3)'
    """
    kept, arguments = vars(value), []
    for name, parameter in inspect.signature(type(value)).parameters.items():
        for place in (f"_{name}", name):
            if place in kept and not _is_equal(kept[place], parameter.default):
                arguments.append(f"{name}={value_text(kept[place])}")
                break
    return f"{type(value).__name__}({', '.join(arguments)})"


def _value_text(value: Any, depth: int) -> str:
    if value is None or isinstance(value, bool | int | float | complex):
        return repr(value)
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        return repr(text if len(text) <= 60 else f"...{text[-57:]}")
    if isinstance(value, Mapping | list | tuple):
        return "..." if depth == _DEEPEST else _container_text(value, depth)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _scalar_text(value) or array_text(value.shape, value.dtype)
    if inspect.isroutine(value) or hasattr(value, "func"):
        return function_name(value)
    is_ours = type(value).__module__.startswith("millstream.")
    return repr(value) if is_ours else type(value).__name__


def _container_text(value: Any, depth: int) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(_limited(f"{key}: {_value_text(item, depth + 1)}" for key, item in value.items())) + "}"
    inside = ", ".join(_limited(_value_text(item, depth + 1) for item in value))
    if isinstance(value, list):
        return f"[{inside}]"
    name = type(value).__name__ if hasattr(value, "_fields") else ""
    return f"{name}({inside}{',' if len(value) == 1 and not name else ''})"


def _limited(texts: Iterable[str]) -> Iterator[str]:
    """The first few, and how many more there are."""
    more = 0
    for number, text in enumerate(texts):
        if number < _SHOWN:
            yield text
        else:
            more += 1
    if more:
        yield f"... {more} more"


def _scalar_text(value: Any) -> str | None:
    """A single number that is there already; None for others, such as those of a program that is being traced."""
    if value.shape != () or not hasattr(value, "item"):
        return None
    try:
        return repr(value.item()) if getattr(value, "is_ready", lambda: True)() else None
    except Exception:
        return None


def _is_equal(value: Any, default: Any) -> bool:
    return (
        type(value) is type(default) and isinstance(value, bool | int | float | str | tuple | None) and value == default
    )


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | Mapping | list | tuple) and len(value) == 0)
