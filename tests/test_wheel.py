"""The wheel works in an empty environment, and the page about installation says what it needs."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import venv

import pytest
from conftest import CACHE, code_blocks

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_US = ("test", "dev", "bench")  # extras that are for work on the package
PAGE = (ROOT / "docs" / "install.md").read_text()


def name_of(requirement):
    """The name of a package in a requirement, as an index knows it."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].lower().replace("_", "-")


def required(names):
    """These packages and all that they need, without their extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            waiting += [name_of(text) for text in found[name].requires or [] if ";" not in text]
    return list(found.values())


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The commands of an environment with the wheel and what it requires: no extra, no tool, no network.

    The wheel is built by the backend itself and installed by pip. What it requires is not downloaded again: the
    environment sees these packages, and no others, of the one that runs the tests, through links in a folder.
    """
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    packages = folder / "packages"
    packages.mkdir()
    for distribution in required(map(name_of, PROJECT["dependencies"])):
        for part in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            (packages / part).symlink_to(pathlib.Path(str(distribution.locate_file(part))))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return python.parent


def run(command, folder):
    unset = ("PYTHONPATH", "VIRTUAL_ENV")
    known = {name: value for name, value in os.environ.items() if name not in unset} | CACHE
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=300)


def test_the_programs_of_the_readme_run_from_the_wheel_without_extras(environment, tmp_path):
    program = "import millstream\nprint(millstream.__file__)\n" + "\n".join(
        code_blocks((ROOT / "README.md").read_text())
    )
    done = run([environment / "python", "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(environment.parent))
    assert "of the test digits are right" in done.stdout


def test_the_demo_runs_from_the_wheel_in_an_empty_folder(environment, tmp_path):
    done = run([environment / "millstream", "demo", "--epochs", "4", "--folder", "demo"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Test accuracy" in done.stdout and "IDENTICAL, bit for bit" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_an_extra_that_is_missing_is_named_with_a_command_that_can_be_run(environment, tmp_path):
    program = "from millstream.integrations.polars import PolarsSource; PolarsSource([])"
    done = run([environment / "python", "-c", program], tmp_path)
    (requirement,) = EXTRAS["polars"]
    assert done.stderr.endswith(f"ImportError: PolarsSource needs polars. Run: pip install '{requirement}'\n")


def test_the_page_lists_every_extra_with_its_packages():
    table = PAGE.split("## Extras\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    assert list(rows) == [extra for extra in EXTRAS if extra not in FOR_US]
    for extra, packages in rows.items():
        if extra != "all":
            assert {name_of(package) for package in packages.split(", ")} == set(map(name_of, EXTRAS[extra])), extra


def test_all_is_every_extra_but_those_the_page_names():
    (listed,) = EXTRAS["all"]
    everything = set(re.findall(r"\w+", listed.partition("[")[2]))
    assert set(EXTRAS) - everything - {"all", *FOR_US} == {"wandb", "mlflow"}
    assert "| `all` | all of these but wandb and mlflow | |" in PAGE


def test_the_page_names_the_versions_that_are_required():
    assert PROJECT["requires-python"] == ">=3.11.4" and "Python 3.11.4 or newer" in PAGE
    assert "jax>=0.10.0" in PROJECT["dependencies"] and "JAX 0.10 or newer" in PAGE
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"] and version in PAGE
