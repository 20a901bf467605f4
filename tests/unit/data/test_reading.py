"""How much data a file is, by which processes are chosen."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from uspft.data.conversations import Naming
from uspft.data.reading import SHRINKS, SourcePart
from uspft.data.sources import SourceFile
from uspft.data.tables import parquet_bytes


def part(path: Path, kind: str) -> SourcePart:
    return SourcePart(0, Naming(), SourceFile(path, path.name, kind))


def test_a_file_counts_as_what_it_unpacks_to(tmp_path: Path) -> None:
    texts = [f"{number} " + "word " * 100 for number in range(1000)]
    table, plain, packed = (tmp_path / name for name in ("a.parquet", "a.jsonl", "a.jsonl.gz"))
    pq.write_table(pa.Table.from_pylist([{"text": text} for text in texts]), table)
    plain.write_text("\n".join(f'{{"text": "{text}"}}' for text in texts))
    with gzip.open(packed, "wt") as file:
        file.write(plain.read_text())
    held = sum(map(len, texts))
    assert 4 * table.stat().st_size < held < part(table, "parquet").bytes < 1.1 * held
    assert part(plain, "json").bytes == plain.stat().st_size
    assert part(packed, "json").bytes == SHRINKS * packed.stat().st_size


def test_a_table_that_cannot_be_read_counts_as_its_file(tmp_path: Path) -> None:
    broken = tmp_path / "a.parquet"
    broken.write_bytes(b"no table at all")
    assert parquet_bytes(broken) == broken.stat().st_size
