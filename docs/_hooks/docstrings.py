"""Docstrings as the site reads them: an `Example:` is code, as an `Examples:` would be."""

import re
from typing import Any

import griffe


class RunnableExamples(griffe.Extension):
    """Have `Example:` read as the section of Google's style that holds code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in one docstring, before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
