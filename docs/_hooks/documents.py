"""Documents that lie elsewhere in the repository become pages, and links between files become links between pages.

Documents link to each other as files, so that they can be read in the repository as well as on the site.
"""

import ast
import json
import pathlib
import posixpath
import re
import textwrap
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "benchmarks/results.md",
    "examples": "examples.md",
}
# A line of a page for all public names of a room that the page does not have.
OTHERS = re.compile(r"^::: others of (millstream\.\w+)$", re.MULTILINE)
PUBLIC = re.compile(r"^from millstream[\w.]* import (\w+) as \1$", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents, one page of all examples, and every other file that a page links to, such as a test."""
    for path, uri in PAGES.items():
        if path.endswith(".md") and files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, PAGES["examples"], content=_examples()))
    for page in list(files.documentation_pages()):
        for link in LINK.finditer(page.content_string):
            path = _linked(page, link)
            uri = _uri_of(path)
            if (
                uri is not None
                and "#" not in uri
                and files.get_file_from_path(uri) is None
            ):
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Have links to files lead to their pages, and name what the table of contents has besides."""
    markdown = OTHERS.sub(lambda line: _others(line[1], markdown), markdown)

    def moved(link: re.Match[str]) -> str:
        uri = _uri_of(_linked(page.file, link))
        if uri is None:
            return link[0]
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(uri, start)}{link[2] or ''})"

    return LINK.sub(moved, markdown)


def _others(room: str, markdown: str) -> str:
    """The names of a room's table that a page does not have, as the top level or the room has them."""
    top = _table("millstream")
    written = [
        f"millstream.{name}" if name in top else f"{room}.{name}"
        for name in _table(room)
    ]
    return "\n\n".join(
        f"::: {name}" for name in written if f"::: {name}\n" not in markdown
    )


def _table(room: str) -> list[str]:
    return PUBLIC.findall(
        ROOT.joinpath("src", *room.split("."), "__init__.pyi").read_text()
    )


def _linked(page: File, link: re.Match[str]) -> pathlib.Path:
    """The file that a link means, seen from where its document lies."""
    here = (
        ROOT / "docs"
        if page.abs_src_path is None
        else pathlib.Path(page.abs_src_path).parent
    )
    return (here / link[1]).resolve()


def _uri_of(path: pathlib.Path) -> str | None:
    """Where a file of the repository is on the site; None if there is no such file."""
    if not path.exists() or not path.is_relative_to(ROOT):
        return None
    known = path.relative_to(ROOT).as_posix()
    if known in PAGES:
        return PAGES[known]
    if path.parent == ROOT / "examples":
        return f"{PAGES['examples']}#{path.stem}"
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    return known if path.is_file() else None


def _examples() -> str:
    """All examples on one page: what each shows, in its own words, and the program, folded."""
    parts = ["# Examples\n\nOne complete experiment per file, in reading order.\n"]
    for path in sorted((ROOT / "examples").glob("[0-9]*.*")):
        shows, program = _notebook(path) if path.suffix == ".ipynb" else _program(path)
        block = textwrap.indent(program, "    ")
        parts.append(
            f'## {path.name} {{ #{path.stem} }}\n\n{shows}\n\n??? example "The program"\n\n{block}\n'
        )
    return "\n".join(parts)


def _program(path: pathlib.Path) -> tuple[str, str]:
    """What a program shows, in its own words, and its code."""
    code = path.read_text()
    shows = (ast.get_docstring(ast.parse(code)) or "").partition("\n\n")[0]
    return shows, f"```python\n{code}```"


def _notebook(path: pathlib.Path) -> tuple[str, str]:
    """What a notebook shows, by its first cell, and the others; their headings would be part of the contents."""
    (title, *_), *cells = [
        ("".join(cell["source"]), cell["cell_type"])
        for cell in json.loads(path.read_text())["cells"]
    ]
    parts = [
        f"```python\n{source}\n```"
        if kind == "code"
        else re.sub(r"^#+ (.*)$", r"**\1**", source, flags=re.MULTILINE)
        for source, kind in cells
    ]
    return title.partition("\n\n")[2], "\n\n".join(parts)
