"""Evaluation data where there is none: a share of the samples that is held out of training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from uspft.config.problems import counted
from uspft.data.corpus.cache import hashed, made_aside
from uspft.data.corpus.corpus import REPORT, Corpus, CorpusWriter, SourceSpan, read_report
from uspft.data.corpus.counts import Counts, mixed
from uspft.data.faults import wrong_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.config import Recipe
    from uspft.config.recipe import DataBlock

KEY = "data.eval_fraction"
_TOLD = ("shapes", "unused", "skipped", "untrained")
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
        of = counted(len(corpus), "sample")
        what = f"is {fraction:g}, which of {of} holds out {count:,}"
        raise wrong_key(KEY, what, "write another fraction, or name evaluation data in data.eval")
    # Raw bits: numpy guarantees their stream over versions and machines.
    bits = np.random.Philox(np.random.SeedSequence((recipe.seed, count))).random_raw(len(corpus))
    held = np.zeros(len(corpus), bool)
    held[np.argsort(bits, kind="stable")[:count]] = True
    whole = read_report(folder)
    found = []
    for part, chosen in (("trained", ~held), (HELD_OUT, held)):
        named = [folder.name, fraction, recipe.seed, part, recipe.data.sequence_length, "mixed"]
        place = folder.with_name(hashed(named))
        if not place.exists():
            more = {**whole, "held_out": count} if part != HELD_OUT else {}
            _copy(corpus, np.flatnonzero(chosen), place, recipe.data, more)
        found.append(place)
    return found[0], found[1]


def _copy(
    corpus: Corpus, samples: NDArray[np.int64], place: Path, data: DataBlock, whole: dict[str, Any]
) -> None:
    """Write these samples of a corpus, in their order, as a corpus of their own.

    whole: what the report says of all that was read, with how many are held out; empty for these.
    """
    lost = {name: whole.get(name, 0) for name in ("bad", "dropped", "held_out")}
    counts = Counts(truncated=whole.get("truncated", 0), bad=lost["bad"], dropped=lost["dropped"])
    lengths = []
    with made_aside(place) as aside, CorpusWriter(aside) as writer:
        for index in samples:
            sample = counts.kept(corpus.sample(int(index)), corpus.overlong, data.sequence_length)
            assert sample is not None  # what is dropped was dropped before
            writer.add(sample)
            lengths.append(len(sample.ids))
        if not counts.target_tokens:
            what = f"leaves {len(samples):,} samples without a trained token on one side"
            raise wrong_key(KEY, what, "write another fraction, or another seed")
        bounds = [np.searchsorted(samples, (s.first, s.stop)).tolist() for s in corpus.sources]
        # An epoch has the weights' shares of what is trained, whichever samples that is without.
        mix = mixed(data.train, [sum(lengths[first:stop]) for first, stop in bounds])
        spans = [
            SourceSpan(first, stop, times)
            for (first, stop), times in zip(bounds, mix.times, strict=True)
        ]
        contents = hashed([corpus.contents, samples.tolist()])
        writer.finish(list(corpus.files), spans, corpus.overlong, contents)
        report: dict[str, Any] = {
            **asdict(counts),
            "read": counts.samples + sum(lost.values()),
            "held_out": lost["held_out"],
            "notes": counts.notes(),
            **({"mix": mix.lines()} if whole else {}),
            **{name: whole[name] for name in _TOLD if name in whole},
        }
        (aside / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")
