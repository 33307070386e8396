"""Awkward exceptions of a worker process arrive with their type, their text and their traceback, and run nothing."""

import subprocess
import sys
import threading
import types

import cloudpickle
import pytest

from millstream.files import plain
from millstream.reading.exception_record import rebuild, record
from millstream.text.errors import noted

WORKER = """
import sys
import cloudpickle
from millstream.files import plain
from millstream.reading.exception_record import record

records = {}
for name, function in cloudpickle.load(sys.stdin.buffer).items():
    try:
        plain.encode(function())
    except BaseException as error:
        records[name] = record(error)
assert "jax" not in sys.modules
sys.stdout.buffer.write(plain.encode(records))
"""


def in_a_worker(functions):
    """What each function raised, in another process; all of them in one."""
    payload = cloudpickle.dumps(functions)
    child = subprocess.run([sys.executable, "-c", WORKER], input=payload, stdout=subprocess.PIPE, check=True)
    return {name: rebuild(record) for name, record in plain.decode(child.stdout).items()}


def make_zoo(folder):
    """Exception classes that live only in this function, and functions that raise them and others."""

    class Local(Exception):
        pass

    class TwoArguments(ValueError):
        def __init__(self, path, line):
            super().__init__(f"{path}:{line}")
            self.path, self.line = path, line

    class HoldsLock(Exception):
        def __init__(self, text):
            super().__init__(text, threading.Lock())
            self.lock, self.text = threading.Lock(), text

        def __str__(self):
            return f"{self.text} while locked={self.lock.locked()}"

    class Mute(Exception):
        def __str__(self):
            raise ZeroDivisionError

        __repr__ = __str__

        def __reduce__(self):
            raise ZeroDivisionError

    class Counting(Exception):
        made: list[object] = []  # noqa: RUF012

        def __new__(cls, *args):
            cls.made.append("new")
            return super().__new__(cls, *args)

        def __init__(self, number):
            super().__init__(number)
            self.made.append("init")

    class FromFile(OSError):
        def __init__(self, text):
            super().__init__(text)
            self.text = text

    class Both(ValueError, OSError):
        pass

    def raising(error_of):
        def run():
            raise error_of()

        return run

    def cyclic():
        first, second = ValueError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    def made_in_the_worker():
        class Unknown(TwoArguments):
            pass

        raise Unknown("a.png", 7)

    def of_a_module_only_the_worker_has():
        sys.path.insert(0, str(folder))
        import rare_errors  # pyright: ignore

        raise rare_errors.Outer.Rare("rare")

    def with_notes():
        error = Local("noted")
        error.add_note("This came from sample 7.")
        raise error

    def group():
        inner = ExceptionGroup("inner", [KeyError("k"), TwoArguments("b.png", 8), StopIteration(3)])
        raise ExceptionGroup("outer", [Local("one"), inner])

    functions = {
        "local": raising(lambda: Local("hello")),
        "two arguments": raising(lambda: TwoArguments("a.png", 7)),
        "holds a lock": raising(lambda: HoldsLock("busy")),
        "mute": raising(Mute),
        "huge": raising(lambda: ValueError("x" * 1_000_000)),
        "cyclic": cyclic,
        "group": group,
        "stop": raising(lambda: StopIteration(3)),
        "generator exit": raising(GeneratorExit),
        "exit": raising(lambda: SystemExit(3)),
        "interrupt": raising(KeyboardInterrupt),
        "unpicklable argument": raising(lambda: ValueError("bad", lambda: 0, 3)),
        "error as argument": raising(lambda: RuntimeError(KeyError("k"))),
        "unpicklable result": threading.Lock,
        "lambda in a result": lambda: {"a": [1, lambda: 0]},
        "made in the worker": made_in_the_worker,
        "of a module": of_a_module_only_the_worker_has,
        "counting": raising(lambda: Counting(5)),
        "notes": with_notes,
        "missing": lambda: open(folder / "missing.png"),
        "own OSError": raising(lambda: FromFile("of a file")),
        "two builtin bases": raising(lambda: Both(5, "both")),
        "unicode": lambda: b"ab\xff".decode("utf-8"),
        "json": lambda: __import__("json").loads("{"),
        "syntax": lambda: compile("a b", "f.py", "exec"),
        "import": lambda: __import__("no_such_module"),
        "failed process": lambda: subprocess.run(["false"], check=True),
        "attribute": lambda: "text".nothing,  # pyright: ignore
    }
    kinds = [Local, TwoArguments, HoldsLock, Mute, Counting, FromFile, Both]
    return functions, types.SimpleNamespace(**{kind.__name__: kind for kind in kinds})


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    (folder / "rare_errors.py").write_text("class Outer:\n    class Rare(LookupError):\n        pass\n")
    functions, kinds = make_zoo(folder)
    before = set(sys.modules)
    arrived = in_a_worker(functions)
    assert set(arrived) == set(functions)
    assert "rare_errors" not in set(sys.modules) - before
    return types.SimpleNamespace(arrived=arrived, kinds=kinds, folder=folder)


