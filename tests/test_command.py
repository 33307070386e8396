"""The command `millstream`, as a person runs it."""

import doctest
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import CACHE
from terminal import run_in_terminal

import millstream as ms
from millstream.cli._completion import commands_in
from millstream.cli.main import make_parser

COMMAND = [sys.executable, "-m", "millstream"]


def run(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=os.environ | CACHE)


def check_demo(text, folder):
    """The numbers of a demo that was run to its end."""
    words = " ".join(text.split())
    assert "The first of batch 0: 1 5" in words and "░" in text
    accuracy = re.search(r"Test accuracy ([\d.]+)%, on 359 digits", words)
    assert accuracy and float(accuracy[1]) > 90
    assert re.search(r"[\d,]+ samples per second; at first, with compiling, [\d.]+ s\.", words)
    steps = re.search(r"SIGKILL ended it at step (\d+) of \d+\. Resumed from its checkpoint of step (\d+),", words)
    assert steps and 0 < int(steps[2]) <= int(steps[1])
    assert re.search(r"IDENTICAL, bit for bit: 9,610 weights, their momenta, and \d+ losses\.", words)
    assert str(folder / "report.html") in text
    assert {path.name for path in folder.iterdir()} == {"record.jsonl", "report.html"}


def test_the_demo_trains_is_killed_and_resumes_into_a_pipe(tmp_path):
    done = run("demo", "--folder", str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^epoch 20/20 .* loss 0\.0\d+ ", done.stdout, re.MULTILINE)
    check_demo(done.stdout, tmp_path / "run")
    page = (pathlib.Path(__file__).parent.parent / "docs" / "install.md").read_text()
    written = page.partition("```text\nMillstream")[2].partition("```")[0]
    assert doctest.OutputChecker().check_output("Millstream" + written, done.stdout, doctest.ELLIPSIS), done.stdout


def test_the_demo_fits_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [*COMMAND, "demo", "--epochs", "3", "--folder", "a"]
    status, lines = run_in_terminal(command, 40, os.environ | CACHE | {"PYTHONPATH": os.pathsep.join(sys.path)})
    text = "\n".join(lines)
    assert status == 0, text
    place = f"{tmp_path.resolve()}/a/report.html"
    assert place in text.replace("\n", "")  # which is in one piece, to be copied
    check_demo(text + "\n" + place, tmp_path / "a")
    assert max(map(len, lines)) <= 40 and "█" in text


def test_ctrl_c_ends_the_demo_quietly_and_leaves_nothing_behind(tmp_path):
    command = [*COMMAND, "demo", "--epochs", "1000000"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    while not any(record.stat().st_size for record in tmp_path.glob("*/record.jsonl")):
        assert process.poll() is None  # the loop begins, and may be compiling
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    out, err = process.communicate(timeout=240)
    assert (process.returncode, err.strip().splitlines()[1:]) == (130, [])
    assert "Stopping after this batch" in err
    assert out.endswith("stopped\n")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left of its session


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["demo", "--epochs", "0"], "must be at least 1, got 0"),
        (["demo", "--epochs", "few"], "--epochs: must be a whole number, got 'few'"),
        (["demo", "--folder", __file__], "--folder: must be a folder, got the file"),
        (["demo", "--seed", "one"], "--seed: must be a whole number, got 'one'"),
        (["dmeo"], "there is no command 'dmeo'. Did you mean demo?"),
        (["reports", "run"], "Did you mean report?"),
        (["xyz"], "there is no command 'xyz'. There are demo, launch, prepare, report, watch, completion."),
        (["completion", "cmd"], "invalid choice: 'cmd'"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    done = run(*arguments)
    assert done.returncode == 2
    assert text in done.stderr


def test_the_command_alone_prints_its_help():
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("--help").stdout and "Start with: millstream demo." in done.stdout


def test_every_command_says_what_it_does_and_has_an_example():
    for command in commands_in(make_parser()):
        shown = run(command.name, "--help").stdout
        assert "\nexamples:\n  " in shown and f"millstream {command.name} " in shown.partition("examples:")[2] + " "
        description = shown.partition("\n\n")[2].partition("\n\n")[0]
        assert len(description.split()) > 10, description


def completed(script, *words):
    """What bash offers for the last of some words."""
    typed = " ".join(map(shlex.quote, words))
    place = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}"
    program = f"source {script}; {place}; _millstream; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, cwd=script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("\n")[:-1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_files(tmp_path):
    script = tmp_path / "a script"
    script.write_text(run("completion", "bash").stdout)
    script = script.rename(tmp_path / "script")
    (tmp_path / "my run").mkdir()
    said = subprocess.run(
        ["bash", "--norc", "-c", f"source {script}; complete -p millstream"], capture_output=True, text=True
    )
    assert said.stdout == "complete -F _millstream millstream\n"
    assert completed(script, "millstream", "de") == ["demo"]
    assert set(completed(script, "millstream", "")) >= {"demo", "launch", "prepare", "report", "completion"}
    assert completed(script, "millstream", "demo", "--e") == ["--epochs"]
    assert completed(script, "millstream", "report", "my") == ["my run"]
    assert completed(script, "millstream", "completion", "") == ["bash", "zsh", "fish"]
    assert completed(script, "millstream", "launch", "x.py", "--c") == ["--cpu"]
    for command in commands_in(make_parser()):
        found = completed(script, "millstream", command.name, "-")
        assert found == [name for option in command.options for name in option.names]


@pytest.mark.parametrize(
    ("shell", "check"), [("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"]), ("bash", ["bash", "-n"])]
)
def test_scripts_for_every_shell_name_all_options_and_parse(shell, check, tmp_path):
    text = run("completion", shell).stdout
    for command in commands_in(make_parser()):
        assert command.name in text
        for option in command.options:
            for name in option.names:
                dashes = "-l " if name.startswith("--") else "-s "
                assert (dashes + name.lstrip("-") if shell == "fish" else name) in text
    assert all(line.count("'") % 2 == 0 for line in text.splitlines())
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        assert subprocess.run([*check, str(tmp_path / "script")], capture_output=True).returncode == 0


def test_the_version_is_the_packages():
    assert run("--version").stdout == f"millstream {ms.__version__}\n"
