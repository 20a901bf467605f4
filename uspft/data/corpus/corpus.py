"""Tokenised samples in a folder, written once and then mapped into memory by every rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from uspft.data.faults import DataError
from uspft.data.samples import Origin, Sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

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

    tokens, labels: int32, mapped and read-only; labels are not shifted, and -100 marks what is not
    trained, which the first token of each sample never is. offsets: int64, one more than there are
    samples. origins: int64 [samples, 3], the Origin of each.
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int64]
    origins: NDArray[np.int64]
    files: tuple[str, ...]
    sources: tuple[SourceSpan, ...]
    overlong: str
    contents: str
    """A name for the tokens: equal tokens have equal names, wherever their files lay."""

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
        """Return the place that a sample was read from, as faults of the data name it."""
        origin = Origin(*self.origins[sample].tolist())
        return origin.place(self.files[origin.file])

    def sample(self, index: int) -> Sample:
        """Return one sample."""
        first, stop = self.offsets[index : index + 2].tolist()
        origin = Origin(*self.origins[index].tolist())
        return Sample(self.tokens[first:stop], self.labels[first:stop], origin)


def read_report(folder: Path) -> dict[str, Any]:
    """Return what `prepare` wrote to `folder` about the samples: counts, and lists of lines.

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


class CorpusWriter:
    """A writer that appends samples to a folder which no reader knows yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._samples = self._end = 0
        names = (TOKENS, LABELS, OFFSETS, ORIGINS)  # none in memory: there may be too many samples
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
        """Write the description of the folder, which can then be opened."""
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
