"""The name of tokenised data: a hash of all that changes the tokens, and of no more."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.data.faults import DataError
from uspft.data.hub import HubSplit
from uspft.data.reading import SourcePart
from uspft.data.samples import Record
from uspft.data.sources import SourceFile
from uspft.data.tokenise import TextTokeniser

if TYPE_CHECKING:
    from uspft.config.recipe import DataBlock

VERSION = 5  # raise it with every change that gives other tokens for the same data
SKIPPED = "skip, and read on, strings with a NUL or a byte-order mark too"
"""Which samples are left out where bad ones are skipped: change it where that changes."""
LAID_OUT = 2  # raise it where the files of a corpus hold the same tokens in another way


@dataclass(frozen=True)
class CacheKey:
    """Two names of a corpus, each a hash.

    folder: stands for everything in the corpus's folder. contents: stands for its tokens alone,
    wherever their files lay.
    """

    folder: str
    contents: str


def cache_key(
    data: DataBlock,
    parts: list[tuple[SourcePart, Record | None]],
    tokeniser: TextTokeniser | None,
    vocab_size: int,
) -> CacheKey:
    """Return the names of the corpus that these parts become.

    parts: each with its first record.
    """
    with ThreadPoolExecutor(data.workers or 1) as pool:
        digests = list(pool.map(_digest, [part for part, _ in parts]))
    cuts = data.overlong != "error"
    identity = {
        "version": VERSION,
        "parts": [_part_identity(part, record) for part, record in parts],
        "contents": digests,
        **_takes(data),
        "tokeniser": tokeniser.identity() if tokeniser else None,
        "vocab_size": vocab_size,
        "overlong": data.overlong,
        "sequence_length": data.sequence_length if cuts else None,
        **({"bad": SKIPPED} if data.on_bad_sample == "skip" else {}),
    }
    contents = _hashed(identity)
    shown = [part.content.shown for part, _ in parts]
    return CacheKey(_hashed([LAID_OUT, contents, *shown]), contents)


def _part_identity(part: SourcePart, first: Record | None) -> list[Any]:
    """Return what of a part changes its tokens beside its contents."""
    kind = "json" if isinstance(part.content, HubSplit) else part.content.kind
    # As true and false, so that data keeps the name it had when files were lines or one text.
    how = {"text": True, "json": False}.get(kind, kind)
    found = [part.source, first and first.format, how]
    if isinstance(part.content, SourceFile) and part.content.eod is not None:
        found.append(part.content.eod)
    if part.asked.prompt:
        found.append(part.asked.prompt)
    return [*found, dict(sorted(part.asked.fields.items()))] if part.asked.fields else found


def _hashed(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


def _takes(data: DataBlock) -> dict[str, Any]:
    """Return what decides how much of each source is taken, under the names it always had."""
    weights = [1.0 if source.weight is None else float(source.weight) for source in data.train]
    limits = [(source.max_samples, source.max_tokens) for source in data.train]
    found: dict[str, Any] = {"weights": weights}
    if any(source.weight is not None for source in data.train):
        found["mixed by"] = "tokens"
    if any(limit != (None, None) for limit in limits):
        found["limits"] = limits
    return found


def _digest(part: SourcePart) -> str:
    if isinstance(part.content, HubSplit):
        return part.content.digest()
    try:
        return "".join(map(_of_file, part.content.paths))
    except OSError as error:
        what = f"cannot be read: {error.strerror}; mend it or leave it out"
        raise DataError([f"{part.content.shown}: {what}"]) from error


def _of_file(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
