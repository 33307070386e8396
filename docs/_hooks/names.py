"""The names of a page of the API as a table, with a line for each, so that the page can be read in the repository, too.

`python docs/_hooks/names.py` writes the tables; `tests/test_site.py` says if one is not what the docstrings give.
"""

import importlib
import inspect
import pathlib
import re
import sys
from typing import Any

PAGES = pathlib.Path(__file__).parents[1] / "api"
BEGIN, END = "<!-- names: begin -->", "<!-- names: end -->"
DIRECTIVE = re.compile(r"^::: (millstream\.[\w.]+)((?:\n    .*)*)", re.MULTILINE)
MEMBER = re.compile(r"^ +- (\w+)$", re.MULTILINE)


def names(markdown: str) -> list[str]:
    """The names that a page describes, in its order; of a module with members, the members."""
    found = []
    for directive in DIRECTIVE.finditer(markdown):
        members = MEMBER.findall(directive[2])
        found += [f"{directive[1]}.{member}" for member in members] or [directive[1]]
    return found


def line(name: str) -> str:
    """A row of the table: the name as it is written in a program, and the first sentence about it."""
    docstring = inspect.getdoc(_object(name)) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.match(r"(.*?\.)( |$)", first)
    text = (sentence[1] if sentence is not None else first).replace("|", r"\|")
    imported = (".integrations.", ".dialects.")
    prefix = "" if any(part in name for part in imported) else "ms."
    short = prefix + name.removeprefix("millstream.")
    return f"| `{short}` | {text} |"


def with_table(markdown: str) -> str:
    """A page with its table, after its introduction."""
    rows = "\n".join(["| name | |", "|---|---|", *map(line, names(markdown))])
    block = f"{BEGIN}\n\n{rows}\n\n{END}"
    if BEGIN in markdown:
        before, rest = markdown.split(BEGIN)
        return before + block + rest.split(END)[1]
    place = markdown.index("\n::: ")
    return f"{markdown[:place]}\n{block}\n{markdown[place:]}"


def pages() -> dict[pathlib.Path, str]:
    """The pages that describe names, as they should be."""
    texts = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
    return {path: with_table(text) for path, text in texts.items() if names(text)}


def _object(name: str) -> Any:
    room, _, last = name.rpartition(".")
    if room and hasattr(_object(room), last):
        return getattr(_object(room), last)
    return importlib.import_module(name)


def main() -> int:
    """Write the tables."""
    for path, text in pages().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
