"""What a part says on a system that it cannot run on, and that the others still load there."""

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.files.file_cache import FileCache
from millstream.integrations.safetensors import SafetensorsSource

FRAME: Any = np.zeros(3)


def raises(kind, text):
    return pytest.raises(kind, match=re.escape(text))


@pytest.fixture
def windows(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")


def test_worker_processes_are_refused_on_windows_and_threads_named_instead(windows):
    text = "Processes runs on Linux and macOS. This is Windows: use Threads(4), or WSL."
    with raises(NotImplementedError, text):
        ms.Processes(4)


def test_sources_that_read_parts_of_files_are_refused_on_windows(windows, tmp_path):
    instead = "read the files with a DiskSampleSource, or use WSL"
    text = f"SafetensorsSource runs on Linux and macOS. This is Windows: {instead}."
    with raises(NotImplementedError, text):
        SafetensorsSource(tmp_path / "x.safetensors")
    with raises(NotImplementedError, "The cache of remote files runs on Linux and macOS."):
        FileCache(tmp_path, 1)


def test_without_what_windows_lacks_the_package_loads_and_reads_in_threads():
    program = """
import os, signal, sys
import cloudpickle, jax, numpy as np
for name in "SIGBUS SIGSYS SIGTRAP SIGHUP SIGCHLD SIGUSR1 SIGCONT SIGKILL pthread_sigmask".split():
    delattr(signal, name)
for name in "pread sysconf memfd_create posix_fallocate getuid sched_getaffinity fork nice".split():
    delattr(os, name)
import millstream as ms
import millstream.cli.main
for name in ms.__all__:
    getattr(ms, name)
read = lambda index: {"x": np.float32(index)}
loader = ms.DataLoader([ms.DiskSampleSource(8, read), ms.BatchTransform(4)], executor=ms.Threads(2))
step = lambda total, batch: total + float(batch[0]["x"].sum())
output = ms.loop(0.0, loader, {ms.every(1): step}, stop=ms.at(epochs=1), key=jax.random.key(0))
print(output.state, loader.explain() is not None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("28.0 True\n", "")


def test_the_error_of_a_missing_package_gives_a_command_for_all_of_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    from millstream.integrations.polars import PolarsSource

    with raises(ImportError, "PolarsSource needs polars. Run: pip install 'polars>=1.36'"):
        PolarsSource(FRAME)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with raises(ImportError, "needs Pillow. Run: pip install 'pillow>=11' 'simplejpeg>=1.8'"):
        ms.ImageFolderSource(".")


def test_a_copy_of_the_source_that_was_never_installed_names_the_package(monkeypatch):
    from importlib import metadata

    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", unknown)
    monkeypatch.setitem(sys.modules, "polars", None)
    from millstream.integrations.polars import PolarsSource

    with raises(ImportError, "PolarsSource needs polars. Run: pip install polars"):
        PolarsSource(FRAME)
