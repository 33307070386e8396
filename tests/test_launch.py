"""`millstream launch`, with real processes. Most of them do without JAX, which takes seconds to load."""

import argparse
import contextlib
import io
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from millstream.cli import _launched
from millstream.cli._launch import make_environment
from millstream.cli._launched import TaggedOutput

COMMAND = [sys.executable, "-m", "millstream", "launch"]
PATIENCE = 240  # seconds; only what hangs takes that long
NUMBER = "import os, sys, time, signal; number = int(os.environ['SLURM_PROCID']); "

ADD_UP = """
import jax, numpy as np
jax.distributed.initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
ones = jax.make_array_from_callback((8,), split, lambda index: np.arange(8.0, dtype=np.float32)[index])
total = jax.jit(lambda x: x.sum(), out_shardings=whole)(ones)
print(f"{jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} devices, sum {float(total)}")
"""
# One process raises; the other waits for it in a sum, as processes of JAX do, and hears no SIGTERM there.
FAIL = """
if jax.process_index() == 1:
    raise ValueError("no such luck")
jax.jit(lambda x: x.sum() + 1, out_shardings=whole)(ones).block_until_ready()
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Write a script, launch it, and return what `subprocess.run` does."""
    monkeypatch.chdir(tmp_path)

    def launching(text, *options, arguments=()):
        pathlib.Path("script.py").write_text(text)
        command = [*COMMAND, *options, "script.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    return launching


@pytest.fixture
def start(tmp_path):
    """Write a script, start the launcher, and give it when every process has written its line."""
    started = []

    def starting(text, processes=2, *options):
        (tmp_path / "script.py").write_text(text)
        command = [*COMMAND, "-n", str(processes), *options, "script.py"]
        launcher = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, process_group=0
        )
        started.append(launcher)
        assert launcher.stdout is not None
        return launcher, [launcher.stdout.readline() for _ in range(processes)]

    yield starting
    for launcher in started:
        launcher.kill()
        launcher.communicate()


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, limit=120.0):
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_processes_of_jax_find_each_other_and_compute_together(launch):
    done = launch(ADD_UP, "--processes", "2", "--devices-per-process", "2", "--cpu")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "sum" in line]  # Gloo has its say on stdout, too
    assert sorted(lines) == [f"[{i}] {i} of 2, 2 devices, sum 28.0" for i in range(2)]


def test_a_process_of_jax_that_fails_ends_the_others_at_once(launch):
    done = launch(ADD_UP + FAIL, "-n", "2", "--cpu", "--grace", "0.5", "--timeout", "30")
    assert done.returncode == 1, done.stderr
    assert "process 1 failed first, with exit code 1, so the others were ended. Its last lines:" in done.stderr
    assert done.stderr.endswith("\n    ValueError: no such luck\n")
    assert "runpy" not in done.stderr and "_child.py" not in done.stderr


def test_the_code_of_the_first_that_failed_is_returned(launch):
    text = NUMBER + "time.sleep(0 if number == 1 else 600); sys.exit(40 + number)"
    done = launch(text, "-n", "3")
    assert done.returncode == 41
    assert "process 1 failed first, with exit code 41" in done.stderr
    assert done.stderr.endswith("    (it wrote nothing)\n")


def test_a_process_killed_by_a_signal_counts_128_more(launch):
    done = launch(NUMBER + "os.kill(os.getpid(), signal.SIGSEGV if number == 0 else 0); time.sleep(600)", "-n", "2")
    assert done.returncode == 128 + signal.SIGSEGV
    assert "exit code 139 (SIGSEGV)" in done.stderr


def test_who_does_not_hear_sigterm_is_killed_after_the_grace_period(launch):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); open('is deaf', 'w'); time.sleep(600)"
    wait = "\nwhile number and not os.path.exists('is deaf'): time.sleep(0.01)"
    done = launch(f"{NUMBER}{wait}\nif number: sys.exit(7)\n{deaf}", "-n", "2", "--grace", "0.3")
    assert (done.returncode, done.stdout) == (7, "[0] deaf\n")


