"""What ZeRO moves of a model with experts, which fewer ranks hold where they are divided, beside
what their dispatch sends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.algorithms import named
from tests.support.hardware import H100, made
from tests.support.shapes import hub
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.expert_traffic import crossover_tokens, token_cost
from uspft.planner.machine import Hardware
from uspft.planner.products import expert_parameters, parameters_of
from uspft.planner.step import step_time
from uspft.planner.step_shape import StepShape, StepTime
from uspft.segments import Segments

QWEN = hub("Qwen/Qwen3-30B-A3B")
LINE = {"launch_seconds": 0.0, "hop_seconds": 0.0, "bytes_per_second": 1e9}


def timed(layout: Layout, hardware: Hardware, tokens: int, stage: int = 3) -> StepTime:
    step = StepShape(QWEN, Segments.single(tokens), (None,) * QWEN.layers, layout.data, stage=stage)
    return step_time(step, layout, named("whole", 1, 1), hardware)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_divided_experts_a_part_moves(stage: int) -> None:
    """Of every parameter 4 bytes of gradient, and 2 of weight, twice at stage 3."""
    outside, layers, experts, _ = parameters_of(QWEN)
    rest = outside + layers - experts
    assert experts == QWEN.layers * expert_parameters(QWEN) == 48 * 3 * 128 * 2048 * 768
    for degree in (1, 2, 4):
        found = timed(Layout(data=8, experts=degree), H100, 4096, stage)
        here = rest + experts / degree
        assert found.bytes_of("gradients") == pytest.approx(4 * here, rel=1e-6)
        times = 4 if stage == 3 else 2
        assert found.bytes_of("weights") == pytest.approx(times * here, rel=1e-6)
        alone = timed(Layout(data=8), H100, 4096, stage)
        assert found.of("update") == pytest.approx(alone.of("update")), "each rank owns as much"
        assert (found.bytes_of("experts") > 0) == (degree > 1)
    whole = timed(Layout(data=8, experts=8), H100, 4096, stage)
    assert whole.bytes_of("weights") == pytest.approx(times * rest, rel=1e-6), "no one has the same"


def test_dispatch_takes_as_long_as_it_spares_at_the_crossover(tmp_path: Path) -> None:
    """On links of one rate, of which nothing is hidden: below it experts are best divided."""
    line = made(tmp_path, inside=LINE, between=LINE, ranks_per_host=8)
    for degree in (2, 4, 8):
        token = token_cost(QWEN, 2, degree, forwards=2)
        tokens = crossover_tokens(QWEN, degree, 2 * 2 + 4, token)

        def moved(layout: Layout, share: float, tokens: float = tokens) -> float:
            found = timed(layout, line, round(share * tokens))
            return found.of("experts", "weights", "gradients")

        local, divided = Layout(data=8), Layout(data=8, experts=degree)
        assert moved(divided, 1.0) == pytest.approx(moved(local, 1.0), rel=1e-3)
        assert moved(divided, 0.97) < moved(local, 0.97)
        assert moved(divided, 1.03) > moved(local, 1.03)


def test_matrices_of_many_experts_are_read_for_few_tokens() -> None:
    few, dense = 64, replace(QWEN, raw={**QWEN.raw, "num_experts": 8})
    model: ModelShape
    for model, experts in ((QWEN, 128), (dense, 8)):
        step = StepShape(model, Segments.single(few), (None,) * 48, 1, recompute=False)
        found = step_time(step, Layout(), named("whole", 1, 1), H100)
        read = 3 * 48 * 2 * expert_parameters(model) / H100.memory.bytes_per_second
        assert found.of("products") > read
        assert expert_parameters(model) == 3 * experts * 2048 * 768
