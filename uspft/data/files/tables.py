"""Tables by pyarrow: Parquet, Arrow, and data sets of `datasets` (of the hub or `save_to_disk`).

Records of files are sent as columns, some at a time, to the process that unpacks and tokenises
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.config.problems import said
from uspft.data.faults import BadRecord, SampleFault, place, wrong_key
from uspft.data.files.sources import is_saved, saved_splits
from uspft.data.samples import Entry

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

    from uspft.config.inputs import Source
    from uspft.data.files.sources import SourceFile

_HASH_RECORDS = 1000
_HUB_SECONDS = 10


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set; messages have a record's number, from 1, in place of a line."""

    dataset: Any  # datasets.Dataset
    shown: str
    kind, library, eod = "hub", False, None  # as in a SourceFile

    @property
    def size(self) -> int:
        """The number of records."""
        return len(self.dataset)

    def digest(self) -> str:
        """Return the blake2b hash of all records, taken from Arrow's stream format."""
        import pyarrow as pa

        sink = _HashSink()
        writer = None
        for table in self.dataset.with_format("arrow").iter(batch_size=_HASH_RECORDS):
            writer = writer or pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema)
            writer.write_table(table)
        return sink.hash.hexdigest()


class _HashSink:
    """A file object for pyarrow that only hashes what is written."""

    closed = False

    def __init__(self) -> None:
        self.hash = blake2b(digest_size=16)

    def write(self, content: Any) -> int:
        self.hash.update(content)
        return len(content)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def loaded(source: Source) -> HubSplit:
    """Load the split of `source` (default train) from a folder that `save_to_disk` wrote, the hub,
    or the cache of `datasets`.

    Raises DataError with the error of `datasets`.
    """
    from datasets import load_dataset, load_from_disk

    path, split, saved = source.path, source.split or "train", is_saved(source.path)
    whole = saved and not saved_splits(path)
    try:
        if saved:
            found = load_from_disk(Path(path))
            dataset = found if whole else found[split]
        else:
            _ask_hub(path)
            dataset = load_dataset(path, source.name, split=split)
    except Exception as error:  # datasets, pyarrow, hub and network each raise their own kinds
        what = f"hub data set {path} ({split})"
        remedy = "check the id, name and split, and the network, or use a local path"
        if saved:
            what = f"the saved data set {path} cannot be read"
            remedy = "save it again with save_to_disk"
        raise wrong_key("data.train", f"{what}: {said(error)}", remedy) from error
    return HubSplit(dataset, path if whole else f"{path}/{split}")


def _ask_hub(name: str) -> None:
    """Ask the hub for a data set, so that an unreachable hub is reported within `_HUB_SECONDS`.

    `datasets` alone tries for half a minute. Raises what the hub's client raises, unless the data
    set is cached here.
    """
    from huggingface_hub import CacheNotFound, HfApi, is_offline_mode, scan_cache_dir

    if is_offline_mode():
        return
    try:
        HfApi().dataset_info(name, timeout=_HUB_SECONDS)
    except Exception:
        try:
            cached = any(repo.repo_id == name for repo in scan_cache_dir().repos)
        except CacheNotFound:
            cached = False
        if not cached:
            raise


RECORDS, BYTES = 256, 1 << 19
"""The most records and bytes of one Columns, unless a single record is larger."""


@dataclass(frozen=True)
class Columns:
    """Consecutive records of a table, still packed: the bytes of an Arrow stream.

    first: the number of the first, counted from 1. size: about how many bytes of the file each has.
    """

    shown: str
    first: int
    count: int
    size: int
    stream: bytes

    def entries(self) -> Iterator[Entry | BadRecord]:
        """Yield the records, or a BadRecord where a value cannot be converted to Python."""
        import pyarrow as pa

        with pa.ipc.open_stream(self.stream) as stream:
            table = stream.read_all()
        try:
            records = list(table.to_pylist())
        except (ValueError, OverflowError):  # of at least one record
            records = [_record(table.slice(row, 1)) for row in range(len(table))]
        for line, fields in enumerate(records, self.first):
            if isinstance(fields, SampleFault):
                yield BadRecord(place(self.shown, line), str(fields))
            else:
                yield Entry(line, filled(fields), self.size)


def filled(record: dict[str, Any]) -> dict[str, Any]:
    """Return a table's record without the keys of nested objects that are null.

    Arrow gives every object of a column the same keys, so that a call's or a tool's absent keys are
    null, which a chat template would write.
    """
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(one) for one in value]
    return value


def _record(row: pa.Table) -> dict[str, Any] | SampleFault:
    """Return a table's only record, or the fault of its first field that cannot be converted to
    Python."""
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
    """Return the uncompressed bytes of a file's columns; its size if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        meta = pq.read_metadata(path)
    except (OSError, pa.ArrowInvalid):  # reading the file will report it
        return path.stat().st_size
    return _unpacked(meta)


def _unpacked(meta: Any) -> int:
    return sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))


def _parquet(
    path: Path, chosen: Callable[[list[str]], list[str]]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield batches, each with the bytes of the file per record, about."""
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
    """Return the schema and the batches of an open Arrow file, in either of Arrow's two formats."""
    import pyarrow as pa

    try:
        stream = pa.ipc.open_stream(source)  # as `datasets` writes it
    except pa.ArrowInvalid:
        file = pa.ipc.open_file(source)
        return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
    return stream.schema, iter(stream)


def _stream(batch: pa.RecordBatch) -> bytes:
    """Return a batch as an Arrow stream: pickling a slice would write the whole table."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def with_values(content: SourceFile | HubSplit, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a table that have a value other than null.

    It reads only statistics of a Parquet file, and the null counts of Arrow's columns.
    """
    if not names:
        return ()
    if isinstance(content, HubSplit):
        table = content.dataset.data
        empty = {name for name in names if table.column(name).null_count == len(table)}
    else:
        look = _empty_in_parquet if content.kind == "parquet" else _empty_in_arrow
        empty = look(content, names)
    return tuple(name for name in names if name not in empty)


def _empty_in_parquet(file: SourceFile, names: Sequence[str]) -> set[str]:
    """Return the columns that contain only null by a Parquet file's statistics."""
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
