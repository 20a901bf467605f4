"""Published runs (tables.json), and what the planner's price says of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from uspft.config.algorithms import CONTEXT, WHOLE
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.attention_step import attention_one_way
from uspft.planner.machine import Hardware
from uspft.planner.options import Options
from uspft.planner.step import step_time
from uspft.planner.step_shape import PlacedStep, StepShape, seconds_of
from uspft.segments import Segments
from uspft.sequence import make_algorithm

TABLES: Mapping[str, Any] = json.loads((Path(__file__).parent / "tables.json").read_text())


class Block(NamedTuple):
    """Runs of which only the layout differs, whose order is judged."""

    table: str
    tokens: int
    rows: int


@dataclass(frozen=True)
class Run:
    """A published run: a step under a layout, or one forward of attention where `whole` is not
    set."""

    block: Block
    step: StepShape
    layout: Layout
    seconds: float
    """As measured."""
    whole: bool

    @property
    def name(self) -> str:
        return self.layout.name("hybrid_cp")

    def predicted(self, hardware: Hardware) -> float:
        """Return the planner's seconds."""
        layout = self.layout
        row = CONTEXT["hybrid_cp"] if layout.context > 1 else WHOLE
        algorithm = make_algorithm(row, layout.ulysses, layout.ring)
        placed = PlacedStep(self.step, layout, hardware, algorithm)
        return step_time(placed).seconds if self.whole else seconds_of(attention_one_way(placed))


def runs(*tables: str) -> list[Run]:
    """Return the runs of tables."""
    return [run for table in tables for run in _runs(table)]


@cache
def _runs(name: str) -> tuple[Run, ...]:
    table = TABLES["tables"][name]
    return tuple(_steps(name, table) if "model" in table else _forwards(name, table))


def _steps(name: str, table: Mapping[str, Any]) -> Iterator[Run]:
    model = model_of(table["model"])
    for row in table["rows"]:
        step = StepShape(
            model,
            Segments.single(row["tokens"]),
            Options(step_rows=row["rows"], checkpointing=False, use_seq_parallel=row["tensor"] > 1),
            scatters=True,
        )
        layout = Layout(row["tensor"], row["ulysses"], row["ring"], row["data"])
        yield Run(Block(name, row["tokens"], row["rows"]), step, layout, row["seconds"], True)


def _forwards(name: str, table: Mapping[str, Any]) -> Iterator[Run]:
    for row in table["rows"]:
        sizes = (row["heads"], row["kv_heads"], row["head_dim"])
        model = _model(row["heads"] * row["head_dim"], 1, sizes, 1, 1)
        options = Options(step_rows=row["rows"], micro_batch=row["rows"])
        step = StepShape(model, Segments.single(row["tokens"]), options)
        layout = Layout(1, row["ulysses"], row["ring"])
        yield Run(Block(name, row["tokens"], row["rows"]), step, layout, 1 / row["a_second"], False)


def model_of(name: str) -> ModelShape:
    """Return a model of the tables."""
    sizes = TABLES["models"][name]
    heads = (sizes["heads"], sizes["kv_heads"], sizes["head_dim"])
    return _model(sizes["hidden"], sizes["layers"], heads, sizes["inner"], sizes["vocabulary"])


def _model(
    hidden: int, layers: int, heads: tuple[int, int, int], inner: int, vocabulary: int
) -> ModelShape:
    return ModelShape(
        "llama", hidden, layers, *heads, inner, vocabulary, 1 << 20, None, False, False, {}
    )
