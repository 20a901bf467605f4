"""Evaluation data where there is none: a share of the samples that is held out of training."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from uspft.data.cache import made_aside
from uspft.data.corpus import REPORT, Corpus, CorpusWriter, SourceSpan, read_report
from uspft.data.counts import Counts
from uspft.data.faults import wrong_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.config import Recipe

KEY = "data.eval_fraction"
HELD_OUT = "held out"
"""The title of the samples that are evaluated on."""


def hold_out(folder: Path, recipe: Recipe) -> tuple[Path, Path]:
    """Return the folders of the samples that are trained on and of those that are held out.

    folder: the prepared data. Both are made beside it where they are missing. Which samples are
    held out depends on the seed and on the number of samples alone. Raises DataError where one of
    the two has no trained token.
    """
    corpus, fraction = Corpus.open(folder), recipe.data.eval_fraction or 0.0
    count = round(fraction * len(corpus))
    if not 0 < count < len(corpus):
        what = f"is {fraction:g}, which of {len(corpus):,} samples holds out {count:,}"
        raise wrong_key(KEY, what, "write another fraction, or name evaluation data in data.eval")
    # Raw bits: numpy guarantees their stream over versions and machines.
    bits = np.random.Philox(np.random.SeedSequence((recipe.seed, count))).random_raw(len(corpus))
    held = np.zeros(len(corpus), bool)
    held[np.argsort(bits, kind="stable")[:count]] = True
    whole = read_report(folder)
    found = []
    for part, chosen in (("trained", ~held), (HELD_OUT, held)):
        words = json.dumps([folder.name, fraction, recipe.seed, part, recipe.data.sequence_length])
        place = folder.with_name(hashlib.blake2b(words.encode(), digest_size=12).hexdigest())
        if not place.exists():
            lost = {name: whole.get(name, 0) for name in ("bad", "dropped")} | {"held_out": count}
            more = lost if part != HELD_OUT else {}
            _copy(corpus, np.flatnonzero(chosen), place, recipe.data.sequence_length, more)
        found.append(place)
    return found[0], found[1]


def _copy(
    corpus: Corpus, samples: NDArray[np.int64], place: Path, row: int, lost: dict[str, int]
) -> None:
    """Write these samples of a corpus, in their order, as a corpus of their own.

    lost: the counts of samples that were read and are not trained on, for the report.
    """
    counts = Counts()
    with made_aside(place) as aside, CorpusWriter(aside) as writer:
        for index, (file, line) in zip(samples, corpus.origins[samples].tolist(), strict=True):
            sample = counts.kept(corpus.sample(int(index)), corpus.overlong, row)
            assert sample is not None  # what is dropped was dropped before
            writer.add(sample, file, line)
        if not counts.target_tokens:
            what = f"leaves {len(samples):,} samples without a trained token on one side"
            raise wrong_key(KEY, what, "write another fraction, or another seed")
        spans = []
        for span in corpus.sources:
            first, stop = np.searchsorted(samples, (span.first, span.stop)).tolist()
            spans.append(SourceSpan(first, stop, span.weight))
        words = json.dumps([corpus.contents, samples.tolist()])
        contents = hashlib.blake2b(words.encode(), digest_size=12).hexdigest()
        writer.finish(list(corpus.files), spans, corpus.overlong, contents)
        read = counts.samples + sum(lost.values())
        report = {**asdict(counts), **lost, "read": read, "notes": counts.notes()}
        (aside / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")
