"""What is made from samples, as a hash: of samples, arguments, and the code of functions with the values that they use.

What is seen of a function: its bytecode, constants and names, its defaults, the variables it closes over and the
globals it names, as far as these are plain values, arrays, dataclasses, functions of the same module (seen likewise)
or functions of other modules (their own code). Modules and classes are seen by their names.
"""

import dataclasses
import datetime
import dis
import enum
import functools
import hashlib
import inspect
import operator
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from millstream.files import plain
from millstream.files.plan_file import VERSION
from millstream.files.plan_folder import PlanFolder
from millstream.plan.selection import digest_of
from millstream.reading.contracts import IndexedSource
from millstream.reading.fingerprint import identity
from millstream.reading.host_source import as_host_source
from millstream.reading.view import View
from millstream.text.errors import describe_value, function_name

_LEAVES = (type(None), bool, int, float, complex, str, bytes)
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)


def made_of(
    caller: str, folder: PlanFolder, source: IndexedSource, kind: str, *arguments: Any, reads: bool = True
) -> bytes:
    """The hash of what a plan is made from.

    Args:
        caller: The caller's name, for errors.
        folder: Where it is kept; its version stands for what cannot be seen.
        source: The samples.
        kind: What is made of them.
        *arguments: With which arguments: plain values, arrays, functions.
        reads: Whether samples are looked at, so that their contents matter.
    """
    contents = identity(source, reads=reads)
    unknown = [name for name, words in contents if words is None]
    if unknown and folder.version is None:
        raise TypeError(
            f"{caller} cannot tell whether the samples of {type(source).__name__} are those of a plan file: they "
            f"cannot be read, differ when they are read again, or are objects that have no bytes. {_fix(folder)}"
        )
    seen = tuple(seen_value(caller, argument, folder.version, "a plan file", _fix(folder)) for argument in arguments)
    base = source.source if isinstance(source, View) else source
    host = as_host_source(base) if reads and base.arrays is None else None
    used = [] if host is None else [_fingerprints(function, set()) for function in host.functions]
    facts = VERSION, kind, folder.version, contents, seen, used
    return hashlib.sha256(plain.encode(facts, caller)).digest()


def _fix(folder: PlanFolder) -> str:
    return (
        "Give what stands for it, and change that when it changes: "
        f"plans=ms.views.plans({str(folder.directory)!r}, version='1')."
    )


def seen_value(caller: str, value: Any, version: str | None, kept: str, fix: str) -> Any:
    """A value or a function as a plain value that is equal for equal ones.

    Args:
        caller: The caller's name, for errors.
        value: What is looked at.
        version: Stands for what cannot be seen of it; None refuses that.
        kept: What it is compared with, for errors.
        fix: How to say a version, for errors.
    """
    return _Seen(caller, version, kept, fix).value(value)