def test_every_exception_can_be_raised_and_carries_the_traceback_of_the_worker(zoo):
    for name, error in zoo.arrived.items():
        assert isinstance(error, Exception), name
        assert error.__notes__[0].startswith("Traceback in the worker:\n"), name
        assert "Traceback (most recent call last)" in error.__notes__[0], name
        with pytest.raises(type(error)):
            raise error


def test_a_class_that_went_to_the_worker_by_value_is_found_again(zoo):
    error = zoo.arrived["local"]
    assert type(error) is zoo.kinds.Local and str(error) == "hello" and error.args == ("hello",)


def test_an_exception_with_an_init_of_its_own_keeps_its_attributes(zoo):
    error = zoo.arrived["two arguments"]
    assert type(error) is zoo.kinds.TwoArguments and str(error) == "a.png:7"
    assert (error.path, error.line) == ("a.png", 7)


def test_no_init_runs_a_second_time(zoo):
    error = zoo.arrived["counting"]
    assert type(error) is zoo.kinds.Counting and error.args == (5,)
    assert zoo.kinds.Counting.made == []


def test_what_is_not_plain_inside_an_exception_is_left_out_and_its_text_stays(zoo):
    error = zoo.arrived["holds a lock"]
    assert isinstance(error, zoo.kinds.HoldsLock) and type(error).__qualname__ == zoo.kinds.HoldsLock.__qualname__
    assert str(error) == "busy while locked=False"
    assert error.text == "busy" and not hasattr(error, "lock")
    assert error.args[0] == "busy" and "lock object" in error.args[1]
    error = zoo.arrived["unpicklable argument"]
    assert isinstance(error, ValueError) and type(error).__name__ == "ValueError"
    assert str(error).startswith("('bad', <function") and error.args[::2] == ("bad", 3)
    assert type(zoo.arrived["error as argument"]) is RuntimeError and str(zoo.arrived["error as argument"]) == "'k'"


def test_an_exception_whose_text_fails_says_so(zoo):
    error = zoo.arrived["mute"]
    assert isinstance(error, zoo.kinds.Mute)
    assert str(error) == "(no text: str() raised ZeroDivisionError)"


def test_a_huge_message_and_a_huge_traceback_are_cut(zoo):
    error = zoo.arrived["huge"]
    assert type(error) is ValueError
    assert str(error) == "x" * 10_000 + "... (990000 characters more)"
    assert len(error.__notes__[0]) < 21_000 and "characters more) ..." in error.__notes__[0]


def test_a_cycle_of_causes_is_shown_once(zoo):
    error = zoo.arrived["cyclic"]
    assert type(error) is ValueError and str(error) == "first"
    assert error.__notes__[0].count("ValueError: second") == 1


