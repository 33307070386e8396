"""Several files that are one table: their columns must agree."""

from collections.abc import Sequence
from typing import Any

from millstream._core.errors import table
from millstream.integrations._table import chosen_columns


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
    expected = {name: schemas[0].field(name).type for name in chosen}
    for name, schema in zip(names[1:], schemas[1:], strict=True):
        found = {field.name: field.type for field in schema if columns is None or field.name in expected}
        if found != expected or len(schema.names) != len(set(schema.names)):
            odd = [column for column in {**expected, **found} if found.get(column) != expected.get(column)]
            shown = [(repr(column), f"{expected.get(column)} and {found.get(column)}") for column in odd]
            raise ValueError(
                f"{who} needs the same columns in all files. {names[0]} and {name} have:\n{table(shown)}\n"
                "Write them again with one schema, or choose columns that they share with columns=[...]."
            )
    return pa.schema([schemas[0].field(name) for name in chosen])