class _Seen:
    """Values and functions as plain values that are equal for equal ones."""

    def __init__(self, caller: str, version: str | None, kept: str, fix: str) -> None:
        self._caller = caller
        self._version, self._kept, self._fix = version, kept, fix
        self._path: list[str] = []  # of variables that lead to what is looked at
        self._above: list[object] = []  # what it is a part of
        self._home: str | None = None  # the module whose functions are followed
        self._functions: dict[int, tuple[Any, ...]] = {}

    def value(self, value: Any) -> Any:
        """A value, with the type it has."""
        if type(value) in _LEAVES:
            return value
        if any(value is one for one in self._above):
            return "itself", type(value).__name__
        self._above.append(value)
        try:
            return self._described(value)
        finally:
            self._above.pop()

    def _described(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, types.FunctionType):
            if id(value) not in self._functions:  # by its hash, so that functions of functions nest no further
                facts = plain.encode(self._function(value), self._caller)
                self._functions[id(value)] = "function", hashlib.sha256(facts).hexdigest()
            return self._functions[id(value)]
        if isinstance(value, types.MethodType):
            return "method", self.value(value.__func__), self._named("self", value.__self__)
        if isinstance(value, functools.partial):
            return "partial", self.value(value.func), self.value(value.args), self.value(value.keywords)
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, type):
            return "class", value.__module__, value.__qualname__
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, list | tuple):
            return name, *(self._named(f"[{number}]", item) for number, item in enumerate(value))
        if isinstance(value, dict):
            return name, *((self.value(key), self._named(f"[{key!r}]", item)) for key, item in value.items())
        if isinstance(value, set | frozenset):
            return name, *sorted(plain.encode(self.value(item), self._caller) for item in value)
        if isinstance(value, enum.Enum):
            return "enum", name, value.name
        if isinstance(value, slice | range):
            return name, value.start, value.stop, value.step
        if isinstance(value, pathlib.PurePath | np.dtype | datetime.date | datetime.time | datetime.timedelta):
            return name, str(value)
        if isinstance(value, re.Pattern):
            return name, value.pattern, value.flags
        if isinstance(value, _GETTERS):
            return name, self.value(value.__reduce__()[1])
        if isinstance(value, _DESCRIPTORS):
            return name, value.__objclass__.__qualname__, value.__name__
        if isinstance(getattr(value, "fingerprint", None), str):  # of a tokenizer
            return "fingerprint", name, value.fingerprint
        if dataclasses.is_dataclass(value):
            fields = ((field.name, self._named(field.name, getattr(value, field.name))) for field in _fields(value))
            return "dataclass", name, *fields, self._call_of(kind)
        array = _as_array(value)
        if array is not None:
            return "array", array.dtype.str, array.shape, digest_of(array)
        if isinstance(getattr(value, "__wrapped__", None), types.FunctionType):  # jax.jit, functools.cache
            return "wrapped", name, self.value(value.__wrapped__)
        found = _importable(value)
        if found is not None:
            return "named", *found
        return self._unseen(value)

    def _named(self, name: str, value: Any) -> Any:
        """A value inside another one, under the name that an error gives it."""
        self._path.append(name)
        found = self.value(value)
        self._path.pop()
        return found

    def _function(self, fn: types.FunctionType) -> tuple[Any, ...]:
        if self._home is None:
            self._home = fn.__module__
        if fn.__module__ != self._home:
            return fn.__module__, fn.__qualname__, self._code(fn.__code__)
        used = {**dict(_closed_over(fn)), **dict(_globals_of(fn))}
        variables = ((name, self._named(f"its variable {name!r}", used[name])) for name in sorted(used))
        given = self._named("its defaults", (fn.__defaults__, fn.__kwdefaults__))
        return self._code(fn.__code__), given, *variables

    def _code(self, code: types.CodeType) -> tuple[Any, ...]:
        """Code without names of files and numbers of lines: what it does, not where it is written."""
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        consts = tuple(self.value(const) if const is not Ellipsis else "..." for const in code.co_consts)
        return "code", sys.implementation.cache_tag, code.co_code, code.co_exceptiontable, consts, names, counts

    def _call_of(self, kind: type) -> Any:
        """What an object of a class does when it is called."""
        call = inspect.getattr_static(kind, "__call__", None)
        return self.value(call) if isinstance(call, types.FunctionType) else None

    def _unseen(self, value: Any) -> tuple[Any, ...]:
        if self._version is None:
            function = next((one for one in self._above if callable(one)), value)
            where = ", ".join(self._path) or "it"
            raise TypeError(
                f"{self._caller} cannot tell whether {function_name(function)} is the function of {self._kept}: {where} "
                f"is {describe_value(value)}, whose contents it cannot see. {self._fix}"
            )
        return "not seen", type(value).__module__, type(value).__qualname__, self._call_of(type(value))


def _fingerprints(value: Any, seen: set[int], home: str | None = None) -> list[str]:
    """Those of what a function uses, such as a tokenizer: sixteen samples may not tell it from a different one.

    Args:
        value: The function, or what it uses.
        seen: What was looked at before.
        home: The module whose functions are followed; None for that of the first one.
    """
    if id(value) in seen or isinstance(value, type | types.ModuleType) or type(value) in _LEAVES:
        return []
    seen.add(id(value))
    if isinstance(getattr(value, "fingerprint", None), str):
        return [value.fingerprint]
    if isinstance(value, types.FunctionType):
        home = value.__module__ if home is None else home
        if value.__module__ != home:
            return []
        used = [*dict(_closed_over(value)).values(), *dict(_globals_of(value)).values()]
    elif isinstance(value, types.MethodType):
        used = [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        used = [value.func, *value.args, *value.keywords.values()]
    elif callable(value) or dataclasses.is_dataclass(value):
        used = list(getattr(value, "__dict__", {}).values())
    else:
        used = []
    return [found for one in used for found in _fingerprints(one, seen, home)]


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _as_array(value: Any) -> np.ndarray | None:
    """An array of numbers or text of any library, or a NumPy number; None for anything else."""
    if not hasattr(value, "__array__") or not hasattr(value, "dtype"):
        return None
    try:
        array = np.asarray(value)
    except Exception:  # a key of JAX
        return None
    return None if array.dtype.hasobject else array


def _importable(value: Any) -> tuple[str, str] | None:
    """Module and name of what is found there: functions of C, ufuncs."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not isinstance(module, str) or not isinstance(name, str) or module not in sys.modules:
        return None
    try:
        same = operator.attrgetter(name)(sys.modules[module]) is value
    except AttributeError:
        return None
    return (module, name) if same else None


def _closed_over(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            yield name, "no value yet"


def _globals_of(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that a function names, and the functions of modules that it names, as in `filters.is_long`."""
    for names in _global_names(fn.__code__):
        if names[0] not in fn.__globals__:
            continue
        value, depth = fn.__globals__[names[0]], 1
        yield names[0], value
        while isinstance(value, types.ModuleType) and depth < len(names):
            value, depth = getattr(value, names[depth], None), depth + 1
        if depth > 1 and isinstance(value, types.FunctionType):
            yield ".".join(names[:depth]), value


def _global_names(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """The globals that code and the code inside it load, each with the attributes that are loaded of it at once."""
    found: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and found:
            found.append(instruction.argval)
        elif instruction.opname != "EXTENDED_ARG":
            if found:
                yield tuple(found)
            found = [instruction.argval] if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _global_names(const)
