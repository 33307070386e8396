"""What every test shares: strict promotion, one key, and a counter of compilations."""

import contextlib
import functools
import gc
import hashlib
import os
import pathlib
import pickle
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import jax
import numpy as np
import pytest
from hypothesis import settings
from worker_processes import children

from millstream.files.lock import locked

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The tests start hundreds of processes, each of which would compile the package from its sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A Ray cluster can be reached from outside, and runs what it is sent. Ray looks at these when it is first imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # older Ray warns until somebody chooses


def _cache_folder() -> pathlib.Path:
    """Where compiled programs stay, for this version of JAX and this kind of processor."""
    processor = platform.machine()
    with contextlib.suppress(FileNotFoundError):
        processor += "".join(re.findall(r"(?:flags|Features)\s*:.*", pathlib.Path("/proc/cpuinfo").read_text())[:1])
    kind = hashlib.sha256(processor.encode()).hexdigest()[:8]
    return pathlib.Path(__file__).parent.parent / "build" / "compiled" / f"jax-{jax.__version__}-{kind}"


# Compiling makes first examples slow, and a fixed seed makes a failure repeat.
settings.register_profile("millstream", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("millstream")

_UNFINISHED = "ignore:Error reading persistent compilation cache entry"  # it is still written; then JAX compiles
# Options of Python for programs that have a cache; Python drops one that is the same as in the environment.
STRICT = ("-W", "error", "-W", f"{_UNFINISHED}:UserWarning")

# What one process has compiled, no other one of this machine compiles again. JAX writes entries in place: a process
# that a test kills could leave half of one, so it does not get these variables.
CACHE = {
    "PYTHONWARNINGS": _UNFINISHED,  # for all others
    "JAX_COMPILATION_CACHE_DIR": str(_cache_folder()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
if jax.__version_info__ < (0, 10, 2):
    CACHE.clear()  # on newer processors, each program that comes from there is an error on stderr
else:
    jax.config.update("jax_compilation_cache_dir", CACHE["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_configure(config: pytest.Config) -> None:
    require_interrupts()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        drop_bad_entries(_cache_folder(), time.time() - 30 * 86_400)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Send functions of test modules to worker processes by value: importing such a module there takes seconds."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


def require_interrupts() -> None:
    """Refuse to start where Ctrl-C is ignored: every process inherits that, so tests of interrupts could only fail."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise pytest.UsageError(
            "The tests need SIGINT, and this process ignores it, as all do that a script or a non-interactive shell "
            "starts with &. Run them in the foreground, or write: env --default-signal=INT make tests &"
        )


def pytest_sessionstart(session: pytest.Session) -> None:
    _compile_with_less()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # modules stay, so who looks for garbage or for referrers need not look at them


def drop_bad_entries(folder: pathlib.Path, oldest: float) -> None:
    """Delete compiled programs that were cut off while they were written, and old ones."""
    for entry in folder.glob("*-cache"):
        try:
            from jax._src.compilation_cache import decompress_executable  # a private part, which may move

            decompress_executable(entry.read_bytes())
            good = entry.stat().st_mtime > oldest
        except Exception:  # each way to compress has its own
            good = False
        if not good:
            entry.unlink(missing_ok=True)


_compilations = 0


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _compilations
    _compilations += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture
def count_compilations() -> Callable[[], contextlib.AbstractContextManager[list[int]]]:
    """A context whose value holds, afterwards, how many programs XLA compiled in it."""

    @contextlib.contextmanager
    def counting() -> Iterator[list[int]]:
        count, before = [], _compilations
        yield count
        count.append(_compilations - before)

    return counting


@pytest.fixture
def usual_promotion() -> Iterator[None]:
    """Documents and examples are written for users, who rarely set strict promotion."""
    # For all threads: a callback of a compiled program may run in one of XLA's.
    usual = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    strict = {name: getattr(jax.config, name) for name in usual}
    for name, value in usual.items():
        jax.config.update(name, value)
    yield
    for name, value in strict.items():
        jax.config.update(name, value)


def _compile_with_less() -> None:
    """Halve once more what programs cost that are compiled quickly: no emitters of fusions, and one part per program.

    JAX has no settings for these options of XLA, and flags in the environment would be those of all programs.
    """
    options = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
    try:
        from jax._src import compiler  # a private part, which may move

        jax.jit(lambda: 0).lower().compile(options)  # which XLA may forget
        compile_options = compiler.get_compile_options
    except Exception:
        return

    @functools.wraps(compile_options)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        found = compile_options(*args, **kwargs)
        if jax.config.read("jax_disable_most_optimizations"):
            found.env_option_overrides = [*found.env_option_overrides, *options.items()]
        return found

    compiler.get_compile_options = chosen


@pytest.fixture(autouse=True)
def quick_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile in about 30 % of the CPU time, without most optimizations, unless a test is marked `optimized`.

    Compiling is half of what the suite takes. Optimizations may round differently (a product and a sum become one
    operation), so tests that compare computed floats of different programs are marked. Most compare samples, which
    programs only move.
    """
    is_quick = request.node.get_closest_marker("optimized") is None
    jax.config.update("jax_disable_most_optimizations", is_quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(7)


def _readers_and_children() -> set[object]:
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("millstream-reader")]
    return {*threads, *(children() if os.path.exists("/proc/self/task") else ())}


@pytest.fixture
def assert_nothing_is_left() -> Callable[[], None]:
    """Waits until all threads that read and all processes are gone that this test has started; others may be there."""
    before = _readers_and_children()

    def wait() -> None:
        deadline = time.monotonic() + 60
        while left := _readers_and_children() - before:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="module")
def once_per_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes what takes long once for all workers, whichever of them asks first; it must be possible to pickle it."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{request.path.stem}.pickle"

    def made_by(make: Callable[[], Any]) -> Any:
        with locked(path.with_suffix(".lock"), 1200):
            if not path.exists():
                path.write_bytes(pickle.dumps(make()))
        return pickle.loads(path.read_bytes())

    return made_by


@contextlib.contextmanager
def folder_in_memory() -> Iterator[pathlib.Path]:
    """A folder that takes no time to write to."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield pathlib.Path(folder)


@pytest.fixture(scope="module")
def memory() -> Iterator[pathlib.Path]:
    """A folder that takes no time to write to, for all tests of a file."""
    with folder_in_memory() as folder:
        yield folder


@pytest.fixture
def folder(memory: pathlib.Path, request: pytest.FixtureRequest) -> pathlib.Path:
    """A folder of this test's own in it."""
    folder = memory / re.sub(r"\W+", "-", request.node.name)
    folder.mkdir()
    return folder


def start_script(script: pathlib.Path, devices: int, *arguments: str) -> "subprocess.Popen[str]":
    """A script of the tests on that many virtual devices; what it prints is one text."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, *STRICT, str(script), *arguments],
        env=os.environ | CACHE | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def code_blocks(text: str) -> list[str]:
    """The blocks of Python in a document, also those inside lists, notes and tabs."""
    return [block for block, _ in shown_blocks(text)]


def shown_blocks(text: str) -> list[tuple[str, str | None]]:
    """The blocks of Python in a document, each with the block of text right after it: what it prints."""
    block = r"^( *)```python\n(.*?)^\1```\n?(?:\n\1```text\n(.*?)^\1```)?"
    found = re.finditer(block, text, re.MULTILINE | re.DOTALL)
    return [(textwrap.dedent(one[2]), None if one[3] is None else textwrap.dedent(one[3])) for one in found]


def finish(*processes: "subprocess.Popen[str]") -> list[str]:
    """What scripts have printed, which must end well."""
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def free_address() -> str:
    """Where processes of one run can meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def assert_trees_equal(left: object, right: object) -> None:
    """Same structure, same dtypes, same bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
