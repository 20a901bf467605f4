"""A row of CSV that cannot be used hides no other, and what stops the reading says so."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from uspft.data.faults import BadRecord
from uspft.data.files import readers
from uspft.data.files.sources import list_files
from uspft.data.samples import Entry


def read(path: Path, content: bytes) -> tuple[list[int], list[str]]:
    """The lines of the good rows of a file, and its faults without its name."""
    path.write_bytes(content)
    (file,) = list_files(str(path), "auto")
    found = list(readers.objects(file, lambda names: names))
    bad = [f"{item.where}: {item.what}" for item in found if isinstance(item, BadRecord)]
    assert all(line.startswith(f"{path}:") for line in bad)
    good = [item.line for item in found if isinstance(item, Entry)]
    return good, [line.removeprefix(f"{path}:") for line in bad]


def test_rows_behind_a_bad_one_are_read(tmp_path: Path) -> None:
    rows = [b"question,answer", *[b"a,b"] * 5]
    rows[3] = b"what\x92s,that"
    rows[4] = b'"two\nlines, the second\xff",c'
    rows[5] = b"a,b\0"
    good, bad = read(tmp_path / "a.csv", b"\n".join([*rows, b'"a', b'b",c,d', b"e,f"]))
    assert good == [2, 3, 10]
    quotes, second, nul, wide = bad
    assert quotes.startswith("4: not UTF-8 (byte 0x92); save it as UTF-8, as `iconv -f cp1252")
    assert second.startswith("6: not UTF-8 (byte 0xff); ")
    assert nul.startswith("7: holds NUL bytes")
    assert wide.startswith("8: 3 columns in lines 8–9, and the first line names 2; quote values")


STOPS = {
    "a quote": (b'q,a\n1,2\n3,"4\n5,6\n', [2], "3: a quote is opened and never closed: nothing"),
    "CR": (b"q,a\r1,2\r3,4\r", [], "1: a line ends with CR alone: nothing from here on is read; "),
    "a long value": (b'q,a\n1,2\n3,"4' + b"5\n" * 99, [2], "3: a value of more than 100 charac"),
    "a long line": (b"q,a\n1," + b"2" * 99, [], "2: a line of more than 100 bytes: nothing from"),
    "a name in Latin-1": (
        b"q,r\xe9ponse\n1,2\n",
        [],
        "1: not UTF-8 (byte 0xe9) among the names of the columns: nothing from here on is read; s",
    ),
    "UTF-16": ("q,a\n1,2\n".encode("utf-16"), [], "1: holds NUL bytes: UTF-16, or no text at all"),
    "UTF-16 with CR": ("q,a\r\n1,2\r\n".encode("utf-16"), [], "1: holds NUL bytes: UTF-16, or no"),
    "one name twice": (
        b"q,a,a\n1,2,3\n",
        [],
        "1: the first line names 'a' more than once: nothing from here on is read; give each",
    ),
    "semicolons": (
        b"q;a\n1;2, 3\n",
        [],
        "1: its columns stand apart by ';', not by commas: nothing from here on is read; save it",
    ),
    "bars": (b"q|a\n1|2\n", [], "1: its columns stand apart by '|', not by commas: "),
    "tabs": (b"q\ta\n1\t2\n", [], "1: its columns stand apart by '\\t', not by commas: "),
}


@pytest.mark.parametrize("case", STOPS)
def test_what_stops_the_reading_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    content, good, told = STOPS[case]
    monkeypatch.setattr(readers, "LONGEST_LINE", 100)
    found, (line,) = read(tmp_path / "a.csv", content)
    assert found == good and line.startswith(told) and "; " in line, line


def test_other_tables(tmp_path: Path) -> None:
    told = "1: its columns stand apart by ',', not by tabs: nothing from here on is read; call it"
    good, (line,) = read(tmp_path / "a.tsv", b"q,a\n1,2\n")
    assert not good and line.startswith(told) and line.endswith(" .csv")
    # Columns without a name are nobody's, and quotes may stand in a value.
    assert read(tmp_path / "a.csv", b'q,a,,\n1,2,,\n"b"c,d"e,,\n') == ([2, 3], [])
    # The names of one column may hold what columns stand apart by.
    assert read(tmp_path / "b.csv", b'"a,b"\n1\n') == ([2], [])


def test_a_cut_file_says_what_is_not_read(tmp_path: Path) -> None:
    noise = random.Random(1)
    lines = b"".join(b'{"text": "%032x"}\n' % noise.getrandbits(128) for _ in range(20_000))
    good, (line,) = read(tmp_path / "a.jsonl.gz", gzip.compress(lines)[:-90_000])
    assert 5_000 < len(good) < 20_000 and line.startswith(" cannot be read: Compressed file")
    assert line.endswith(f": nothing behind line {good[-1]} is read; mend it or leave it out")
