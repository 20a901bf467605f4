"""Files as decompressed bytes, and what is wrong with bytes that are no text."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from typing import IO, cast

from uspft.data.sources import SourceFile

BOM = b"\xef\xbb\xbf"
A_MARK = "a byte-order mark (U+FEFF)"
"""What BOM is where it does not begin a file."""
_KINDS = (  # how they begin; what they are; the ending that says so, or none that is read
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"PAR1\x15", "Parquet", ".parquet"),
    (b"ARROW1\0\0", "Arrow", ".arrow"),
    (b"PK\x03\x04", "a zip archive or a spreadsheet", ""),
    (b"BZh91AY&SY", "bzip2", ""),
    (b"\xfd7zXZ\0", "xz", ""),
)


def opened(file: SourceFile) -> tuple[IO[bytes], Callable[[], int]]:
    """Open a file; return it decompressed, and a function that tells how far it was read."""
    raw = file.path.open("rb")
    if file.packed == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw)), raw.tell
    if file.packed == ".zst":
        import pyarrow as pa  # type: ignore[import-untyped]

        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return cast("IO[bytes]", io.BufferedReader(stream)), raw.tell
    return raw, raw.tell


def other_kind(file: SourceFile) -> str:
    """Return what is wrong with a file that its first bytes tell to be no text, with the remedy.

    It is empty where they do not. Raises what reading a compressed file raises.
    """
    with opened(file)[0] as handle:
        head = handle.read(16)
    for start, kind, ending in _KINDS:
        if head.startswith(start):
            what, name = f"holds {kind}, which its name does not say", file.path.name
            if file.packed or not ending:
                return f"{what}; unpack it, or convert it to JSON Lines"
            named = name + ending if ending in (".gz", ".zst") else file.path.stem + ending
            return f"{what}; call it {named}"
    return ""


def nul() -> str:
    """Return what is wrong with text that holds NUL bytes, and the remedy."""
    return "holds NUL bytes: UTF-16, or no text at all; save it as UTF-8, or leave it out"
