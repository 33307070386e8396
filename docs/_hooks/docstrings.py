"""Docstrings as the site reads them: an `Example:` is a block of code that can be copied and run.

Prompts are taken away, and what an example shows becomes a comment after the line that shows it.
"""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n((?:    .*\n?|\n)+)", re.MULTILINE)


class RunnableExamples(griffe.Extension):
    """Have `Example:` read as the section of Google's style that holds code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the section in one docstring, before it is parsed."""
        if obj.docstring is not None:
            text = obj.docstring.value + "\n"
            obj.docstring.value = EXAMPLE.sub(
                lambda section: f"Examples:\n{without_prompts(section[1])}", text
            )


def without_prompts(section: str) -> str:
    """The lines of a doctest, indented as they were, as a block of code; text around it stays text."""
    lines: list[str] = []
    inside = False
    for line in section.rstrip("\n").split("\n"):
        code = re.match(r"    (?:>>>|\.\.\.)(?: (.*)|$)", line)
        if code is not None and not inside:
            lines.append("    ```python")
        elif inside and code is None and not line.strip():
            lines.append("    ```")
        inside = code is not None or (inside and bool(line.strip()))
        if code is not None:
            lines.append(f"    {code[1] or ''}".rstrip())
        else:
            lines.append(f"    # {line.strip()}" if inside else line)
    return "\n".join([*lines, *["    ```"] * inside]) + "\n\n"
