"""Tokenised samples in a folder, written once and memory-mapped by every rank; and the cache of
such folders, each named by a hash of everything that changes its tokens."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from uspft.data.faults import DataError, wrong_key
from uspft.data.samples import Origin, Record, Sample
from uspft.durable import publish
from uspft.lease import Lease, is_abandoned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.config.inputs import DataBlock
    from uspft.data.corpus.tokenise import TextTokeniser
    from uspft.data.corpus.workers import SourcePart

TOKENS, LABELS, OFFSETS, ORIGINS = "tokens.int32", "labels.int32", "offsets.int64", "origins.int64"
META, REPORT = "corpus.json", "report.json"


@dataclass(frozen=True)
class SourceSpan:
    """The samples [first, stop) of one source, which an epoch takes `weight` times."""

    first: int
    stop: int
    weight: float


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenised samples; sample i is tokens[offsets[i] : offsets[i + 1]], and its labels likewise.

    tokens, labels: int32, memory-mapped and read-only; labels are not shifted, and -100 marks
    tokens that are not trained, as the first of each sample. offsets: int64, one more than there
    are samples. origins: int64 [samples, 3], the Origin of each.
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int64]
    origins: NDArray[np.int64]
    files: tuple[str, ...]
    sources: tuple[SourceSpan, ...]
    overlong: str
    contents: str
    """A hash of the tokens: equal tokens have equal names, wherever their files were."""

    @classmethod
    def open(cls, folder: Path | str) -> Corpus:
        """Open the corpus that `prepare` wrote to folder. Raises DataError where it is damaged."""
        folder = Path(folder)
        try:
            meta = json.loads((folder / META).read_text(encoding="utf-8"))
            samples, tokens = meta["samples"], meta["tokens"]
            return cls(
                _mapped(folder / TOKENS, np.dtype(np.int32), tokens),
                _mapped(folder / LABELS, np.dtype(np.int32), tokens),
                _mapped(folder / OFFSETS, np.dtype(np.int64), samples + 1),
                _mapped(folder / ORIGINS, np.dtype(np.int64), 3 * samples).reshape(-1, 3),
                tuple(meta["files"]),
                tuple(SourceSpan(*span) for span in meta["sources"]),
                meta["overlong"],
                meta["contents"],
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise _damaged(folder, error) from error

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each sample, int64."""
        return np.diff(self.offsets)

    def origin(self, sample: int) -> str:
        """Return the place that a sample was read from, as error messages name it."""
        origin = Origin(*self.origins[sample].tolist())
        return origin.place(self.files[origin.file])

    def sample(self, index: int) -> Sample:
        """Return one sample."""
        first, stop = self.offsets[index : index + 2].tolist()
        origin = Origin(*self.origins[index].tolist())
        return Sample(self.tokens[first:stop], self.labels[first:stop], origin)


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report that `prepare` wrote to `folder`: counts of samples, and lists of lines.

    Raises DataError where the report is damaged.
    """
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        return dict(report.items())
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> DataError:
    what = f"the tokenised data in it is damaged ({error})"
    return DataError([f"{folder}: {what}; delete the folder, it is made again"])


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
    return np.memmap(path, dtype, mode="r", shape=(count,)) if count else np.zeros(0, dtype)


def permutation(count: int, *seed: int) -> NDArray[np.int64]:
    """Return a permutation of `count` items that depends only on the seed.

    It uses raw bits, whose stream numpy guarantees over versions and machines, unlike that of
    numpy's Generator.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(bits, kind="stable")


class CorpusWriter:
    """A writer that appends samples to a folder under a temporary name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._samples = self._end = 0
        names = (TOKENS, LABELS, OFFSETS, ORIGINS)  # not in memory: there may be too many samples
        self._files = [(folder / name).open("wb") for name in names]
        self._files[2].write(np.int64(0).tobytes())

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        for file in self._files:
            file.close()

    def __len__(self) -> int:
        return self._samples

    def add(self, sample: Sample) -> None:
        self._samples += 1
        self._end += len(sample.ids)
        index = np.array([self._end, *sample.origin], np.int64)
        written: list[NDArray[Any]] = [sample.ids, sample.labels, index[:1], index[1:]]
        for to, values in zip(self._files, written, strict=True):
            to.write(values.tobytes())

    def finish(
        self, files: list[str], sources: list[SourceSpan], overlong: str, contents: str
    ) -> None:
        """Write the folder's metadata; the folder can then be opened."""
        for file in self._files:
            file.flush()
        meta = {
            "samples": len(self),
            "tokens": self._end,
            "files": files,
            "sources": [[s.first, s.stop, s.weight] for s in sources],
            "overlong": overlong,
            "contents": contents,
        }
        (self._folder / META).write_text(json.dumps(meta), encoding="utf-8")


