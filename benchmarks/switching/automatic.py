"""What `strategies: auto` takes, and HotSPa's own example of a switch, timed beside the best static
layouts by prediction."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.switching.contenders import CHOSEN, STATIC, Contender
from benchmarks.switching.corpus import even
from benchmarks.switching.predicted import choice_of
from uspft.prepare.examine import Examined
from uspft.switching.choose.choice import SwitchingChoice
from uspft.switching.choose.priced import PricedLayout

BESIDE = 4
"""How many static layouts are timed, those of the least predicted seconds."""

ALONE = "alone"
"""The end of a static layout's name."""


STAGED = {"model_parallel": 2, "use_seq_parallel": True, "pipeline_stage": 2}
HOTSPA = "HotSPa: tensor 2 × stages 2, data 4, tensor 2 × data 2"
"""Its example on four ranks: of the longest rows, of those up to a quarter, and up to a half."""


def hotspa(found: Examined, hardware: Path, lengths: tuple[int, ...]) -> dict[str, Contender]:
    """Return HotSPa's example, and what is timed beside it: each of its layouts alone, and the
    static layouts without stages that are predicted to take least."""
    tensor = {key: STAGED[key] for key in ("model_parallel", "use_seq_parallel")}
    static = choice_of(found, hardware, lengths).static
    return {
        HOTSPA: Contender(CHOSEN, "stages", {4: {}, 2: tensor, 1: STAGED}, moves=True),
        f"tensor2-pipeline2 {ALONE}": Contender(STATIC, "stages", {1: STAGED}, moves=True),
        f"tensor2-data2 {ALONE}": Contender(STATIC, "tensor2-data2", {1: tensor}),
        f"data4 {ALONE}": Contender(STATIC, "data4", {1: {}}),
        **_each([one.priced for one in static if one.seconds is not None]),
    }


class Taken(NamedTuple):
    """What was taken on a corpus, why, and the contenders that are timed for it."""

    takes: str
    why: str
    timed: dict[str, Contender]


def corpora(lengths: tuple[int, ...], longest: int) -> dict[str, tuple[int, ...]]:
    """Return the samples of a step of each corpus: as given, and as many tokens in samples that are
    all alike."""
    return {"long tail": lengths, "no tail": tuple(even(sum(lengths), longest // 8))}


def taken(found: Examined, hardware: Path, lengths: tuple[int, ...]) -> Taken:
    """Return what `strategies: auto` takes of samples where ranks have the memory that a recipe of
    one layout needs, and what is to be timed beside it."""
    choice = choice_of(found, hardware, lengths)
    static = [one.priced for one in choice.static if one.seconds is not None]
    if not (choice.switches and choice.layouts):
        return Taken(_alone(static[0]), choice.why, _each(static))
    return Taken(_named(choice), choice.why, {_named(choice): _chosen(choice), **_each(static)})


def _alone(one: PricedLayout) -> str:
    return f"{one.name} {ALONE}"


def _each(static: list[PricedLayout]) -> dict[str, Contender]:
    return {_alone(one): Contender(STATIC, one.name, {1: one.keys}) for one in static[:BESIDE]}


def _named(choice: SwitchingChoice) -> str:
    assert choice.layouts
    rows = ", ".join(f"{one.length} {one.name}" for one in choice.layouts.buckets)
    return f"{rows}; moving" if choice.layouts.moves else rows


def _chosen(choice: SwitchingChoice) -> Contender:
    assert choice.layouts
    buckets = choice.layouts.buckets
    longest = max(one.length for one in buckets)
    strategies = {longest // one.length: one.keys for one in buckets}
    return Contender(CHOSEN, "auto", strategies, moves=choice.layouts.moves)
