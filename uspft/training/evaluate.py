"""Evaluation: the loss of whole data sets in the layout of training, whose state it leaves as it
was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uspft.comm import total

if TYPE_CHECKING:
    from uspft.assemble import EvalSet
    from uspft.engine.step import Engine


@dataclass(frozen=True)
class Score:
    """The cross-entropy of target tokens summed over rows and ranks, and their number."""

    loss_sum: float = 0.0
    targets: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(self.loss_sum + other.loss_sum, self.targets + other.targets)

    @property
    def loss(self) -> float:
        return self.loss_sum / self.targets

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    engine: Engine, sets: Sequence[EvalSet], stop: Callable[[], bool]
) -> dict[str, Score] | None:
    """Return the score of each set by title, or None where a rank asked to stop before the end;
    collective.

    stop: asked on every rank in each pass. Every rank takes equally many passes, with empty rows
    among them where a set runs out.
    """
    scores = {}
    with engine.evaluating():
        for one in sets:
            score = _score(engine, one, stop)
            if score is None:
                return None
            scores[one.title] = score
    return scores


def _score(engine: Engine, one: EvalSet, stop: Callable[[], bool]) -> Score | None:
    everyone, device = engine.holders.everyone, engine.device
    score = Score()
    for number in range(1, one.passes + 1):
        (batch,) = one.loader.batches(number)
        if number == 1:
            one.loader.require_same_rows([batch])
            one.loader.require_shares([batch])
        loss, first = engine.loss_sum(batch), batch.world.mesh.counts
        here = [loss if first else 0.0, batch.targets if first else 0, float(stop())]
        loss_sum, targets, stops = total(here, everyone, device)
        if stops:
            return None
        score += Score(loss_sum, int(targets))
    return score


def record_of(step: int, scores: dict[str, Score], seconds: float) -> dict[str, Any]:
    """Return the line of metrics.jsonl for an evaluation; where there are several sets, each also
    stands in it by itself."""
    whole = sum(scores.values(), Score())
    record: dict[str, Any] = {
        "step": step,
        "eval_loss": _finite(whole.loss),
        "eval_perplexity": _finite(whole.perplexity),
        "eval_target_tokens": whole.targets,
        "eval_seconds": seconds,
    }
    if len(scores) > 1:
        record["eval_sets"] = {
            title: {
                "loss": _finite(score.loss),
                "perplexity": _finite(score.perplexity),
                "target_tokens": score.targets,
            }
            for title, score in scores.items()
        }
    return record


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other number
