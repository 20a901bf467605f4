"""Files as decompressed bytes, and messages about bytes that are not UTF-8, which name the
encoding."""

from __future__ import annotations

import codecs
import gzip
import io
import math
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, cast

from uspft.data.files.sources import SourceFile

BOM = b"\xef\xbb\xbf"
A_MARK = "a byte-order mark (U+FEFF)"
"""The name of a BOM that does not begin a file."""
# first bytes; name; the file ending to rename it to, or "" if the format cannot be read
_KINDS = (
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"PAR1\x15", "Parquet", ".parquet"),
    (b"ARROW1\0\0", "Arrow", ".arrow"),
    (b"PK\x03\x04", "a zip archive or a spreadsheet", ""),
    (b"BZh91AY&SY", "bzip2", ""),
    (b"\xfd7zXZ\0", "xz", ""),
)


def opened(file: SourceFile) -> tuple[IO[bytes], Callable[[], int]]:
    """Open a file; return it decompressed, and a function for the bytes of the file read so far."""
    raw = file.path.open("rb")
    if file.packed == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw)), raw.tell
    if file.packed == ".zst":
        import pyarrow as pa  # type: ignore[import-untyped]

        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return cast("IO[bytes]", io.BufferedReader(stream)), raw.tell
    return raw, raw.tell


def other_kind(file: SourceFile) -> str:
    """Return what is wrong with a file whose first bytes show that it is not text, with the remedy;
    else an empty text.

    Raises what reading a compressed file raises.
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
    """Return the message for text with NUL bytes."""
    return "holds NUL bytes: UTF-16, or no text at all; save it as UTF-8, or leave it out"


LOOKED_BYTES = 1 << 26
"""Bytes of a file that an encoding must decode to be suggested."""
_PIECE = 1 << 20
_JUDGED, _SHOWN = 1 << 16, 12
"""Non-ASCII characters by which an encoding is judged, and how many of them are shown."""
_BEYOND = re.compile(r"[^\x00-\x7f]+")
_KANA = "".join(map(chr, range(0x3041, 0x30FF)))
_CYRILLIC = "оаеинтсрвлкі"
_LATIN = "àáâãäåæçèéêëìíîïñòóôõöøùúûüýÿßœÀÁÂÄÅÆÇÈÉÊÍÎÑÓÔÖØÚÜŒ’‘“”„«»–—…°€£§¿¡©®·\xa0"


@dataclass(frozen=True)
class _Encoding:
    """An encoding, with statistics of the non-ASCII characters of its texts."""

    name: str
    common: str
    """The most frequent characters."""
    share: float
    """The least share of these characters."""
    least: float = 0.0
    most: float = math.inf
    """Bounds of the mean length of a run of non-ASCII characters: Cyrillic words are long runs,
    accented Latin letters stand alone."""


_ENCODINGS = (
    _Encoding("cp932", _KANA, 0.3),
    _Encoding("euc-jp", _KANA, 0.3),
    _Encoding(
        "euc-kr",
        "이다는을의가에고하지은로기도를사한자시리서어나해인아일대스전정수있것그부라만보장으와제"
        "들상구적면여세성주과안원오소년동중신국우니마습까요네게거녕무모저될된할했었",
        0.2,
    ),
    _Encoding(
        "gb18030",
        "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之"
        "年过发后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样"
        "理心她本前开但因只从想实日，。：；！？、“”（）",
        0.15,
    ),
    _Encoding(
        "big5",
        "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之"
        "年過發後作里用道行所然家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣"
        "理心她本前開但因只從想實日，。：；！？、「」（）",
        0.15,
    ),
    _Encoding("cp1251", _CYRILLIC, 0.45, least=2.0),
    _Encoding("koi8-r", _CYRILLIC, 0.45, least=2.0),
    _Encoding("cp866", _CYRILLIC, 0.45, least=2.0),
    _Encoding("cp1253", "αοιετσνηυρπκμ", 0.45, least=2.0),
    # It has the letters of Latin-1, with quotes and dashes in place of control characters.
    _Encoding("cp1252", _LATIN, 0.9, most=2.0),
    _Encoding("cp1250", "ąćęłńóśźżčďěňřšťůžýáéíúôöüőűăâîțșŁŚŻŽŠČ„”“’–—…«»", 0.9, most=2.0),
)


def not_utf8(file: SourceFile, content: bytes, start: int) -> str:
    """Return what is wrong with bytes of a file that are not UTF-8 from `start` on, and the remedy,
    which names an encoding if one decodes the file."""
    if content[start] == 0 or content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return nul()
    status = os.stat(file.path)
    remedy = _remedy(file, (status.st_size, status.st_mtime_ns))
    return f"not UTF-8 (byte 0x{content[start]:02x}); {remedy}"


@lru_cache(maxsize=16)
def _remedy(file: SourceFile, version: tuple[int, int]) -> str:
    """Return the remedy for a version (size and modification time) of a file, by which it is
    cached."""
    try:
        with opened(file)[0] as handle:
            content = handle.read(LOOKED_BYTES)
    except (OSError, EOFError, zlib.error, ValueError):  # reading the file will report it
        return "save it as UTF-8"
    if _is_mostly_utf8(content):
        return "the rest of the file is UTF-8: mend these bytes, or leave the record out"
    found = encoding_of(content)
    if found is None:
        return (
            "no encoding tried here decodes the file to a text: save it as UTF-8, or leave it out"
        )
    name, said = found
    part = "" if len(content) < LOOKED_BYTES else "the start of "
    way = f"save it as UTF-8, as `iconv -f {name} -t utf-8` does"
    return f"{way}: {name} decodes {part}the file ({said} …)"


def encoding_of(content: bytes) -> tuple[str, str] | None:
    """Return the encoding whose decoding of `content` looks most like text, and a sample of that
    text.

    None where no encoding decodes it to plausible text. content: may be cut off inside a character.
    """
    best, found = 0.999, None
    for encoding in _ENCODINGS:
        runs = _beyond_ascii(content, encoding.name)
        text = "".join(runs)[:_JUDGED]
        if not text or not encoding.least <= len(text) / len(runs) < encoding.most:
            continue
        known = sum(map(text.count, set(encoding.common)))
        if (like := known / len(text) / encoding.share) > best:
            best, found = like, (encoding.name, text[:_SHOWN])
    return found


def _beyond_ascii(content: bytes, name: str) -> list[str]:
    """Return the first runs of non-ASCII characters of bytes decoded by an encoding; empty where it
    cannot decode all of them."""
    decoder, found, count = codecs.getincrementaldecoder(name)(), list[str](), 0
    try:
        for start in range(0, len(content), _PIECE):
            text = decoder.decode(content[start : start + _PIECE])
            if count < _JUDGED:
                found += _BEYOND.findall(text)
                count = sum(map(len, found))
    except UnicodeDecodeError:
        return []
    return found


def _is_mostly_utf8(content: bytes) -> bool:
    """Tell whether most non-ASCII bytes are UTF-8, so that it is a damaged UTF-8 file."""
    wrong = every = 0
    for start in range(0, len(content), _PIECE):
        text = content[start : start + _PIECE].decode("utf-8", "replace")
        wrong += text.count("\ufffd")
        every += sum(map(len, _BEYOND.findall(text)))
    return 2 * wrong < every