# The cache: names of its folders, its size, and emptying it.

VERSION = 7  # raise it with every change that gives other tokens for the same data
SKIPPED = "skip, and read on, strings with a NUL or a byte-order mark too"
"""Which samples `skip` leaves out; part of the hash: change it when that changes."""
LAID_OUT = 2  # raise it when the files of a corpus store the same tokens in another format


def cache_key(
    data: DataBlock,
    parts: list[tuple[SourcePart, Record | None]],
    tokeniser: TextTokeniser | None,
    vocab_size: int,
) -> tuple[str, str]:
    """Return two hashes for the corpus of these parts: the name of its folder, and a name of its
    tokens that is the same wherever their files are.

    parts: each with its first record.
    """
    with ThreadPoolExecutor(data.workers or 1) as pool:
        digests = list(pool.map(lambda part: part[0].content.digest(), parts))
    cuts = data.overlong != "error"
    limits = [(source.max_samples, source.max_tokens) for source in data.train]
    identity = {
        "version": VERSION,
        "parts": [_part_identity(part, record) for part, record in parts],
        "contents": digests,
        "weights": [
            1.0 if source.weight is None else float(source.weight) for source in data.train
        ],
        **({"mixed by": "tokens"} if any(s.weight is not None for s in data.train) else {}),
        **({"limits": limits} if any(limit != (None, None) for limit in limits) else {}),
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
    """Return what changes the tokens of a file or split in addition to its contents."""
    kind = part.content.kind
    # Booleans, so that data keeps the name it had in an earlier version.
    how = {"text": True, "json": False, "hub": False}.get(kind, kind)
    found = [part.source, first and first.format, how]
    if part.content.eod is not None:
        found.append(part.content.eod)
    if part.asked.prompt:
        found.append(part.asked.prompt)
    return [*found, dict(sorted(part.asked.fields.items()))] if part.asked.fields else found


def hashed(value: Any) -> str:
    """Return a hash of a JSON value."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=12).hexdigest()


_WHOLE = re.compile(r"[0-9a-f]{24}")
_PARTIAL = re.compile(r"\.[0-9a-f]{24}\.[0-9a-f]{32}(\.partial)?")
"""The temporary name of a folder whose corpus is incomplete."""


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """Yield a new temporary folder to write into, which is renamed to `folder` at the end.

    Temporary folders that killed processes left there are deleted. Raises DataError.
    """
    around = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.iterdir():
            if _PARTIAL.fullmatch(left.name) and is_abandoned(left):
                shutil.rmtree(left, ignore_errors=True)
        # The temporary name is new, so that no other process has a lease on it.
        with Lease.take(around, lambda line: None).renewed():
            aside = around / folder.name
            aside.mkdir()
            yield aside
            try:
                publish(aside, folder)
            except OSError:
                # Another process was faster: the folder exists, with the same contents.
                if not (folder / META).exists():
                    raise
    except OSError as error:
        remedy = "name a folder with room that can be written"
        what = f"cannot write {folder.parent}: {error.strerror}"
        raise wrong_key("data.cache_dir", what, remedy) from error
    finally:
        shutil.rmtree(around, ignore_errors=True)


class CacheSize(NamedTuple):
    """Number and bytes of corpora, and how many of them are unfinished."""

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
    """Return the number and bytes of these corpora."""
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    unfinished = sum(bool(_PARTIAL.fullmatch(folder.name)) for folder in folders)
    return CacheSize(len(folders), sum(file.stat().st_size for file in files), unfinished)


def empty(cache_dir: Path) -> CacheSize:
    """Delete the corpora of a cache and temporary folders of killed processes; return their number
    and bytes.

    Corpora that are being written and other files stay. A run with an open corpus can go on using
    it. Raises OSError.
    """
    folders = corpora_in(cache_dir)
    left = list(cache_dir.iterdir()) if cache_dir.is_dir() else []
    folders += [path for path in left if _PARTIAL.fullmatch(path.name) and is_abandoned(path)]
    found = holding(folders)
    for folder in folders:
        shutil.rmtree(folder)
    return found