def test_a_group_keeps_its_members(zoo):
    error = zoo.arrived["group"]
    assert type(error) is ExceptionGroup and str(error) == "outer (2 sub-exceptions)"
    first, inner = error.exceptions
    assert type(first) is zoo.kinds.Local and str(first) == "one"
    assert isinstance(inner, ExceptionGroup)
    assert [type(member) for member in inner.exceptions] == [KeyError, zoo.kinds.TwoArguments, RuntimeError]
    assert not hasattr(first, "__notes__")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stop", "a sample raised StopIteration: 3"),
        ("generator exit", "a sample raised GeneratorExit"),
        ("exit", "a sample raised SystemExit: 3"),
        ("interrupt", "a sample raised KeyboardInterrupt"),
    ],
)
def test_what_would_end_a_loop_or_the_program_silently_is_a_runtime_error(zoo, name, text):
    assert type(zoo.arrived[name]) is RuntimeError and str(zoo.arrived[name]) == text


def test_a_result_that_cannot_be_sent_is_a_type_error_that_names_it(zoo):
    assert type(zoo.arrived["unpicklable result"]) is TypeError
    assert "Got result: <unlocked _thread.lock" in str(zoo.arrived["unpicklable result"])
    assert "Got result['a'][1]: <function" in str(zoo.arrived["lambda in a result"])


def test_an_unknown_class_is_replaced_by_one_of_its_name_under_its_nearest_known_base(zoo):
    error = zoo.arrived["made in the worker"]
    assert isinstance(error, zoo.kinds.TwoArguments) and str(error) == "a.png:7" and error.line == 7
    assert type(error).__name__ == "Unknown"
    assert type(error).__qualname__ == "make_zoo.<locals>.made_in_the_worker.<locals>.Unknown"
    error = zoo.arrived["of a module"]
    assert isinstance(error, LookupError) and str(error) == "rare"
    assert (type(error).__module__, type(error).__qualname__) == ("rare_errors", "Outer.Rare")


def test_notes_are_kept_and_come_last(zoo):
    error = zoo.arrived["notes"]
    assert error.__notes__[1:] == ["This came from sample 7."]
    assert "This came from" not in error.__notes__[0]


def test_builtin_exceptions_keep_what_they_hold(zoo):
    arrived = zoo.arrived
    missing = arrived["missing"]
    assert type(missing) is FileNotFoundError and missing.errno == 2
    assert missing.filename == str(zoo.folder / "missing.png") and missing.filename2 is None
    assert str(missing) == f"[Errno 2] No such file or directory: {missing.filename!r}"
    assert type(arrived["own OSError"]) is zoo.kinds.FromFile and str(arrived["own OSError"]) == "of a file"
    both = arrived["two builtin bases"]
    assert type(both) is zoo.kinds.Both and both.args == (5, "both") and str(both) == "(5, 'both')"
    assert type(arrived["unicode"]) is UnicodeDecodeError
    assert (arrived["unicode"].encoding, arrived["unicode"].object, arrived["unicode"].start) == ("utf-8", b"ab\xff", 2)
    assert type(arrived["syntax"]) is SyntaxError and arrived["syntax"].filename == "f.py"
    assert type(arrived["import"]) is ModuleNotFoundError and arrived["import"].name == "no_such_module"
    assert type(arrived["failed process"]) is subprocess.CalledProcessError
    assert arrived["failed process"].returncode == 1 and arrived["failed process"].cmd == ["false"]
    assert type(arrived["attribute"]) is AttributeError and arrived["attribute"].name == "nothing"
    assert arrived["json"].__class__.__name__ == "JSONDecodeError" and arrived["json"].pos == 1


