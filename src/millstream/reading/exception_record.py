"""An exception as plain values: recorded in a worker process, rebuilt in the main one.

No exception is pickled. Many cannot be (a lock inside, an `__init__` with two arguments), and the main process must not
run what a worker sends. It looks up classes it already has, and fills their instances without calling any user's code
but `__str__`.
"""

import builtins
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import cloudpickle.cloudpickle

from millstream.files import plain
from millstream.text.errors import aloud, ends_silently

_MESSAGE = 10_000  # characters
_TRACEBACK = 20_000  # characters
_PART = 65_536  # bytes of one argument or attribute
_PARTS = 100
_MEMBERS = 30

_BUILTIN = {kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)}


def record(error: BaseException) -> dict[str, Any]:
    """An exception in plain values: class, message, arguments, attributes, notes, members, and the traceback's text.

    Arguments that are not plain are replaced by their text, such attributes are left out. It never fails.

    Example:
        >>> from millstream.reading.exception_record import rebuild, record
        >>> rebuild(record(KeyError("image")))
        KeyError('image')

    Args:
        error: Any exception, also one whose `__str__` fails.
    """
    return {**_outline(error, _MEMBERS), "traceback": _traceback_text(error)}


def rebuild(record: dict[str, Any]) -> Exception:
    """An exception to raise in the place of a recorded one: of the same class, if this process has it, and text.

    A class this process does not have is replaced by a new one of the same name under the nearest base it has. What
    would end a loop or the program silently becomes a RuntimeError. The worker's traceback is a note.

    Example:
        >>> from millstream.reading.exception_record import rebuild, record
        >>> rebuild(record(SystemExit(3)))
        RuntimeError('a sample raised SystemExit: 3')

    Args:
        record: What `record` returned in the worker.
    """
    try:
        error = _rebuild(record)
        notes = [str.__str__(note) for note in record["notes"]]
        if record.get("traceback"):  # first, so that the last line a user sees is the note that names the sample
            notes.insert(0, f"Traceback in the worker:\n{record['traceback']}")
        if notes:
            _attributes(error)["__notes__"] = notes
        return error
    except Exception as failure:
        return RuntimeError(f"a worker process sent an exception that cannot be read ({failure!r})")


# In the worker


