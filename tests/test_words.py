"""The words of the project: plain, usual English in code, errors and documents."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BETTER = {
    r"\b(in|out)side of\b": "inside, outside",
    r"\bunder way\b": "in flight, in progress, running",
    r"\bfor ever\b": "forever",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bwho speaks\b": "the caller",
    r"\b(go|goes|going|gone|went) on (with|from|exactly|as if|after|behind|for ever|only)\b": "continue, resume",
    r"\bbegin of\b": "beginning of",
    r"\blets? go of\b": "release, close",
    r"interpreter's lock": "GIL",
    r"\b(stands?|put|logged|called) behind\b": "after",
    r"\bone behind the other\b": "one after the other",
    r"\bbehind (a|any|each|every|its|the last|the newest|the) (step|row|stage|batch|source|one)\b": "after",
    r"(?<!there )\bis no (row|transform|whole number|dictionary|pytree|array|mapping|sample|tree)\b": ("is not a"),
    r"\b(every|another|the first|after|exactly|most) so many\b": "n, that many",
}


def texts():
    for folder, kinds in {"src": (".py", ".pyi", ".js", ".html"), "docs": (".md",), "examples": (".py",)}.items():
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in kinds)
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))


@pytest.mark.parametrize("pattern", BETTER)
def test_words_that_read_as_translated_are_not_used(pattern):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert found == [], f"write: {BETTER[pattern]}"
