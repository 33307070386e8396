"""The page of promises: every test that it names exists and really runs, and no promise stands without one."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = re.compile(r"\[`(tests/test_\w+\.py)::(test_\w+)(?:\[(\w+)\])?`\]\(\.\./(tests/test_\w+\.py)\)")
PROMISED, NOT_PROMISED = PAGE.split("## What is not promised")
TESTS = NOT_PROMISED.split("## The tests\n")[1]


def promises() -> list[list[str]]:
    """The rows of the tables: a promise, and what it covers."""
    rows = [line.strip("|").split("|") for line in PROMISED.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows if row[0].strip() not in ("promise", "---")]


def proofs() -> list[tuple[str, list[str]]]:
    """The list of tests: a promise, and what proves it."""
    found = re.findall(r"^(?!#|-)(\S.*)\n\n((?:- .*\n)+)", TESTS, re.MULTILINE)
    return [(promise, [line.removeprefix("- ") for line in lines.splitlines()]) for promise, lines in found]


@functools.cache
def functions_of(path: str) -> dict[str, list[str]]:
    """The tests of a file, with the names of their decorators."""
    functions = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: [ast.unparse(decorator) for decorator in node.decorator_list] for node in functions}


def test_there_are_promises():
    assert len(promises()) > 40
    assert len({promise for promise, *_ in promises()}) == len(promises())


def test_the_list_of_tests_has_the_promises_of_the_tables_in_their_order():
    assert [promise for promise, _ in proofs()] == [promise for promise, _ in promises()]


@pytest.mark.parametrize("row", promises(), ids=lambda row: row[0])
def test_a_promise_says_where_it_ends_and_has_a_test(row):
    promise, covers = row
    assert promise.endswith(".") and covers
    named = dict(proofs())[promise]
    assert named and all(map(NAMED.fullmatch, named)), f"{promise} has no test"


@pytest.mark.parametrize("named", sorted(set(NAMED.findall(PAGE))), ids="::".join)
def test_a_test_that_is_named_is_there_and_runs(named):
    path, name, case, link = named
    assert path == link
    assert name in functions_of(path), f"{path} has no {name}"
    assert not [mark for mark in functions_of(path)[name] if re.search(r"\bmark\.(skip|xfail)\b", mark)]
    assert not case or f'"{case}"' in (ROOT / path).read_text(), f"{path} has no case {case}"


def test_every_name_of_a_test_is_a_link_to_its_file():
    assert len(re.findall(r"::test_", PAGE)) == len(NAMED.findall(PAGE))


def test_all_that_the_readme_promises_is_on_the_page():
    listed = (ROOT / "README.md").read_text().split("## What is promised")[1].split("\n\n")[1]
    for words in (
        "Every epoch visits every sample exactly once",
        "the same batches",
        "is killed, at any moment",
        "A checkpoint is whole or is not there",
        "lipped bit",
        "A worker that is killed costs its time and nothing else",
        "Nothing is left behind",
    ):
        assert words in " ".join(listed.split())
        assert words in PROMISED