def _outline(error: BaseException, room: int) -> dict[str, Any]:
    """All but the traceback. `room` bounds the members of a group, of its groups, and so on, all together."""
    attributes = dict(_attributes(error))
    notes = attributes.pop("__notes__", None)
    fields = {name: _result_or_none(field.__get__, error) for name, field in _fields(type(error))}
    members = fields.pop("exceptions", ())[:room]
    args = () if isinstance(error, BaseExceptionGroup) else _ARGS.__get__(error)
    return {
        "name": type(error).__name__,
        "classes": [[*_address(kind), _tracker_id(kind)] for kind in type(error).__mro__[:-1]],
        "message": _text(error),
        "args": [_part(arg) or _part(_text(arg)) for arg in args[:_PARTS]],
        "fields": _parts({name: value for name, value in fields.items() if value is not None}),
        "attributes": _parts(attributes),
        "notes": [_text(note) for note in notes[:_PARTS]] if isinstance(notes, list) else [],
        "members": [_outline(member, (room - len(members)) // len(members)) for member in members],
    }


def _parts(values: dict[str, Any]) -> dict[str, bytes]:
    named = {name: _part(value) for name, value in list(values.items())[:_PARTS]}
    return {name: part for name, part in named.items() if part is not None}


def _part(value: Any) -> bytes | None:
    """A plain value as bytes; None if it is not plain or too large."""
    try:
        data = plain.encode(_cut(value) if type(value) is str else value)
    except Exception:
        return None
    return data if len(data) <= _PART else None


def _text(value: Any) -> str:
    try:
        return _cut(str(value))
    except BaseException as failure:  # whatever a user's __str__ raises, the error itself must be reported
        return f"(no text: str() raised {type(failure).__name__})"


def _cut(text: str) -> str:
    text = str.__str__(text)  # __str__ may return a subclass, which is not plain
    return text if len(text) <= _MESSAGE else f"{text[:_MESSAGE]}... ({len(text) - _MESSAGE} characters more)"


def _traceback_text(error: BaseException) -> str:
    try:
        summary = traceback.TracebackException.from_exception(error, compact=True)
        vars(summary)["__notes__"] = None  # they travel on their own
        text = "".join(summary.format())
    except BaseException as failure:
        return f"(not available: formatting it raised {type(failure).__name__})"
    half, more = _TRACEBACK // 2, len(text) - _TRACEBACK
    return text if more <= 0 else f"{text[:half]}\n... ({more} characters more) ...\n{text[-half:]}"


def _tracker_id(kind: type) -> str | None:
    """Under which id cloudpickle brought this class here by value, if it did."""
    return _result_or_none(lambda: cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(kind))


# In the main process


def _rebuild(record: dict[str, Any]) -> Exception:
    name, message = str.__str__(record["name"]), str.__str__(record["message"])  # a TypeError for anything but text
    for number, address in enumerate(record["classes"]):
        kind = _find_class(*address)
        if kind is None:
            continue
        try:
            kind = kind if number == 0 else _subclass(kind, name, *record["classes"][0][:2])
            if ends_silently(kind):
                return aloud(kind, message)
            error = _new_instance(kind, record)
            if not _says(error, message):
                fixed = _subclass(kind, kind.__name__, *_address(kind), __str__=lambda self: message)
                error = _new_instance(fixed, record)
            return error
        except Exception:  # a metaclass that refuses, say; a base further up will do
            continue
    return RuntimeError(f"a sample raised {name}: {message}")


def _says(error: Exception, message: str) -> bool:
    try:
        return str(error) == message
    except BaseException:  # as in the worker
        return False


def _find_class(module: str, qualname: str, tracker: str | None) -> type[BaseException] | None:
    """The exception class of that name or tracker id, if this process has it already. Imports nothing."""
    found: Any = _result_or_none(lambda: cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker))
    if found is None:
        found = sys.modules.get(module)
        for part in qualname.split("."):
            found = _namespace(found).get(part)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _namespace(owner: Any) -> Any:
    """The names in a module or class, past any `__getattr__`, which could import or run something."""
    if isinstance(owner, types.ModuleType):
        return object.__getattribute__(owner, "__dict__")
    return type.__getattribute__(owner, "__dict__") if isinstance(owner, type) else {}


class _Unannounced:
    """Comes before a user's class among the bases, so that its `__init_subclass__` does not run."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


def _subclass(
    base: type[BaseException], name: str, module: str, qualname: str, **members: Callable[..., Any]
) -> type[BaseException]:
    """A class under `base` that shows the given name, module and qualified name."""
    return type(name, (_Unannounced, base), {"__module__": module, "__qualname__": qualname, **members})


def _new_instance(kind: type[BaseException], record: dict[str, Any]) -> Any:
    """An instance of `kind` with the recorded contents, made by no `__new__` or `__init__` of a user."""
    native: Any = kind
    while native not in _BUILTIN:
        native = native.__base__  # the base whose layout it has, which need not be the first
    new: Any = native.__new__
    fields = {name: plain.decode(part) for name, part in record["fields"].items()}
    if issubclass(native, BaseExceptionGroup):
        members = [rebuild(member) for member in record["members"]] or [RuntimeError("(members left out)")]
        error = new(kind, fields.get("message", ""), members)
    else:
        error = new(kind)
        _ARGS.__set__(error, tuple(plain.decode(part) for part in record["args"]))
    for name, field in _fields(kind):
        if name in fields:
            _result_or_none(field.__set__, error, fields[name])  # a group's are read-only
    _attributes(error).update({name: plain.decode(part) for name, part in record["attributes"].items()})
    return error


# On both sides

_ARGS: Any = vars(BaseException)["args"]


def _fields(kind: type) -> list[tuple[str, Any]]:
    """What builtin classes keep outside `__dict__`: an OSError's errno, a UnicodeDecodeError's encoding, and so on."""
    return [
        (name, member)
        for base in kind.__mro__
        if base in _BUILTIN and base is not BaseException
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType) and not name.startswith("_")
    ]


def _address(kind: type) -> tuple[str, str]:
    module = _result_or_none(getattr, kind, "__module__")
    return (module if type(module) is str else ""), kind.__qualname__


def _attributes(error: BaseException) -> dict[str, Any]:
    return object.__getattribute__(error, "__dict__")


def _result_or_none(compute: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return compute(*arguments)
    except Exception:
        return None