SCRIPT = """
import subprocess, sys
import cloudpickle
from millstream.files import plain
from millstream.reading.exception_record import rebuild

class Broken(Exception):
    def __init__(self, path, line):
        self.path, self.line = path, line

    def __str__(self):
        return f"{self.path} is broken at {self.line}"

def load():
    raise Broken("a.png", 7)

child = subprocess.run([sys.executable, "-c", WORKER], input=cloudpickle.dumps({"load": load}), stdout=subprocess.PIPE)
error = rebuild(plain.decode(child.stdout)["load"])
assert type(error) is Broken and str(error) == "a.png is broken at 7" and error.args == ("a.png", 7), repr(error)
print("script ran once")
"""


def test_a_class_of_the_main_script_is_found_again_without_a_guard(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"WORKER = {WORKER!r}\n{SCRIPT}")
    ran = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout == "script ran once\n"


def test_a_class_is_found_by_name_where_cloudpickle_keeps_no_track(monkeypatch):
    monkeypatch.delattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS")
    monkeypatch.delattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID")
    assert type(rebuild(record(subprocess.TimeoutExpired("x", 3)))) is subprocess.TimeoutExpired


def test_looking_for_a_class_imports_nothing_and_runs_no_module_getattr(monkeypatch):
    module = types.ModuleType("lazy_errors")
    module.__getattr__ = lambda name: pytest.fail("the module was asked")  # pyright: ignore
    monkeypatch.setitem(sys.modules, "lazy_errors", module)
    plan = record(ValueError("x"))
    for address in (["lazy_errors", "Rare", None], ["this", "Rare", None], ["os", "system", None], ["os", "path", ""]):
        error = rebuild(plan | {"name": "Rare", "classes": [address, *plan["classes"]]})
        assert isinstance(error, ValueError) and type(error).__name__ == "Rare" and str(error) == "x"
    assert "this" not in sys.modules


def test_making_a_stand_in_tells_no_init_subclass():
    class Registry(Exception):
        known: list[type] = []  # noqa: RUF012

        def __init_subclass__(cls, *, code):
            cls.known.append(cls)

    class Sent(Registry, code=3):
        pass

    sent = record(Sent("x"))
    sent["classes"] = [["nowhere", "Sent", None], [__name__, "nothing", None], *sent["classes"][1:]]
    sent["classes"][2][2] = cloudpickle.cloudpickle._get_or_create_tracker_id(Registry)
    assert isinstance(rebuild(sent), Registry)
    assert Registry.known == [Sent]


def test_a_large_group_is_cut():
    wide = ExceptionGroup("wide", [ValueError(number) for number in range(1000)])
    deep = wide
    for _ in range(200):
        deep = ExceptionGroup("deep", [deep])
    bushy = ExceptionGroup("bushy", [ExceptionGroup("twigs", [wide] * 10)] * 10)
    for group in (wide, deep, bushy):
        sent = plain.encode(record(group))
        assert len(sent) < 200_000
        error = rebuild(plain.decode(sent))
        assert isinstance(error, ExceptionGroup) and str(error) == str(group)


def test_large_and_many_attributes_are_left_out():
    error = ValueError("x")
    error.data, error.small = b"0" * 10_000_000, None  # pyright: ignore
    vars(error).update({f"a{number}": number for number in range(10_000)})
    sent = record(error)
    assert len(plain.encode(sent)) < 20_000
    assert vars(rebuild(sent))["small"] is None and not hasattr(rebuild(sent), "data")


@pytest.mark.parametrize(
    "damage", [{"classes": [[[], 3, {}]]}, {"classes": 3}, {"message": 5}, {"notes": [3]}, {"args": [b"?"]}]
)
def test_a_damaged_record_is_still_an_exception(damage):
    assert isinstance(rebuild(record(ValueError("x")) | damage), Exception)
    assert isinstance(rebuild(damage), RuntimeError)


def test_a_silent_ending_in_a_thread_is_told_in_the_same_words():
    error = noted(StopIteration(3), "This came from sample 7.")
    assert type(error) is RuntimeError and str(error) == "a sample raised StopIteration: 3"
    assert error.__notes__ == ["This came from sample 7."] and isinstance(error.__cause__, StopIteration)
