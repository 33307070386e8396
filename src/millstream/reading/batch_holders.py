"""Which batches are still held, and what holds them."""

import collections
import contextlib
import dataclasses
import gc
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

_LIBRARY = "Millstream, which is using it"

_LEVELS = 12
_BREADTH = 32  # objects per level: the collector compares each of them to every reference of the program
_PLAIN = (str, int, float, bool, bytes, type(None))  # keys that are shown: the repr of others runs code
_SEQUENCES = (list, tuple, collections.deque)
_GENERATORS = {types.GeneratorType: "gi_frame", types.CoroutineType: "cr_frame", types.AsyncGeneratorType: "ag_frame"}
_BATCH_TYPES = ("millstream.dialects.", "millstream.loader.train_stream")
_BATCHES = 8  # that are named
_HOLDERS = 3  # per batch that are named
_PRUNE = 64  # entries, besides as many as were alive, before dead ones are looked for
_handed_out: list[tuple[int, list[weakref.ref[Any]]]] = []
_limit = _PRUNE
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Node:
    """An object that was met on the way up.

    Attributes:
        value: The object.
        inner: What it refers to; None for an object whose holders are looked for.
        number: Which of these that leads to.
    """

    value: Any
    inner: "_Node | None"
    number: int

    def path(self) -> list[Any]:
        """From this object down to the one whose holders are looked for."""
        return [self.value, *(self.inner.path() if self.inner is not None else ())]


def _find_holders(objects: list[Any]) -> list[list[str]]:
    """The variables that keep each object alive, as texts; none if nothing that Python knows refers to it.

    The search goes up, for at most twelve levels, from an object to the lists, dicts, attributes, closures and
    variables that refer to it. It ends where an object has a named holder, and keeps nothing alive.

    Args:
        objects: The objects; this list is not counted as a holder.
    """
    found: list[list[str]] = [[] for _ in objects]
    outermost: dict[int, str] = {}
    local_variables = _local_variables()
    level = [_Node(value, None, number) for number, value in enumerate(objects)]
    for _ in range(_LEVELS):
        by_id: dict[int, list[_Node]] = {}
        for node in level:
            by_id.setdefault(id(node.value), []).append(node)
            for name, where in local_variables.get(id(node.value), ()):
                _add(found[node.number], _LIBRARY if where is None else _words(node.path(), name, where))
        level = []
        values = [nodes[0].value for nodes in by_id.values()]
        for holder in gc.get_referrers(*values):
            if holder is objects or holder is values or type(holder) is _Node:
                continue  # the search itself
            for reached in {id(value) for value in gc.get_referents(holder)} & by_id.keys():
                for node in by_id[reached]:
                    text = _root(node.path(), holder)
                    if text is not None:
                        _add(found[node.number], text)
                    elif len(level) < _BREADTH and (_may_be_batch(node) or {*found[node.number]} <= {_LIBRARY}):
                        level.append(_Node(holder, node, node.number))
        outermost |= {node.number: _describe_unnamed(node.value) for node in level}
        if not level:
            break
    for number, text in outermost.items():
        found[number] = found[number] or [text]
    return [[text for text in texts if text != _LIBRARY] or texts for texts in found]


def _may_be_batch(node: _Node) -> bool:
    """Whether other holders count besides one that is found: a batch can be kept twice."""
    return node.inner is None or _is_part_of_batch(node.value)


def _add(texts: list[str], text: str) -> None:
    if text not in texts:
        texts.append(text)


def _local_variables() -> dict[int, list[tuple[str, str | None]]]:
    """Names and places of the local variables of all running functions, by the id of the value.

    The collector does not see these. The place is None for functions of the library.
    """
    variables: dict[int, list[tuple[str, str | None]]] = {}
    for frame in [*sys._current_frames().values()]:
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and module not in (
                __name__,
                "millstream.reading.batch_holders",
            ):
                where = None if _is_ours(module) else _place(frame)
                for name, value in _locals_of(frame):
                    variables.setdefault(id(value), []).append((name, where))
            frame = frame.f_back
    return variables


