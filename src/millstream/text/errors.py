"""Words for error messages: how a leaf, a tree or a stage is named to the user."""

import contextlib
import difflib
import inspect
import itertools
import math
import operator
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

_MOST_LINES = 8  # of a list in an error: with what is said before and after it, about ten

_MOST_TEXT = 300  # characters
_MOST_READERS = 4096  # threads or processes: more take all the memory of a machine before they read anything


def describe_leaf(leaf: Any) -> str:
    """Shape and dtype of an array, or the type and value of anything else."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"shape {tuple(leaf.shape)}, {leaf.dtype}"
    return describe_value(leaf)


def describe_value(value: Any) -> str:
    """A value as it is shown in an error: its repr, kept short, and its type."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:
        text = "a value without a repr"
    if len(text) > 80:
        text = text[:77] + "..."
    return f"{text} ({type(value).__name__})"


def shortened(value: Any) -> str:
    """The text of a value that may be long, such as the structure of a tree, on one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Indented `name: text` lines, the first few of many."""
    rows = iter(rows)
    lines = [f"  {name}: {text}" for name, text in itertools.islice(rows, _MOST_LINES)]
    more = sum(1 for _ in rows)
    return "\n".join([*lines, f"  and {more:,} more"] if more else lines)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], places: tuple[str, str] = ("saved", "now")) -> str:
    """A line for each name whose values differ, side by side; empty if none do."""
    return table(
        (name, f"{before.get(name, 'none')} {places[0]}, {now.get(name, 'none')} {places[1]}")
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    )


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question with the name that is most like one that is not there, and a space; nothing if none is."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]!r}? " if close else ""


def function_name(fn: Any) -> str:
    """The name a function is known by: its own, that of a partial's function, or its class's."""
    while hasattr(fn, "func"):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def require_int(caller: str, name: str, value: Any, *, least: int, most: int | None = None) -> None:
    """Refuse anything but an int of Python's own: a setting is kept as it is given."""
    if not isinstance(value, int):
        raise _not_whole(caller, name, value, least, most)
    whole_number(caller, name, value, least=least, most=most)


def require_prefetch(caller: str, value: Any) -> None:
    """Refuse a `prefetch_size` that is not a number of samples."""
    require_int(caller, "prefetch_size", value, least=1, most=(1 << 31) - 1)


def require_readers(caller: str, name: str, value: Any, *, least: int = 1) -> None:
    """Refuse a number of threads or processes that no machine can start."""
    require_int(caller, name, value, least=least, most=_MOST_READERS)


