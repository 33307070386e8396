"""The result of a verification: a row per check, the first difference, and both as text."""

import dataclasses
import textwrap
from typing import Literal

from millstream.errors import VerificationFailed
from millstream.inspect._compare import Mismatch
from millstream.text.html import html_table, html_text
from millstream.text.tables import line_width, text_table

Result = Literal["ok", "failed", "left out"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where a promise was broken. Printed, it is a few lines.

    Example:
        >>> print(ms.inspect.Difference("resume", "step 3", "batch['x'][0]", "1.5", "2.5", "The stage counts calls."))
        First difference: resume, step 3
          batch['x'][0]: 1.5 expected, 2.5 found
          The stage counts calls.

    Attributes:
        check: The check that found it.
        where: The way or stage that made it, the step, epoch and row, and the index of the sample.
        leaf: Which value of the batch or sample.
        expected: What it should be.
        found: What it is.
        cause: The likely cause, and how to fix it.
    """

    check: str
    where: str
    leaf: str
    expected: str
    found: str
    cause: str

    @classmethod
    def of(cls, check: str, where: str, mismatch: Mismatch, cause: str) -> "Difference":
        """The difference that comparing two values has found."""
        return cls(check, where, mismatch.shown, mismatch.expected, mismatch.found, cause)

    def __str__(self) -> str:
        width = line_width()
        what = f"{self.leaf}: {self.expected} expected, {self.found} found"
        lines = [textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ") for text in (what, self.cause)]
        return "\n".join([f"First difference: {self.check}, {self.where}", *lines])


@dataclasses.dataclass(frozen=True)
class VerificationRow:
    """One check of a verification.

    Example:
        >>> [row.check for row in loader.verify(executors=[], hosts=[]).rows]
        ['stages', 'samples', 'executors', 'resume', 'hosts']

    Attributes:
        check: What was checked.
        result: "ok", "failed" or "left out".
        evidence: What was compared, and how much of it; or why nothing was.
        difference: Where it failed first.
        notes: What the check left out, and differences that do not break a promise.
    """

    check: str
    result: Result
    evidence: str
    difference: Difference | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. Printed, it is a table.

    Example:
        >>> verification = loader.verify(executors=[ms.Threads(2)], hosts=[1, 2], raises=False)
        >>> verification.ok
        True

    Attributes:
        rows: One per check.
        seconds: How long it took.
    """

    rows: tuple[VerificationRow, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all checks passed or were left out."""
        return all(row.result != "failed" for row in self.rows)

    @property
    def difference(self) -> Difference | None:
        """The first difference; None if there is none."""
        return next((row.difference for row in self.rows if row.difference is not None), None)

    def raise_if_failed(self) -> None:
        """Raise `VerificationFailed` if a check failed."""
        if not self.ok:
            raise VerificationFailed(self)

    def __str__(self) -> str:
        width, rows = line_width(), [(row.check, row.result, row.evidence) for row in self.rows]
        total = ("all", "ok" if self.ok else "failed", f"in {self.seconds:.1f} s")
        parts = [text_table(["check", "result", "evidence"], rows, total=total, prose=["evidence"], width=width)]
        notes = [
            textwrap.fill(f"{row.check}: {note}", width, initial_indent="  ", subsequent_indent="    ")
            for row in self.rows
            for note in row.notes
        ]
        if notes:
            parts.append("\n".join(["Notes", *notes]))
        if self.difference is not None:
            parts.append(str(self.difference))
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(row.check, row.result, "\n".join([row.evidence, *row.notes])) for row in self.rows]
        total = ("all", "ok" if self.ok else "failed", f"in {self.seconds:.1f} s")
        table = html_table(["check", "result", "evidence"], rows, total=total)
        return table + ("" if self.difference is None else html_text(str(self.difference)))
