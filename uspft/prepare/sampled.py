"""Rows of a recipe's data, as far as it is here, by which a plan prices attention."""

from __future__ import annotations

from uspft.config import Recipe
from uspft.data import first_look, prepared, training_rows
from uspft.planner.attention_work import DrawnRows
from uspft.prepare.data import cache_of, tokenizer_here, tokenizer_of
from uspft.prepare.examine import Examined
from uspft.prepare.invocation import Invocation
from uspft.prepare.weigh_strategies import documents_of
from uspft.segments import Segments
from uspft.switching.buckets import rows_of_samples
from uspft.switching.drawn_steps import segments_of

ROWS = 64
"""Rows that are looked at."""
MOST_SAMPLES = 1 << 14
"""Samples that are packed, where the first records are to fill rows."""


def sample_of(found: Examined, place: Invocation) -> DrawnRows | None:
    """Return rows of the data: those of a run where a command has tokenised it before, else rows
    packed of the first records; None where neither is here. Nothing is written. Raises DataError.
    """
    recipe = found.here
    if found.shape is None:
        return None
    vocabulary = found.shape.vocab_size
    with tokenizer_here(recipe) as tokenizer:
        if tokenizer is not None or not tokenizer_of(recipe):
            corpus = prepared(recipe.data, tokenizer, vocabulary, cache_of(recipe, place))
            if corpus:
                stream = training_rows(recipe.data, corpus, recipe.seed)
                rows = _spread(range(stream.rows_in_epoch(0)))
                segments = tuple(stream.row(number).segments for number in rows)
                return DrawnRows(segments, "the data") if segments else None
        lengths = first_look(recipe.data, tokenizer, vocabulary).lengths
    packed = _packed(recipe, documents_of(recipe, lengths))
    return DrawnRows(packed, "the first records") if packed else None


def _packed(recipe: Recipe, lengths: list[int]) -> tuple[Segments, ...]:
    """Return rows of samples of these lengths, packed as the recipe says; few samples come often
    enough to fill rows."""
    data = recipe.data
    if lengths and data.packing == "best_fit":
        often = -(-ROWS * data.sequence_length // sum(lengths))
        lengths = lengths * min(often, -(-MOST_SAMPLES // len(lengths)))
    rows = rows_of_samples(dict(enumerate(lengths)), (data.sequence_length,), data.packing)
    chosen = (rows[number] for number in _spread(range(len(rows))))
    return tuple(
        segments_of([lengths[place] for place in row.samples], data.sequence_length)
        for row in chosen
    )


def _spread(numbers: range) -> list[int]:
    """Return ROWS of so many numbers, or all, evenly spread."""
    count = min(ROWS, len(numbers))
    return [numbers[place * len(numbers) // count] for place in range(count)]