def whole_number(caller: str, name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """A whole number of any kind, of Python, NumPy or JAX, as an int; anything else, bools included, is refused."""
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
    try:
        found = None if is_bool else operator.index(value)
    except (TypeError, ValueError):
        found = None
    if found is None or found < least or (most is not None and found > most):
        raise _not_whole(caller, name, value if found is None else found, least, most)
    return found


def _not_whole(caller: str, name: str, value: Any, least: int, most: int | None) -> ValueError:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"
    return ValueError(f"{caller} needs {name} to be an int {bounds}. Got {describe_value(value)}.")


def require_positive(caller: str, name: str, value: Any, what: str = "a number", *, finite: bool = True) -> None:
    """Refuse anything but a number (no bool) above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not value > 0 or (finite and value == float("inf")):
        raise ValueError(f"{caller} needs {name} to be {what} above 0. Got {describe_value(value)}.")


def require_number(caller: str, name: str, value: Any) -> None:
    """Refuse anything but a finite number (no bool)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{caller} needs {name} to be a finite number. Got {describe_value(value)}.")


def require_bool(caller: str, name: str, value: Any) -> None:
    """Refuse anything but True and False: most other values would pass for one of them."""
    if not isinstance(value, bool):
        raise TypeError(f"{caller} needs {name} to be a bool. Got {describe_value(value)}.")


def require_choice(caller: str, name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse anything but one of a few words, and say which there are."""
    words = list(choices)
    if not isinstance(value, str) or value not in words:
        listed = ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"
        raise ValueError(f"{caller} needs {name} {listed}. Got {describe_value(value)}.")


def require_path(caller: str, rule: str, value: Any) -> pathlib.Path:
    """A path that names something; refuse anything else. `rule` says what is needed: "cache_dir to be a path"."""
    if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str):
        raise TypeError(f"{caller} needs {rule}. Got {describe_value(value)}.")
    if not text:
        raise ValueError(f"{caller} needs {rule}. Got an empty one; the current folder is '.'.")
    if "\0" in text:
        raise ValueError(f"{caller} needs {rule}. Got {describe_value(value)}, which has a zero byte in it.")
    return pathlib.Path(text)


def require_text(caller: str, name: str, value: Any) -> None:
    """Refuse anything but a str."""
    if not isinstance(value, str):
        raise TypeError(f"{caller} needs {name} to be a str. Got {describe_value(value)}.")


def require_mapping(caller: str, name: str, value: Any, what: str = "a dict") -> None:
    """Refuse anything but a dict or its like; `what` says of what."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{caller} needs {name} to be {what}. Got {describe_value(value)}.")


def require_steps(caller: str, name: str, value: Any, example: str) -> None:
    """Refuse anything but a dict by the steps of a run, of which one is 0."""
    require_mapping(caller, name, value, f"a dict by step, such as {example}")
    for step in value:
        require_int(caller, f"the steps of {name}", step, least=0, most=(1 << 32) - 2)
    if 0 not in value:
        raise ValueError(f"{caller} needs {name} from step 0 on, such as {example}. Got steps {list(value)}.")


def require_items(caller: str, what: str, value: Any) -> None:
    """Refuse anything but what has a length, which is not 0, and `[index]`."""
    try:
        length = len(value) if hasattr(value, "__getitem__") else None
    except Exception:
        length = None
    if length is None:
        raise TypeError(f"{caller} needs {what} with a length and [index]. Got {describe_value(value)}.")
    if length == 0:
        raise ValueError(f"{caller} needs at least one item. Got {type(value).__name__} of length 0.")


def listed(value: Any) -> list[Any] | None:
    """The items of anything with an order; None for text, mappings, sets, and what cannot be gone through."""
    if isinstance(value, str | bytes | Mapping | Set):
        return None
    try:
        return list(value)
    except Exception:
        return None


def require_names(caller: str, name: str, value: Any) -> list[str]:
    """A list of names; refuse anything else, a single name above all, which would pass for a list of letters."""
    names = listed(value)
    if names is None or not all(isinstance(item, str) for item in names):
        hint = f"; write [{value!r}]" if isinstance(value, str) else ""
        raise TypeError(f"{caller} needs {name} to be a list of names. Got {describe_value(value)}{hint}.")
    return names


def ends_silently(kind: type[BaseException]) -> bool:
    """Whether such an exception, raised by an iterator, would end a loop or the program without a word."""
    return not issubclass(kind, Exception) or issubclass(kind, StopIteration | StopAsyncIteration)


def aloud(kind: type[BaseException], message: str) -> RuntimeError:
    """What is raised in place of an exception that ends things silently."""
    return RuntimeError(f"a sample raised {kind.__name__}" + (f": {message}" if message else ""))


def noted(error: BaseException, note: str) -> BaseException:
    """The user's error with a note; StopIteration, which would end a loop without a word, as a RuntimeError."""
    if ends_silently(type(error)):
        replacement = aloud(type(error), str(error))
        replacement.__cause__ = error
        error = replacement
    error.add_note(note)
    return error


@contextlib.contextmanager
def raised_in(call: str) -> Iterator[None]:
    """Around code of others: their errors keep their type, and get a note that says what was called."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Raised in {call}.")
        raise


def require_callable(caller: str, name: str, value: Any, arguments: str | None = None) -> None:
    """Refuse anything that cannot be called or cannot be hashed (compiled programs are looked up by function).

    Args:
        caller: The caller's name, for errors.
        name: The argument's name.
        value: The function.
        arguments: What it will be called with, by position, such as "value, mask"; None leaves that open.
    """
    if not callable(value):
        raise TypeError(f"{caller} needs {name} to be a function. Got {describe_value(value)}.")
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"{caller} needs {name} to be hashable, because compiled programs are looked up by it. "
            f"{type(value).__name__} is not; wrap it in a function: lambda *args: module(*args)."
        ) from None
    if arguments is not None:
        require_arguments(caller, name, value, arguments)


def require_arguments(caller: str, name: str, fn: Callable[..., Any], arguments: str) -> None:
    """Refuse a function that cannot be called with these arguments by position, if its signature says so."""
    wrapped: Any = fn
    while wrapped is not None:  # a decorator may take other arguments than what it wraps
        try:
            signature = inspect.signature(wrapped, follow_wrapped=False)
        except (TypeError, ValueError):  # some functions of C have none
            return
        try:
            signature.bind(*arguments.split(", "))
        except TypeError:
            wrapped = getattr(wrapped, "__wrapped__", None)
        else:
            return require_no_lost_default(caller, name, signature, arguments)
    raise TypeError(
        f"{caller} calls {name}({arguments}). {function_name(fn)} takes {inspect.signature(fn)}. "
        f"Write: lambda {arguments}: ..., or def {name}({arguments})."
    )


def require_no_lost_default(caller: str, name: str, signature: inspect.Signature, arguments: str) -> None:
    """Refuse `lambda value, i=i: ...` where two arguments are given: it keeps a variable that would be overwritten."""
    given = zip(arguments.split(", ")[1:], list(signature.parameters.values())[1:], strict=False)
    for argument, parameter in given:
        by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        kept = parameter.default is not parameter.empty and parameter.default is not None
        if by_position and kept and parameter.name != argument:
            raise TypeError(
                f"{caller} calls {name}({arguments}), so {parameter.name} would be {argument}, and not what it is by "
                f"default, {describe_value(parameter.default)}. Put {argument} before it, or bind it with "
                f"functools.partial({name}, {parameter.name}=...)."
            )


@contextlib.contextmanager
def needs(caller: str, package: str, extra: str) -> Iterator[None]:
    """Around the import of an optional package: say how to install it if it is not there."""
    try:
        yield
    except ImportError:
        raise ImportError(f"{caller} needs {package}. Run: pip install {_requirements(package, extra)}") from None


def _requirements(package: str, extra: str) -> str:
    """What an extra installs, for a shell: pip finds these by name, however this package itself was installed."""
    from importlib import metadata  # only where something is missing: it takes longer to import than all of the others

    marker = re.compile(rf"""(.+?) *;.*\bextra == ['"]{extra.replace("_", "-")}['"]""")
    with contextlib.suppress(metadata.PackageNotFoundError):
        found = map(marker.fullmatch, metadata.requires("millstream") or ())
        return " ".join(shlex.quote(match[1]) for match in found if match is not None) or package
    return package  # a copy of the source that was never installed


def require_posix(caller: str, instead: str) -> None:
    """Refuse Windows where a part is built on calls that it does not have.

    Args:
        caller: The caller's name, for errors.
        instead: What works there.
    """
    if sys.platform == "win32":
        raise NotImplementedError(f"{caller} runs on Linux and macOS. This is Windows: {instead}.")
