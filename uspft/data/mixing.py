"""How much of each source is read, and how often an epoch takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.data.faults import wrong_key
from uspft.data.samples import Sample

if TYPE_CHECKING:
    from uspft.config.recipe import DataBlock, Source


@dataclass(frozen=True)
class SourceMix:
    """How many tokens of each source there are, and how many times an epoch takes them."""

    sources: tuple[Source, ...]
    tokens: list[int]
    times: list[float]

    def lines(self) -> list[str]:
        """Return a line for each source on its share of an epoch; none for a lone source."""
        if len(self.sources) == 1:
            return []
        epoch = [times * tokens for times, tokens in zip(self.times, self.tokens, strict=True)]
        whole = sum(epoch) or 1.0
        return [
            f"{source.title}: {share / whole:.1%} of an epoch, {tokens:,} tokens × {times:.4g}"
            for source, share, tokens, times in zip(
                self.sources, epoch, self.tokens, self.times, strict=True
            )
        ]


def mixed(sources: tuple[Source, ...], tokens: list[int]) -> SourceMix:
    """Return how often an epoch takes each source, so that its tokens have the share of its weight.

    An epoch has as many tokens as the sources together; without weights it takes each sample once.
    """
    given = [source.weight for source in sources]
    weights = [w if w is not None and n else 0.0 for w, n in zip(given, tokens, strict=True)]
    if not any(weights):
        return SourceMix(sources, tokens, [1.0] * len(sources))
    unit = sum(tokens) / sum(weights)
    # Rounded, so that a share that is the source's own is one, and an epoch like the next.
    times = [round(w * unit / n, 9) if n else 0.0 for w, n in zip(weights, tokens, strict=True)]
    return SourceMix(sources, tokens, times)


class Taken:
    """What has been taken of each source, and the sources of which that is all that is wanted."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.samples = [0] * len(sources)
        self.tokens = [0] * len(sources)
        self.full: set[int] = set()

    def fits(self, source: int, sample: Sample, data: DataBlock) -> bool:
        """Tell whether a sample is within max_tokens; if not, its source is full.

        Raises DataError where not even the first sample is within max_tokens.
        """
        wanted = self._sources[source]
        length = len(sample.ids)
        if data.overlong == "truncate":
            length = min(length, data.sequence_length)
        long = wanted.max_tokens is not None and self.tokens[source] + length > wanted.max_tokens
        if long and not self.samples[source]:
            key = "data.train" if len(self._sources) == 1 else f"data.train[{source}]"
            what = f"is {wanted.max_tokens:,}, and the first sample has {length:,} tokens"
            raise wrong_key(f"{key}.max_tokens", what, "write more, or leave it out")
        if long:
            self.full.add(source)
        return not long

    def add(self, source: int, tokens: int) -> None:
        """Count a sample; where no more is wanted behind it, its source is full."""
        self.samples[source] += 1
        self.tokens[source] += tokens
        if self.samples[source] == self._sources[source].max_samples:
            self.full.add(source)
