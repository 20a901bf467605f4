"""The columns of a table that are not read, without those in which no record has a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from uspft.data.hub import HubSplit
from uspft.data.tables import opened_arrow

if TYPE_CHECKING:
    from uspft.data.sources import SourceFile


def with_values(content: SourceFile | HubSplit, names: Sequence[str]) -> tuple[str, ...]:
    """Return which columns of a table hold a value other than null.

    Only what tells that is read: statistics of a Parquet file, the lengths of Arrow's columns.
    """
    if not names:
        return ()
    if isinstance(content, HubSplit):
        nulls = {name: content.dataset.data.column(name).null_count for name in names}
        return tuple(name for name in names if nulls[name] < len(content.dataset.data))
    empty = (_parquet if content.kind == "parquet" else _arrow)(content, names)
    return tuple(name for name in names if name not in empty)


def _parquet(file: SourceFile, names: Sequence[str]) -> set[str]:
    """Return the columns that a Parquet file says to hold nothing but null."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    meta = pq.read_metadata(file.path)
    schema, filled = meta.schema.to_arrow_schema(), set[str]()
    untyped = {name for name in names if pa.types.is_null(schema.field(name).type)}
    for group in map(meta.row_group, range(meta.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            stats: Any = column.statistics
            known = stats is not None and stats.has_null_count
            if not known or stats.null_count < column.num_values:
                filled.add(column.path_in_schema.partition(".")[0])
    return set(names) - (filled - untyped)


def _arrow(file: SourceFile, names: Sequence[str]) -> set[str]:
    import pyarrow as pa

    empty = set(names)
    with pa.memory_map(str(file.path)) as source:
        for batch in opened_arrow(source)[1]:
            empty -= {name for name in empty if batch.column(name).null_count < batch.num_rows}
            if not empty:
                break
    return empty
