"""What is simulated: models, rows, ZeRO's stage and links, and the layouts that may be chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.lab.results import ROOT
from benchmarks.switching.simulation.lengths import CORPORA, LIBRARY, Shape, lengths
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.machine import Hardware, read_hardware
from uspft.planner.options import Options
from uspft.planner.step_shape import StepShape
from uspft.segments import Segments
from uspft.switching.choose.choice import SwitchingChoice, choose
from uspft.switching.choose.drawn_steps import DrawnSteps
from uspft.switching.choose.priced import Setting

A800 = read_hardware(ROOT / "configs" / "hardware" / "a800.yaml")
SAMPLES = 512
"""Samples of a step, HotSPa's."""


def _llama(layers: int, hidden: int, heads: int, inner: int) -> ModelShape:
    """A LLaMA-2 by its public sizes: every head has its keys."""
    sizes = (hidden, layers, heads, heads, hidden // heads, inner, 32_000, 4096)
    return ModelShape("llama", *sizes, None, False, False, {})


MODELS = {
    "LLaMA-2 7B": _llama(32, 4096, 32, 11_008),
    "LLaMA-2 13B": _llama(40, 5120, 40, 13_824),
}

WAYS: Mapping[str, Callable[[Layout], bool]] = {
    "matrices alone": lambda layout: layout.context == 1,
    "matrices and stages": lambda layout: layout.context == 1,
    "Ulysses alone": lambda layout: layout.ring == 1 and layout.tensor == 1,
    "any layout": lambda layout: True,
}
"""Among which layouts one is chosen, or a mix: HotSPa's world without pipelines and with them,
FlexSP's, ours."""
STAGED = "matrices and stages"
"""The way whose layouts may have stages."""


@dataclass(frozen=True)
class Case:
    """A model on some ranks of a cluster, with a corpus cut at the longest row."""

    model: str
    corpus: Shape
    row_tokens: int
    stage: int
    ranks: int = 32
    memory_bytes: float = 80e9
    between: float = 1.0
    """The links between hosts, as a share of the file's."""
    recompute: bool = False

    @property
    def hardware(self) -> Hardware:
        links = A800.between
        rates = {
            name: rate * self.between
            for name in ("bytes_per_second", "host_bytes_per_second")
            if (rate := getattr(links, name)) is not None
        }
        return A800.model_copy(update={"between": links.model_copy(update=rates)})

    @property
    def setting(self) -> Setting:
        model, row = MODELS[self.model], Segments.single(self.row_tokens)
        options = Options(
            step_rows=SAMPLES,
            zero_stage=self.stage,
            overlaps=self.stage == 3,
            checkpointing=self.recompute,
            use_seq_parallel=True,
        )
        step = StepShape(model, row, options)
        return Setting(step, self.hardware, self.ranks, self.memory_bytes)

    @property
    def drawn(self) -> DrawnSteps:
        return DrawnSteps(lengths(self.corpus, self.row_tokens), SAMPLES, self.row_tokens)

    def chosen(self, way: str) -> SwitchingChoice:
        """This chooses among the layouts of one way."""
        stages = None if way == STAGED else (1,)
        return choose(replace(self.setting, stages=stages, among=WAYS[way]), self.drawn)


PAPERS = tuple(
    Case(model, corpus, 32_768, stage) for model in MODELS for corpus in CORPORA for stage in (1, 3)
)
"""HotSPa's rows on 32 GPUs, four hosts of eight, nothing recomputed; tokens are split between
matrices."""
LIBRARIES = tuple(Case(model, LIBRARY, 32_768, 1) for model in MODELS)
"""The same rows of Python's standard library."""
LONG = tuple(Case("LLaMA-2 7B", corpus, 131_072, 3, recompute=True) for corpus in CORPORA)
"""Longer rows, as FlexSP has them."""
SEARCHED = tuple(
    Case("LLaMA-2 7B", CORPORA[1], 32_768, stage, 16, memory, between)
    for stage in (1, 3)
    for memory in (48e9, 56e9, 64e9, 80e9)
    for between in (1.0, 1 / 8, 1 / 64)
)
"""Memory and links, among which a mix that beats every static layout is searched for."""
