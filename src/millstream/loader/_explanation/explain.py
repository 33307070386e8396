"""A pipeline as a table: its stages, where they run, what leaves them, and the plan of an epoch."""

import dataclasses
import html
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from millstream.loader._explanation.plan import plan_in_words
from millstream.loader._explanation.stage import ExplainedStage
from millstream.loader._explanation.stages import explained_stages
from millstream.text.tables import WIDTH, name_table, size_text, text_table

if TYPE_CHECKING:
    from millstream.loader.loader import DataLoader

_HEADER = ("stage", "where", "shape and dtype", "per batch", "memory", "note")
_NUMBERS, _PROSE = ("per batch", "memory"), ("where", "note")
_LEAVES = 8  # that a cell lists


class Explanation:
    """The stages of a pipeline and its plan; printed, it is a table. See `DataLoader.explain`.

    Example:
        >>> explanation = loader.explain()
        >>> [row.stage for row in explanation.rows], explanation.plan["epoch"]
        (['ArraySampleSource', 'BatchTransform'], '3 batches of 4')

    Attributes:
        rows: One `ExplainedStage` per stage, in the order of the pipeline.
        plan: What an epoch is, how samples are read and where batches go, as texts by name.
    """

    def __init__(self, rows: list[ExplainedStage], plan: dict[str, str]) -> None:
        self.rows = rows
        self.plan = plan

    def as_dict(self) -> dict[str, Any]:
        """The same as values that JSON has: `{"stages": [{"stage": ..., ...}], "plan": {...}}`."""
        stages = [dataclasses.asdict(row) for row in self.rows]
        for stage in stages:
            stage["shapes"] = {path: list(shape) for path, shape in stage["shapes"].items()}
        return {"stages": stages, "plan": dict(self.plan)}

    def __repr__(self) -> str:
        table = text_table(_HEADER, map(_cells, self.rows), numbers=_NUMBERS, prose=_PROSE, width=WIDTH)
        return f"{table}\n\n{name_table(self.plan.items(), width=WIDTH)}"

    def _repr_html_(self) -> str:
        cells = [_html_row("td", _cells(row)) for row in self.rows]
        plan = [_html_row("td", pair) for pair in self.plan.items()]
        return f"<table>{_html_row('th', _HEADER)}{''.join(cells)}</table><table>{''.join(plan)}</table>"


def explain(loader: "DataLoader") -> Explanation:
    """The table of a loader's pipeline. Stages are traced; nothing is read, compiled or started."""
    with loader._own_mesh():
        return Explanation(explained_stages(loader), plan_in_words(loader))


def joined(parts: Mapping[str, Explanation], plan: dict[str, str]) -> Explanation:
    """The table of several loaders, each under its name, and the plan of the whole in front of theirs."""
    rows = [dataclasses.replace(row, stage=f"{name}: {row.stage}") for name, part in parts.items() for row in part.rows]
    plans = {f"{name}: {what}": text for name, part in parts.items() for what, text in part.plan.items()}
    return Explanation(rows, plan | plans)


def _cells(row: ExplainedStage) -> tuple[str, ...]:
    leaves = [f"{path} {shape} {row.dtypes[path]}".lstrip() for path, shape in row.shapes.items()]
    sizes = ("" if size is None else size_text(size) for size in (row.bytes_per_batch, row.memory_bytes))
    return (row.stage, row.where, _listed(leaves), *sizes, row.note)


def _listed(lines: list[str]) -> str:
    if len(lines) > _LEAVES:
        lines = [*lines[: _LEAVES - 1], f"and {len(lines) - _LEAVES + 1:,} more"]
    return "\n".join(lines)


def _html_row(tag: str, cells: Iterable[str]) -> str:
    texts = (html.escape(cell).replace("\n", "<br>") for cell in cells)
    return "<tr>" + "".join(f'<{tag} style="text-align: left">{text}</{tag}>' for text in texts) + "</tr>"
