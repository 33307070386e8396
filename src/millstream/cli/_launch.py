"""`millstream launch`: the processes of a distributed JAX program on one machine."""

import argparse
import contextlib
import importlib.machinery
import os
import pathlib
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from typing import BinaryIO

from millstream.cli._job import LaunchJob
from millstream.cli._launched import Launched

_DESCRIPTION = """\
Start local processes of a JAX program. Each finds the others with a plain jax.distributed.initialize().
Everything after the script (or after -m and a module) belongs to the script.
Lines of output are tagged with the number of their process. When one fails, the others are ended
and its code is returned (128 + n for signal n). 143 is a run that was preempted, 124 one that took
longer than --timeout, 130 one that Ctrl-C has ended before it could end by itself, which is 0.
"""


def add_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command to the parser of the command line."""
    parser = commands.add_parser(
        "launch",
        help="start the processes of a distributed JAX program on this machine",
        description=_DESCRIPTION,
        usage="millstream launch [options] (script | -m module) ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many processes to start")
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="N",
        help="CPU devices of each process; of GPUs, process 0 gets the first N, process 1 the next N (default: 1)",
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU also where there is an accelerator")
    parser.add_argument("--timeout", type=float, metavar="S", help="end the run after S seconds and return 124")
    parser.add_argument(
        "--grace", type=float, default=3.0, metavar="S", help="seconds between SIGTERM and SIGKILL (default: 3)"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="also write the output of each process to DIR/<number>.log")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module instead of a script")
    parser.add_argument("script", nargs="?", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(run=lambda options: run(parser, options))


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Check the options, run the processes, and say what went wrong; returns the exit code."""
    command = _checked_command(parser, options)
    count = options.processes
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(_reserved_port())
        logs = _open_logs(parser, options, stack)
        environments = [make_environment(number, count, port, options) for number in range(count)]
        processes = [Launched(number, count, command, environments[number], logs[number]) for number in range(count)]
        job = LaunchJob(processes, options.grace, float("inf") if options.timeout is None else options.timeout)
        try:
            code = job.run()
        except BrokenPipeError:  # nobody reads our output any more, as in `millstream launch ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
    _say_how_it_ended(job, options)
    return code


def make_environment(number: int, processes: int, port: int, options: argparse.Namespace) -> dict[str, str]:
    """The environment that tells a process of JAX who it is.

    JAX takes the coordinator from variables of its own, but number and count only from those of a cluster, so the
    machine is described as one step of Slurm.

    Example:
        >>> options = argparse.Namespace(devices_per_process=2, cpu=True)
        >>> environment = make_environment(1, 4, 5000, options)
        >>> environment["SLURM_PROCID"], environment["SLURM_NTASKS"], environment["JAX_LOCAL_DEVICE_IDS"]
        ('1', '4', '2,3')
    """
    address = f"127.0.0.1:{port}"
    # JAX would believe variables of Open MPI first, and those of a launcher around this one are not meant for us.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
    environment |= {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # by default JAX would listen to the whole network
        "SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", "0"),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(processes),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        # As torchrun names them, for scripts that ask by these names.
        "RANK": str(number),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if any(name.lower().endswith("_proxy") for name in environment):
        # gRPC would ask the proxy for the loopback, too, and hang.
        names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
        direct = next((environment[name] for name in names if environment.get(name)), "")
        environment["no_grpc_proxy"] = f"{direct},127.0.0.1".lstrip(",")
    devices = options.devices_per_process
    if devices is not None:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
        environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(number * devices, (number + 1) * devices)))
    if options.cpu:
        environment["JAX_PLATFORMS"] = "cpu"
    return environment


def _checked_command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    if os.name != "posix":
        parser.error(f"processes are launched on Linux and macOS. This is {sys.platform}; on Windows, use WSL.")
    for name in ("processes", "devices_per_process"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1. Got {value}.")
    for name in ("timeout", "grace"):
        value = getattr(options, name)
        if value is not None and not value >= 0:
            parser.error(f"--{name} must be a number of seconds, 0 or more. Got {value}.")
    if options.module is not None:
        if not options.module:
            parser.error("-m needs the name of a module. Nothing follows it.")
        package = options.module[0].partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            parser.error(f"-m needs a module that Python can find. There is no {package!r} here or in {sys.prefix}.")
        return ["-m", *options.module]
    if options.script is None:
        parser.error("there is nothing to run. Name a script, or a module with -m.")
    if not os.path.exists(options.script):
        parser.error(f"there is no script {options.script!r} in {os.getcwd()}. Check the path; for a module, use -m.")
    return [options.script, *options.arguments]


def _open_logs(
    parser: argparse.ArgumentParser, options: argparse.Namespace, stack: contextlib.ExitStack
) -> list[BinaryIO] | list[None]:
    if options.log_dir is None:
        return [None] * options.processes
    folder = pathlib.Path(options.log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [stack.enter_context(open(folder / f"{number}.log", "wb")) for number in range(options.processes)]
    except OSError as error:
        parser.error(f"--log-dir needs a folder that can be written to. {error}")


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port of the loopback that nobody else gets: gRPC, and so the coordinator, shares ports that are shared."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def _say_how_it_ended(job: LaunchJob, options: argparse.Namespace) -> None:
    if job.first_failed is not None:
        process, code = job.first_failed
        log = "" if options.log_dir is None else f" (all of it: {shlex.quote(options.log_dir)}/{process.number}.log)"
        lines = [line.decode(errors="replace") for line in process.last_lines]
        others = "" if options.processes == 1 else ", so the others were ended"
        how = "was preempted, with" if code == 128 + signal.SIGTERM else "failed first, with"
        _say(f"process {process.number} {how} {_describe(code)}{others}. Its last lines{log}:")
        print("\n".join(f"    {line}" for line in lines) if lines else "    (it wrote nothing)", file=sys.stderr)
    elif job.timed_out:
        _say(f"ended after {options.timeout:g} s (--timeout).")
    elif job.received is not None:
        _say(f"stopped by {signal.Signals(job.received).name}.")


def _say(text: str) -> None:
    print(f"millstream launch: {text}", file=sys.stderr, flush=True)


def _describe(code: int) -> str:
    if code > 128 and code - 128 in {*signal.Signals}:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"
