"""What `inspect` shows, as values: the first rows, which ranks have which tokens of them, and a
histogram of sample lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from uspft.config.strategies import strategies_of
from uspft.data.corpus.corpus import Corpus
from uspft.data.rows.stream import Row, RowStream, training_rows
from uspft.layout import Layout
from uspft.prepare.make_plan import chunk_prices_of
from uspft.segments import Segments
from uspft.sequence import cut_of, of_recipe
from uspft.sequence.chunked import Chunked, Cut
from uspft.sequence.rows.spans import Span, tokens_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.config import Recipe
    from uspft.prepare.examine import Examined

Decode = Callable[[list[int]], str]
"""A decoder from token ids to text."""

_COUNTED_ROWS = 10_000
_NOT_TRAINED = -100


class Stretch(NamedTuple):
    """A run of neighbouring tokens of one document, which all train or all do not."""

    first: int
    """The position of the first token in the row."""
    ids: list[int]
    trained: bool
    decode: Decode

    def ends(self, head: int, tail: int) -> tuple[list[int], list[int]]:
        """Return the tokens to show: the first `head` and last `tail` ones if there are more, else
        all, and none."""
        if len(self.ids) <= head + tail:
            return self.ids, []
        return self.ids[:head], self.ids[-tail:]


@dataclass(frozen=True)
class SeenDocument:
    """A document of a row: its origin, its position, and its tokens."""

    origin: str
    span: Span
    runs: list[Stretch]

    @property
    def targets(self) -> int:
        return sum(len(run.ids) for run in self.runs if run.trained)


class HeldPart(NamedTuple):
    """Ranks that have the same positions of a row, and these positions in their order."""

    ranks: list[int]
    spans: tuple[Span, ...]
    targets: int

    @property
    def tokens(self) -> int:
        return tokens_in(self.spans)


@dataclass(frozen=True)
class SeenRow:
    """A row as the model sees it."""

    index: int
    step: int
    layout: str
    """The layout and its algorithm as a phrase."""
    segments: Segments
    trained: NDArray[np.bool_]
    """Which positions of the row have a token that trains."""
    documents: list[SeenDocument]
    holders: list[HeldPart]

    @property
    def padding(self) -> int:
        return self.segments.length - self.segments.bounds[-1]


class Bin(NamedTuple):
    """How many samples have from `least` to `most` tokens, and their tokens together."""

    least: int
    most: int
    samples: int
    tokens: int


class Filling(NamedTuple):
    """How full the first rows of an epoch are."""

    rows: int
    """All rows of the epoch."""
    counted: int
    tokens: int
    """Tokens in the counted rows, without padding."""
    row_tokens: int

    @property
    def share(self) -> float:
        return self.tokens / (self.counted * self.row_tokens)


@dataclass(frozen=True)
class Inspection:
    """What `inspect` shows beyond the messages of preparing the data."""

    lengths: list[Bin]
    filling: Filling | None
    """None where rows are made from samples inside each step (`strategies`)."""
    rows: list[SeenRow]


def inspected(found: Examined, count: int, decode: Decode) -> Inspection:
    """Return the lengths of samples, how full rows are, and the first `count` rows of the first
    epoch.

    decode: from token ids to text.
    """
    recipe, whole = found.recipe, Corpus.open(found.corpus)
    switches = bool(strategies_of(recipe))
    stream = training_rows(recipe.data, found.corpus, recipe.seed, one_document=switches)
    every, filling, ways = stream.rows_in_epoch(0), None, _ways(found)
    if not switches:
        counted = min(every, _COUNTED_ROWS)
        tokens = sum(map(stream.tokens_of, range(counted)))
        filling = Filling(every, counted, tokens, recipe.data.sequence_length)
    shown = range(min(count, every))
    rows = [_seen(recipe, ways, whole, stream, index, decode) for index in shown]
    return Inspection(bins(whole.lengths), filling, rows)


def bins(lengths: NDArray[np.int64]) -> list[Bin]:
    """Return the samples by length, in powers of two, from the shortest to the longest."""
    powers = np.frexp(lengths.astype(np.float64))[1] - 1  # exact, unlike a logarithm
    found = []
    for power in range(int(powers.min()), int(powers.max()) + 1):
        inside = lengths[powers == power]
        found.append(Bin(1 << power, (2 << power) - 1, len(inside), int(inside.sum())))
    return found


class _Way(NamedTuple):
    """A layout for rows of one length, with the recipe of these rows."""

    length: int
    recipe: Recipe
    layout: Layout
    cut: Cut | None = None
    """How rows are cut into chunks, if they pass through pipeline stages in chunks."""

    def order(self, row: Segments) -> list[tuple[Span, ...]]:
        """Return the positions that each context rank has."""
        algorithm = of_recipe(self.recipe, self.layout)
        return (Chunked(algorithm, self.cut) if self.cut else algorithm).token_order(row)


def _ways(found: Examined) -> list[_Way]:
    recipe, layout = found.recipe, found.layout
    if not strategies_of(recipe):
        prices = chunk_prices_of(found) if found.shape else None
        cut = cut_of(recipe.parallel_config, layout, prices)
        return [_Way(recipe.data.sequence_length, recipe, layout, cut)]
    return [_Way(alone.data.sequence_length, alone, own) for alone, own in found.each_layout]


def _seen(
    recipe: Recipe,
    ways: Sequence[_Way],
    corpus: Corpus,
    stream: RowStream,
    index: int,
    decode: Decode,
) -> SeenRow:
    size = stream.tokens_of(index)
    way = ways[0] if len(ways) == 1 else ways[bisect_left([w.length for w in ways], size)]
    row = stream.row_of([index], way.length)
    trained = np.zeros(way.length, bool)
    trained[1:] = row.labels[:-1] != _NOT_TRAINED  # labels are the next tokens
    training = recipe.training
    step, number = divmod(index, training.global_batch_size)
    replica = number // training.micro_batch_size % way.layout.data
    return SeenRow(
        index,
        step + 1,
        way.layout.sentence(way.recipe.parallel_config.context_parallel_algo),
        row.segments,
        trained,
        _documents(row, corpus, trained, decode),
        _holders(way, row, replica),
    )


def _documents(
    row: Row, corpus: Corpus, trained: NDArray[np.bool_], decode: Decode
) -> list[SeenDocument]:
    found = []
    for span, sample in zip(row.segments, row.samples, strict=True):
        places = groupby(range(*span), lambda place: bool(trained[place]))
        runs = []
        for trains, group in places:
            inside = list(group)
            ids = row.input_ids[inside[0] : inside[-1] + 1].tolist()
            runs.append(Stretch(inside[0], ids, trains, decode))
        found.append(SeenDocument(corpus.origin(sample), span, runs))
    return found


def _holders(way: _Way, row: Row, replica: int) -> list[HeldPart]:
    """Return which ranks have which positions of a row of this replica."""
    layout = way.layout
    places = [layout.coordinates(rank) for rank in range(layout.ranks)]
    found = []
    for number, spans in enumerate(way.order(row.segments)):
        ring, ulysses = divmod(number, layout.ulysses)
        mine = {"ring": ring, "ulysses": ulysses, "data": replica}
        ranks = [rank for rank, at in enumerate(places) if mine.items() <= at.items()]
        targets = sum(int((row.labels[a:b] != _NOT_TRAINED).sum()) for a, b in spans)
        found.append(HeldPart(ranks, tuple(spans), targets))
    return found


def texts_of(ids: Sequence[int], decode: Decode) -> list[tuple[str, int]]:
    """Return the texts of tokens, each with its number of tokens: several if they share the bytes
    of a character."""
    found: list[tuple[str, int]] = []
    waiting: list[int] = []
    for one in ids:
        waiting.append(one)
        text = decode(waiting)
        if "\ufffd" not in text or len(waiting) == 4:
            found.append((text, len(waiting)))
            waiting = []
    return [*found, (decode(waiting), len(waiting))] if waiting else found