def test_a_failure_is_known_before_the_exit_handlers_have_run(launch):
    """In JAX such a handler waits for the other processes, for minutes."""
    text = NUMBER + "import atexit; atexit.register(time.sleep, 600)\nif number: sys.exit('over')\ntime.sleep(600)"
    done = launch(text, "-n", "2", "--grace", "0.3")
    assert (done.returncode, "[1] over\n" in done.stderr) == (1, True)


def test_ctrl_c_reaches_every_process_and_is_waited_for(start):
    text = NUMBER + (
        "\ntry: print('up'); time.sleep(600)\nexcept KeyboardInterrupt: time.sleep(0.3 + number); print('saved')"
    )
    launcher, _ = start(text, 2)
    os.kill(launcher.pid, signal.SIGINT)
    out, err = launcher.communicate(timeout=PATIENCE)
    assert (launcher.returncode, err) == (0, b"millstream launch: stopped by SIGINT.\n")
    assert sorted(out.splitlines()) == [b"[0] saved", b"[1] saved"]


def test_ctrl_c_without_a_handler_returns_130(start):
    launcher, _ = start(NUMBER + "print('up', flush=True); time.sleep(600)", 2)
    os.kill(launcher.pid, signal.SIGINT)
    _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 130
    assert b"[0] KeyboardInterrupt\n" in err and b"failed first" not in err


def test_sigterm_is_passed_on_and_a_second_one_kills(start):
    text = NUMBER + "signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True)); print('up', flush=True)\n"
    launcher, _ = start(text + "while True: time.sleep(0.1)", 2)
    os.kill(launcher.pid, signal.SIGTERM)
    assert sorted(launcher.stdout.readline() for _ in range(2)) == [b"[0] no\n", b"[1] no\n"]
    os.kill(launcher.pid, signal.SIGTERM)
    launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_nothing_is_left_behind(start, how):
    text = NUMBER + (
        "import subprocess; helper = subprocess.Popen(['sleep', '600']); print(os.getpid(), helper.pid, flush=True); "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    )
    launcher, lines = start(text, 2, "--grace", "0.2")
    pids = [int(pid) for line in lines for pid in line.split()[1:]]
    assert all(map(is_running, pids))
    if how == "killed":
        launcher.kill()
    else:
        os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)))
    launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == (-signal.SIGKILL if how == "killed" else 137)


def test_who_was_told_to_ignore_the_end_of_the_terminal_goes_on(tmp_path):
    (tmp_path / "script.py").write_text("import time; print('up'); time.sleep(1); print('done')")
    command = ["nohup", *COMMAND, "-n", "1", "script.py"]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert launcher.stdout is not None and launcher.stdout.readline() == b"[0] up\n"
    os.kill(launcher.pid, signal.SIGHUP)
    out, err = launcher.communicate(timeout=PATIENCE)
    assert (launcher.returncode, out, b"SIGHUP" in err) == (0, b"[0] done\n", False)


def test_what_a_script_has_forked_may_fail_by_itself(launch):
    text = NUMBER + "\nif (pid := os.fork()) == 0: sys.exit(3)\nprint(os.WEXITSTATUS(os.waitpid(pid, 0)[1]))"
    done = launch(text, "-n", "2")
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, ["[0] 3", "[1] 3"], "")


