"""Several files that are one table: their columns must agree."""

from collections.abc import Sequence
from typing import Any

from millstream.integrations._table import chosen_columns
from millstream.text.errors import table


def common_schema(who: str, names: Sequence[str], schemas: Sequence[Any], columns: Sequence[str] | None) -> Any:
    """The Arrow schema of the chosen columns, which must be the same in all files.

    Args:
        who: Who speaks in errors.
        names: The names of the files.
        schemas: The Arrow schema of each.
        columns: The columns to read; None for all.
    """
    import pyarrow as pa

    chosen = chosen_columns(who, schemas[0].names, columns)
    expected = _types(schemas[0], chosen)
    for name, schema in zip(names[1:], schemas[1:], strict=True):
        found = _types(schema, schema.names if columns is None else chosen)
        if found != expected:
            odd = [column for column in {**expected, **found} if found.get(column) != expected.get(column)]
            shown = [(repr(column), f"{_told(expected, column)} and {_told(found, column)}") for column in odd]
            raise ValueError(
                f"{who} needs the same columns in all files. {names[0]} and {name} have:\n{table(shown)}\n"
                "Write them again with one schema, or choose columns that they share with columns=[...]."
            )
    return pa.schema([schemas[0].field(name) for name in chosen])


def _types(schema: Any, columns: Sequence[str]) -> dict[str, list[Any]]:
    """The types of these columns, as far as they are there: one each, unless a name is there several times."""
    types: dict[str, list[Any]] = {}
    wanted = set(columns)
    for field in schema:
        if field.name in wanted:
            types.setdefault(field.name, []).append(field.type)
    return types


def _told(types: dict[str, list[Any]], column: str) -> str:
    return ", ".join(map(str, types.get(column, ["none"])))
