"""Arrow tables of the Hugging Face library, whose arrays are extensions of its own."""

from collections.abc import Sequence
from typing import Any

from millstream.integrations._arrow_columns import require_numbers


def are_numbers(schema: Any, columns: Sequence[str]) -> bool:
    """Whether these columns are numbers, or lists and arrays of numbers."""
    try:
        for name in columns:
            require_numbers(_NotNumbers, name, _storage_type(schema.field(name).type))
    except _NotNumbers:
        return False
    return True


def numbers_table(table: Any, columns: Sequence[str]) -> Any:
    """The columns of a table, with what their arrays are stored as; nothing is copied.

    Args:
        table: A table of `datasets`.
        columns: Those to keep.
    """
    import pyarrow as pa
    from datasets.table import InMemoryTable

    stored = {}
    for name in columns:
        column = table.column(name)
        kind = _storage_type(column.type)
        stored[name] = (
            column if kind == column.type else pa.chunked_array([part.storage for part in column.chunks], kind)
        )
    return InMemoryTable(pa.table(stored))


class _NotNumbers(Exception):
    pass


def _storage_type(kind: Any) -> Any:
    """What an extension array of `datasets` is stored as; any other type as it is."""
    return kind.storage_type if type(kind).__module__.startswith("datasets.") else kind