# Process 1 is killed; process 0 finds that out as processes of JAX do, by a connection that is gone, and raises.
SURVIVOR = """
print(os.getpid())
while number: time.sleep(0.01)
while not os.path.exists('gone'): time.sleep(0.01)
raise ConnectionError('reset by peer')
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("order", ["both at once", "the survivor's word first"])
def test_a_survivor_is_not_blamed_for_a_killed_process(start, tmp_path, order):
    deaf = "signal.signal(signal.SIGTERM, lambda *_: open('heard', 'w').close())\n"
    launcher, lines = start(NUMBER + deaf + SURVIVOR, 2, "--grace", "60")
    pids = {int(line.split()[0].strip(b"[]")): int(line.split()[1]) for line in lines}
    if order == "both at once":  # for a launcher that is busy meanwhile
        os.kill(launcher.pid, signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        (tmp_path / "gone").touch()
        wait_until(lambda: not is_running(pids[0]))
        os.kill(launcher.pid, signal.SIGCONT)
    else:  # the kernel closes connections before a process counts as ended
        (tmp_path / "gone").touch()
        wait_until((tmp_path / "heard").exists)
        os.kill(pids[1], signal.SIGKILL)
    _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert b"process 1 failed first, with exit code 137 (SIGKILL), so the others were ended" in err


def test_a_preempted_run_says_so_and_returns_143(launch):
    text = NUMBER + "\nif number: sys.exit(143)\ntime.sleep(600)"
    done = launch(text, "-n", "2")
    assert done.returncode == 143
    assert "process 1 was preempted, with exit code 143 (SIGTERM), so the others were ended" in done.stderr


def test_scripts_that_ask_as_under_torchrun_get_an_answer(launch):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR"
    text = f"import os; print(*(os.environ[name] for name in '{names}'.split())); "
    text += "assert os.environ['JAX_COORDINATOR_ADDRESS'].endswith(':' + os.environ['MASTER_PORT'])"
    done = launch(text, "-n", "2")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} 2 {rank} 2 127.0.0.1" for rank in range(2)]
    assert done.returncode == 0, done.stderr


def test_a_timeout_ends_the_run(launch):
    done = launch("import time; time.sleep(600)", "-n", "2", "--timeout", "0.5")
    assert (done.returncode, done.stderr) == (124, "millstream launch: ended after 0.5 s (--timeout).\n")


def test_output_comes_in_whole_lines_with_tags_and_streams_apart(launch):
    text = NUMBER + (
        "out = sys.stdout.buffer; out.write(b'one\\ntw'); out.flush(); time.sleep(0.2); "
        "out.write(b'o\\n\\xff\\x00 end'); out.flush(); print('to stderr', file=sys.stderr)"
    )
    pathlib.Path("script.py").write_text(text)
    done = subprocess.run([*COMMAND, "-n", "2", "script.py"], capture_output=True, timeout=PATIENCE)
    expected = [b"[%d] %s" % (i, line) for i in range(2) for line in (b"one", b"two", b"\xff\x00 end")]
    assert sorted(done.stdout.split(b"\n")) == sorted([*expected, b""])
    assert sorted(done.stderr.split(b"\n")) == [b"", b"[0] to stderr", b"[1] to stderr"]


def test_everything_after_the_script_belongs_to_the_script(launch):
    arguments = ["--processes", "9", "-m", "x", "--", "--cpu", "-h"]
    done = launch("import sys; print(sys.argv[1:])", "-n", "1", arguments=arguments)
    assert done.stdout == f"[0] {arguments}\n"


def test_a_module_runs_as_python_would_run_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys; from package import __name__ as n; print(n, __name__, sys.argv[1:])")
    command = [*COMMAND, "-n", "1", "-m", "package.train", "-n", "5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("[0] package __main__ ['-n', '5']\n", "")


def test_a_script_sees_itself_as_python_would_show_it(launch, tmp_path):
    (tmp_path / "neighbour.py").write_text("name = 'found'")
    text = "import neighbour, sys; print(neighbour.name, __name__, __file__, sys.modules['__main__'].__file__)"
    path = tmp_path / "script.py"
    assert launch(text, "-n", "1").stdout == f"[0] found __main__ {path} {path}\n"


def test_logs_hold_the_output_as_it_was_written(launch, tmp_path):
    done = launch(NUMBER + "print('1%\\r2%'); print('err', file=sys.stderr)", "-n", "2", "--log-dir", "logs/of/run")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2%", "[1] 2%"])
    for number in range(2):
        assert sorted((tmp_path / f"logs/of/run/{number}.log").read_bytes().split(b"\n")) == [b"", b"1%\r2%", b"err"]


def test_a_reader_that_goes_away_ends_the_run(tmp_path):
    (tmp_path / "script.py").write_text("while True: print('more')")
    launcher = subprocess.Popen(
        [*COMMAND, "-n", "2", "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert launcher.stdout is not None and launcher.stderr is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(PATIENCE) == 128 + signal.SIGPIPE
    assert b"launch" not in launcher.stderr.read()
    launcher.stderr.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_reader_that_goes_away_in_the_middle_of_lines_leaves_nobody_behind(start):
    text = NUMBER + "print(os.getpid()); sys.stdout.write('half a line'); sys.stdout.flush(); "
    launcher, lines = start(text + "time.sleep(0.5 if number == 0 else 600); print(); time.sleep(600)", 3)
    pids = [int(line.split()[1]) for line in lines]
    launcher.stdout.close()
    assert launcher.wait(PATIENCE) == 128 + signal.SIGPIPE
    wait_until(lambda: not any(map(is_running, pids)))


def test_tags_are_coloured_on_a_terminal_only(tmp_path):
    (tmp_path / "script.py").write_text("print('hello')")
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command = [*COMMAND, "-n", "1", "script.py"]
    subprocess.run(command, cwd=tmp_path, stdout=theirs, env=environment, timeout=PATIENCE, check=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal without the other side
        while data := os.read(ours, 1024):
            shown += data
    os.close(ours)
    assert shown == b"\x1b[36m[0] \x1b[0mhello\r\n"


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"a\n", b"", b"b\r\nc\r", b"\nd"], b"a\nb\nc\nd\n"),
        ([b"\r 1%", b"\r 2%", b"\r 3%\n"], b" 3%\n"),
        ([b" 1%\r", b" 2%\r", b"done\n"], b"done\n"),
        ([b" 1%\r", b" 2%\r"], b" 2%\n"),
        ([b"\n\n"], b"\n\n"),
        ([b"x" * 70_000, b"y\n"], b"x" * 70_000 + b"\ny\n"),
        ([b""], b""),
    ],
)
def test_lines_are_shown_as_a_terminal_would_leave_them(pieces, shown):
    out = io.BytesIO()
    output = TaggedOutput(out, b"")
    for piece in pieces:
        output.feed(piece)
    output.finish()
    assert out.getvalue() == shown


def test_a_progress_bar_is_shown_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_launched.time, "monotonic", lambda: now[0])
    out = io.BytesIO()
    output = TaggedOutput(out, b"[0] ")
    for percent in range(0, 100, 10):
        now[0] += 0.25
        output.feed(b"\r%d%%" % percent)
    output.feed(b"\r100%\n")
    assert out.getvalue() == b"[0] 20%\n[0] 60%\n[0] 100%\n"


def test_the_surroundings_of_the_launcher_do_not_mislead_jax(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("https_proxy", "http://proxy:80")
    monkeypatch.setenv("no_proxy", "example.org")
    options = argparse.Namespace(devices_per_process=None, cpu=False)
    environment = make_environment(0, 2, 5000, options)
    assert "OMPI_COMM_WORLD_RANK" not in environment and environment["SLURM_PROCID"] == "0"
    assert environment["no_grpc_proxy"] == "example.org,127.0.0.1"
    assert environment.get("JAX_PLATFORMS") == os.environ.get("JAX_PLATFORMS")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "0", "x.py"], "--processes must be at least 1. Got 0."),
        (["-n", "2", "--devices-per-process", "0", "x.py"], "--devices-per-process must be at least 1. Got 0."),
        (["-n", "2", "--timeout", "nan", "x.py"], "--timeout must be a number of seconds, 0 or more. Got nan."),
        (["-n", "2", "trian.py"], r"there is no script 'trian.py' in \S+. Check the path; for a module, use -m."),
        (["-n", "2", "-m", "trian.all"], "-m needs a module that Python can find. There is no 'trian' here or in"),
        (["-n", "2", "-m"], "-m needs the name of a module. Nothing follows it."),
        (["-n", "2"], "there is nothing to run. Name a script, or a module with -m."),
        (["x.py"], "the following arguments are required: -n/--processes"),
        (["-n", "2", "--log-dir", "/dev/null/x", __file__], "--log-dir needs a folder that can be written to. .*null"),
        (["-n", "2", "--device", "2", __file__], "unrecognized arguments: --device"),
    ],
)
def test_wrong_arguments_are_named(arguments, text, capsys):
    from millstream.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["launch", *arguments])
    assert end.value.code == 2
    assert re.search(text, capsys.readouterr().err)
