"""Names in text lead to the place that describes them: `DataLoader`, `ms.every(10)`, `loader.iterate`.

Docstrings and pages write names as code and nothing else. What is described on a page of the API becomes a link.
"""

import re
from typing import Any

from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

HEADING = re.compile(r'id="(millstream\.[\w.]+)" class="doc doc-heading"')
# Code inside links, headings and blocks is passed over.
CODE = re.compile(
    r"<(a|pre|h\d|autoref)\b.*?</\1>|<code>(?P<name>[\w.]+)(?P<call>\([^<]*\))?</code>",
    re.DOTALL,
)
OTHER_LIBRARIES = ("coming-from", "api/dialects")  # where equal names mean other things


def on_env(env: Any, files: Files, **_: Any) -> Any:
    """Link the names, now that all pages are there."""
    pages = [file.page for file in files.documentation_pages() if file.page is not None]
    places = _places(pages)
    for page in pages:
        if not page.url.startswith(OTHER_LIBRARIES):
            page.content = _linked(page, places)
    return env


def _places(pages: list[Page]) -> dict[str, str]:
    """The address of every name, under all the ways in which it is written."""
    places: dict[str, str] = {}
    described = [
        (name, page.url)
        for page in pages
        for name in HEADING.findall(page.content or "")
    ]
    for name, url in sorted(described, key=lambda found: found[0].count(".")):
        short, last = name.removeprefix("millstream."), name.rpartition(".")[2]
        written = [f"ms.{short}", name, short]
        if short.count(".") == 1 and short[0].islower():
            written.append(
                f"ms.{last}"
            )  # a name of a room that is at the top level, too
        if last[0].isupper():
            written.append(last)
        if short.startswith("DataLoader."):
            written.append(f"loader.{last}")
        for form in written:
            places.setdefault(form, f"{url}#{name}")
    return places


def _linked(page: Page, places: dict[str, str]) -> str:
    def link(found: re.Match[str]) -> str:
        name = found["name"]
        # `history` and `at` are words, too: a plain name is meant only where it is called or cannot be a word.
        plain = (
            name is not None
            and name.islower()
            and not re.search(r"[_.]", name)
            and found["call"] is None
        )
        if name is None or plain or name not in places:
            return found[0]
        return f'<a href="{get_relative_url(places[name], page.url)}">{found[0]}</a>'

    return CODE.sub(link, page.content or "")
