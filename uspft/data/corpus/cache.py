"""The cache of tokenised data: a folder for each corpus, named by a hash of all that changes its
tokens; how much there is, and its deletion."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from uspft.data.corpus.corpus import META
from uspft.data.corpus.tokenise import TextTokeniser
from uspft.data.corpus.workers import SourcePart
from uspft.data.faults import DataError, wrong_key
from uspft.data.files.sources import SourceFile
from uspft.data.files.tables import HubSplit
from uspft.data.samples import Record
from uspft.durable import publish
from uspft.lease import Lease, is_abandoned

if TYPE_CHECKING:
    from uspft.config.inputs import DataBlock

VERSION = 5  # raise it with every change that gives other tokens for the same data
SKIPPED = "skip, and read on, strings with a NUL or a byte-order mark too"
"""Which samples are left out where bad ones are skipped: change it where that changes."""
LAID_OUT = 2  # raise it where the files of a corpus hold the same tokens in another way


def cache_key(
    data: DataBlock,
    parts: list[tuple[SourcePart, Record | None]],
    tokeniser: TextTokeniser | None,
    vocab_size: int,
) -> tuple[str, str]:
    """Return two hashes that name the corpus which these parts become: the name of its folder, and
    a name of its tokens alone, which is the same wherever their files lay.

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
    contents = hashed(identity)
    shown = [part.content.shown for part, _ in parts]
    return hashed([LAID_OUT, contents, *shown]), contents


def _part_identity(part: SourcePart, first: Record | None) -> list[Any]:
    """Return what changes the tokens of a file or split beside its contents."""
    kind = "json" if isinstance(part.content, HubSplit) else part.content.kind
    # As true and false, so that data keeps the name it had when files were lines or one text.
    how = {"text": True, "json": False}.get(kind, kind)
    found = [part.source, first and first.format, how]
    if isinstance(part.content, SourceFile) and part.content.eod is not None:
        found.append(part.content.eod)
    if part.asked.prompt:
        found.append(part.asked.prompt)
    return [*found, dict(sorted(part.asked.fields.items()))] if part.asked.fields else found


def hashed(value: Any) -> str:
    """Return a hash of a value of JSON."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


def _takes(data: DataBlock) -> dict[str, Any]:
    """Return what decides how much of each source is taken; the keys are part of the hash."""
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


_WHOLE = re.compile(r"[0-9a-f]{24}")
_PARTIAL = re.compile(r"\.[0-9a-f]{24}\.[0-9a-f]{32}(\.partial)?")
"""The name of a folder that a corpus is written in before it is complete."""


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into, which is `folder` afterwards. Raises DataError."""
    try:
        with _partial(folder) as aside:
            yield aside
            _publish(aside, folder)
    except OSError as error:
        remedy = "name a folder with room that can be written"
        what = f"cannot write {folder.parent}: {error.strerror}"
        raise wrong_key("data.cache_dir", what, remedy) from error


@contextmanager
def _partial(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into, inside a hidden one that is deleted afterwards.

    The hidden one is beside `folder`; those that killed processes left there are deleted too.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.iterdir():
        if _PARTIAL.fullmatch(left.name) and is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    around = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        # The folder's name is new: nobody else holds it, and nobody is told to wait.
        with Lease.take(around, lambda line: None).renewed():
            aside = around / folder.name
            aside.mkdir()
            yield aside
    finally:
        shutil.rmtree(around, ignore_errors=True)


def _publish(aside: Path, folder: Path) -> None:
    try:
        publish(aside, folder)
    except OSError:
        # Another process was faster: a folder of this name is complete, and holds the same.
        if not (folder / META).exists():
            raise


class CacheSize(NamedTuple):
    """How many corpora there are, how many bytes they take, and how many of them are unfinished."""

    corpora: int
    bytes: int
    unfinished: int = 0


def corpora_in(cache_dir: Path) -> list[Path]:
    """Return the folders of the corpora in a cache, sorted."""
    if not cache_dir.is_dir():
        return []
    named = (path for path in cache_dir.iterdir() if _WHOLE.fullmatch(path.name))
    return sorted(path for path in named if (path / META).is_file())


def holding(folders: list[Path]) -> CacheSize:
    """Return how much these corpora are."""
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    unfinished = sum(bool(_PARTIAL.fullmatch(folder.name)) for folder in folders)
    return CacheSize(len(folders), sum(file.stat().st_size for file in files), unfinished)


def empty(cache_dir: Path) -> CacheSize:
    """Delete the corpora of a cache, and what killed processes left; return how much that was.

    What is being written now stays, and so does what is no corpus. A run that has a corpus open
    goes on with it. Raises OSError.
    """
    folders = corpora_in(cache_dir)
    left = list(cache_dir.iterdir()) if cache_dir.is_dir() else []
    folders += [path for path in left if _PARTIAL.fullmatch(path.name) and is_abandoned(path)]
    found = holding(folders)
    for folder in folders:
        shutil.rmtree(folder)
    return found
