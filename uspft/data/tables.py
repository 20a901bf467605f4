"""Parquet and Arrow files as columns of a few records at a time, which any process can unpack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.data.faults import BadRecord, SampleFault, place
from uspft.data.hub import HubSplit
from uspft.data.samples import Entry

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

    from uspft.data.sources import SourceFile

RECORDS, BYTES = 256, 1 << 19
"""Records and bytes that columns have at most, unless one record is larger."""


@dataclass(frozen=True)
class Columns:
    """Consecutive records of a table, as bytes of an Arrow stream: what they hold is not unpacked.

    first: the number of the first, counted from 1. size: bytes of the file for each, about.
    """

    shown: str
    first: int
    count: int
    size: int
    stream: bytes

    def entries(self) -> Iterator[Entry | BadRecord]:
        """Yield the records, or what is wrong with one of which Python has no value."""
        for line, fields in enumerate(self._records(), self.first):
            if isinstance(fields, SampleFault):
                yield BadRecord(place(self.shown, line), str(fields))
            else:
                yield Entry(line, fields, self.size)

    def _records(self) -> list[dict[str, Any] | SampleFault]:
        import pyarrow as pa

        with pa.ipc.open_stream(self.stream) as stream:
            table = stream.read_all()
        try:
            return list(table.to_pylist())
        except (ValueError, OverflowError):  # of one record at least
            return [_record(table.slice(row, 1)) for row in range(len(table))]


def _record(row: pa.Table) -> dict[str, Any] | SampleFault:
    """Return the one record of a table, or what is wrong with the first field that has no value."""
    fields = {}
    for name in row.column_names:
        try:
            (fields[name],) = row.column(name).to_pylist()
        except UnicodeDecodeError as error:
            what = f"{name} is not UTF-8 (byte 0x{error.object[error.start]:02x})"
            return SampleFault(f"{what}; write it again as UTF-8")
        except (ValueError, OverflowError) as error:
            why = str(error).partition("\n")[0]
            return SampleFault(f"{name}: Python has no such value ({why}); mend it")
    return fields


def tables(
    path: Path, kind: str, shown: str, chosen: Callable[[list[str]], list[str]]
) -> Iterator[Columns]:
    """Yield the records of a parquet or arrow file in order, with the chosen columns only.

    Raises OSError and ValueError where it cannot be read, and what `chosen` raises.
    """
    number, left = 1, path.stat().st_size
    for batch, size in (_parquet if kind == "parquet" else _arrow)(path, chosen):
        if not batch.num_rows:
            continue
        step = max(1, min(RECORDS, BYTES * batch.num_rows // max(1, batch.nbytes)))
        each = min(size, left // batch.num_rows)
        left -= each * batch.num_rows
        for start in range(0, batch.num_rows, step):
            piece = batch.slice(start, step)
            yield Columns(shown, number, piece.num_rows, each, _stream(piece))
            number += piece.num_rows


def parquet_bytes(path: Path) -> int:
    """Return what a file's columns take unpacked; what the file takes where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        meta = pq.read_metadata(path)
    except (OSError, pa.ArrowInvalid):  # which reading will tell
        return path.stat().st_size
    return _unpacked(meta)


def _unpacked(meta: Any) -> int:
    return sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))


def _parquet(
    path: Path, chosen: Callable[[list[str]], list[str]]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield batches, with the bytes of the file that each of their records takes, about."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as table:
        names, meta = chosen(table.schema_arrow.names), table.metadata
        rows = max(1, meta.num_rows)
        count = max(1, min(RECORDS, BYTES * rows // max(1, _unpacked(meta))))
        for batch in table.iter_batches(count, columns=names):
            yield batch, path.stat().st_size // rows


def _arrow(
    path: Path, chosen: Callable[[list[str]], list[str]]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        schema, batches = opened_arrow(source)
        names = chosen(schema.names)
        for batch in batches:
            yield batch.select(names), batch.nbytes // max(1, batch.num_rows)


def opened_arrow(source: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the schema and the batches of an open Arrow file, in either of Arrow's two forms."""
    import pyarrow as pa

    try:
        stream = pa.ipc.open_stream(source)  # as `datasets` writes it
    except pa.ArrowInvalid:
        file = pa.ipc.open_file(source)
        return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
    return stream.schema, iter(stream)


def _stream(batch: pa.RecordBatch) -> bytes:
    """Return a batch as bytes; of one that is a slice, pickle would write the whole."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def with_values(content: SourceFile | HubSplit, names: Sequence[str]) -> tuple[str, ...]:
    """Return which columns of a table hold a value other than null.

    Only what tells that is read: statistics of a Parquet file, the lengths of Arrow's columns.
    """
    if not names:
        return ()
    if isinstance(content, HubSplit):
        nulls = {name: content.dataset.data.column(name).null_count for name in names}
        return tuple(name for name in names if nulls[name] < len(content.dataset.data))
    empty = (_empty_in_parquet if content.kind == "parquet" else _empty_in_arrow)(content, names)
    return tuple(name for name in names if name not in empty)


def _empty_in_parquet(file: SourceFile, names: Sequence[str]) -> set[str]:
    """Return the columns that a Parquet file says to hold nothing but null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

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


def _empty_in_arrow(file: SourceFile, names: Sequence[str]) -> set[str]:
    import pyarrow as pa

    empty = set(names)
    with pa.memory_map(str(file.path)) as source:
        for batch in opened_arrow(source)[1]:
            empty -= {name for name in empty if batch.column(name).null_count < batch.num_rows}
            if not empty:
                break
    return empty