def _locals_of(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The local variables of a function; before Python 3.13, asking for them leaves a copy that holds them."""
    snapshot = frame.f_locals
    variables = [*snapshot.items()]
    if isinstance(snapshot, dict) and sys.getrefcount(snapshot) <= 3:  # the frame, this variable, the argument
        snapshot.clear()
    return variables


def _place(frame: types.FrameType) -> str:
    return f"a local variable of {frame.f_code.co_qualname}() in {frame.f_code.co_filename}:{frame.f_lineno}"


def _root(path: list[Any], holder: Any) -> str | None:
    """What to say of a holder that ends the search; None if it is held in turn by something with a name.

    Args:
        path: From what it refers to down to the object.
        holder: The holder.
    """
    kind = type(holder)
    if kind is dict and "__builtins__" in holder:
        module = holder.get("__name__", "a program")
        return _words(path, f"{_key_of(holder, path[0])}", f"a global variable of {module}")
    if kind is types.FunctionType:
        return _held_by_function(path, holder)
    if kind is types.FrameType or kind in _GENERATORS:
        frame: types.FrameType | None = holder if kind is types.FrameType else getattr(holder, _GENERATORS[kind])
        if frame is None:  # it has ended
            return None
        names = [name for name, value in _locals_of(frame) if value is path[0]]
        return _words(path, names[0], _place(frame)) if names else None
    if issubclass(kind, type):
        # Its attributes are in a dict that only the class itself can see.
        below = path[1:] if type(path[0]) is dict and len(path) > 1 else path
        return _words([holder, *below], holder.__qualname__, f"a class of {holder.__module__}")
    if _is_ours(kind.__module__) and not _is_part_of_batch(holder):
        return _LIBRARY
    return None


def _held_by_function(path: list[Any], function: types.FunctionType) -> str:
    if path[0] is function.__closure__ and len(path) > 2 and type(path[1]) is types.CellType:
        names = zip(function.__code__.co_freevars, path[0], strict=True)
        name = next(name for name, cell in names if cell is path[1])
        return _words(path[2:], name, f"a variable that the function {function.__qualname__} closes over")
    return f"a default value or an attribute of the function {function.__qualname__}"


def _words(path: list[Any], name: str, where: str) -> str:
    """A holder as a reader knows it: an expression, and where its variable is.

    Args:
        path: From the value of the variable down to the object.
        name: The name of the variable.
        where: What kind of variable it is, and where.
    """
    # The attributes of an instance may or may not be in a dict of their own.
    chain = [value for at, value in enumerate(path) if at == 0 or value is not _attributes_of(path[at - 1])]
    while len(chain) > 1 and _is_part_of_batch(chain[-2]):
        chain.pop()
    steps = [_step(outer, value) for outer, value in itertools.pairwise(chain)]
    item = ""
    if steps and type(chain[-2]) in _SEQUENCES:
        item = f"item {steps.pop()[1:-1]} of the {type(chain[-2]).__name__} "
    text = f"{item}`{name}{''.join(steps)}`"
    return f"{text}, where `{name}` is {where}" if steps else f"{text}, {where}"


def _describe_unnamed(value: Any) -> str:
    size = f" of {len(value)}" if type(value) in (dict, set, *_SEQUENCES) else ""
    return f"a {type(value).__name__}{size} that no variable names"


def _step(outer: Any, value: Any) -> str:
    """How to write the step from an object to what it holds."""
    kind = type(outer)
    if kind in _SEQUENCES:
        return f"[{_index_of(outer, value)}]"
    if issubclass(kind, dict):
        return f"[{_key_of(outer, value)!r}]"
    names = [*(_attributes_of(outer) or ()), *(name for base in kind.__mro__ for name in _slots_of(base))]
    return next((f".{name}" for name in names if _attribute(outer, name) is value), "")


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _attribute(owner: Any, name: str) -> Any:
    """An attribute as it is stored, without any code of the class."""
    stored = _attributes_of(owner) or {}
    slot = next((vars(base)[name] for base in type(owner).__mro__ if name in vars(base)), None)
    if name not in stored and isinstance(slot, types.MemberDescriptorType):
        with contextlib.suppress(AttributeError):  # it is empty
            return slot.__get__(owner)
    return stored.get(name)


def _attributes_of(value: Any) -> Any:
    """The dict of an instance's attributes, without any code of its class; None if it has none."""
    try:
        return dict(vars(value)) if issubclass(type(value), type) else object.__getattribute__(value, "__dict__")
    except Exception:  # a class may have a `__dict__` of its own
        return None


def _index_of(values: Iterable[Any], value: Any) -> int | str:
    try:
        return next((index for index, held in enumerate(values) if held is value), "...")
    except RuntimeError:  # another thread has changed it meanwhile
        return "..."


def _key_of(values: dict[Any, Any], value: Any) -> Any:
    """The key of a value, if it is one that can be shown."""
    key = next((key for key, held in dict.copy(values).items() if held is value), ...)
    return key if type(key) in _PLAIN else ...


def _is_part_of_batch(value: Any) -> bool:
    """Whether this may be a batch, or a part of one, rather than something that batches are kept in."""
    kind = type(value)
    return issubclass(kind, dict | tuple | types.MappingProxyType) or kind.__module__.startswith(_BATCH_TYPES)


def _is_ours(module: Any) -> bool:
    return isinstance(module, str) and module.startswith("millstream.")


def debug_batch_references() -> None:
    """Print which batches are alive, and which variable holds each of them, also through lists, dicts and attributes.

    It looks up to twelve levels up, and names local variables of running functions and generators, global variables,
    attributes of classes and what functions close over. It keeps nothing alive itself.

    Example:
        >>> source = ms.DiskSampleSource(8, lambda index: {"x": np.float32(index)})
        >>> loader = ms.DataLoader([source, ms.BatchTransform(4)])
        >>> kept = [batch for batch, mask in loader.iterate(loader.init_state(jax.random.key(0)))]
        >>> ms.reading.debug_batch_references()  # doctest: +ELLIPSIS
        2 batches are held:
          batch 0: item 0 of the list `kept`, a global variable of ...
          batch 1: item 1 of the list `kept`, a global variable of ...
    """
    print(describe_holders())


def remember(step: int, arrays: Iterable[Any]) -> None:
    """Note the arrays of a batch that is handed out; they are not kept alive."""
    global _limit
    with _lock:
        if len(_handed_out) >= _limit:
            _handed_out[:] = [entry for entry in _handed_out if any(ref() is not None for ref in entry[1])]
            _limit = 2 * len(_handed_out) + _PRUNE
        _handed_out.append((step, [weakref.ref(array) for array in arrays]))


def describe_holders() -> str:
    """The batches of all streams that are alive, and what holds their arrays, in words."""
    held = _alive()
    if not held:
        return "No batch is held."
    return "\n".join(["1 batch is held:" if len(held) == 1 else f"{len(held)} batches are held:", *_lines(held)])


def describe_newest(count: int) -> str:
    """What holds the arrays of the batches that were handed out last, of those that are alive."""
    return "\n".join(["The newest batches that are held:", *_lines(_alive()[-count:])])


def _lines(held: list[tuple[int, Any]]) -> list[str]:
    lines, shown = [], held[:_BATCHES]
    for (step, _), holders in zip(shown, _find_holders([array for _, array in shown]), strict=True):
        more = f"; and {len(holders) - _HOLDERS} more" if len(holders) > _HOLDERS else ""
        lines.append(f"  batch {step}: {'; '.join(holders[:_HOLDERS]) or 'JAX, or an array made from it'}{more}")
    return lines if len(held) <= _BATCHES else [*lines, f"  and {len(held) - _BATCHES} more"]


def _alive() -> list[tuple[int, Any]]:
    """The step and one array of each batch that is alive."""
    return [(step, array) for step, refs in [*_handed_out] if (array := _first_alive(refs)) is not None]


def _first_alive(refs: list[weakref.ref[Any]]) -> Any:
    return next((array for array in (ref() for ref in refs) if array is not None), None)
