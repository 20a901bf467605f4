"""The planner's price beside published runs, and USP's seven tips (arXiv 2405.07719, section 4)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.planning.cases import TABLES, model_of, runs
from benchmarks.planning.fit import with_figures
from benchmarks.planning.judge import score
from benchmarks.planning.ran import CARD_BYTES, USABLE_SHARE, bytes_of, verdicts
from benchmarks.planning.trials import Outcome, outcomes, shipped
from tests.support.algorithms import named
from tests.support.steps import changed, step_of
from uspft.config.algorithms import CONTEXT
from uspft.layout import AXES, Layout
from uspft.planner.machine import Hardware
from uspft.planner.memory.formula import longest_row
from uspft.planner.options import Options
from uspft.planner.step import step_time
from uspft.planner.step_shape import PlacedStep, StepTime

KIB = 1 << 10
LLAMA_2, LLAMA_3 = model_of("llama2-7b"), model_of("llama3-8b")
PLAIN = Options(CONTEXT["hybrid_cp"], checkpointing=False)
"""The options of the paper's program."""
A800, L20 = shipped("a800"), shipped("l20")


@cache
def found() -> dict[str, Outcome]:
    return {one.trial.name: one for one in outcomes()}


@pytest.mark.parametrize(
    ("trial", "right", "pairs", "regret", "error"),
    [
        ("L20", 16, 16, 1.01, 0.15),
        ("A100, NVLink", 3, 3, 1.07, 1.0),
        ("A800", 17, 17, 1.02, 0.15),
        ("A800, one rate", 58, 61, 1.02, 0.15),
        ("A800, fitted", 32, 32, 1.01, 0.05),
    ],
)
def test_the_order_of_published_layouts(
    trial: str, right: int, pairs: int, regret: float, error: float
) -> None:
    got = found()[trial].score
    assert got.right >= right and got.pairs == pairs
    assert got.regret <= regret and got.error <= error


def test_no_row_judges_that_figures_were_fitted_to() -> None:
    for one in found().values():
        every = runs(*one.trial.tables)
        both = [run for run in every if one.trial.fits(run) and one.trial.judges(run)]
        assert not both and any(map(one.trial.fits, every)) == bool(one.trial.start)


def test_without_the_size_of_groups_and_hosts_the_order_is_another() -> None:
    l20 = [run for run in runs("l20", "l20-heads-of-32") if run.block.tokens > 8 * KIB]
    one_rate = L20.inside.model_copy(update={"all_to_all": L20.inside.link("point_to_point")})
    assert score(l20, L20.model_copy(update={"inside": one_rate})).right < 12
    a800 = runs("a800-one-host", "a800-two-hosts")
    assert score(a800, A800).right < 30, "gradient sums take as long whatever a host's members"
    slow = {f"between.host_by_members.{n}": 26e9 for n in (1, 2, 4, 8)}
    assert score(a800, with_figures(A800, slow)).right < 50


def test_what_ran_and_what_did_not() -> None:
    told = verdicts()
    assert len(told) == 46 and sum(run["ran"] for run, _, _ in told) == 35
    assert [run for run, _, room in told if room != run["ran"]] == []
    usable = USABLE_SHARE * CARD_BYTES
    assert [n for run, n, _ in told if run["ran"] != (n <= 0.8 * usable)], "the threshold tells"


def timed(
    model: Any = LLAMA_3, hardware: Hardware = A800, *, tokens: int = 64 * KIB, **changes: Any
) -> dict[tuple[int, ...], StepTime]:
    """Steps by (tensor, Ulysses, ring, data)."""
    layouts = changes.pop("layouts")
    times = {}
    for degrees in layouts:
        layout = Layout(*degrees)
        how = {"checkpointing": False, "use_seq_parallel": degrees[0] > 1, "step_rows": 1}
        step = changed(step_of(model, tokens), scatters=True, **{**how, **changes})
        algorithm = named("hybrid_cp" if layout.context > 1 else "whole", *degrees[1:3])
        times[degrees] = step_time(PlacedStep(step, layout, hardware, algorithm))
    return times


def fastest(times: dict[tuple[int, ...], StepTime]) -> tuple[int, ...]:
    return min(times, key=lambda degrees: times[degrees].seconds)


def test_tip_1_both_splits_together_over_one_of_them() -> None:
    two_hosts = [(1, 16, 1, 1), (1, 8, 2, 1), (1, 4, 4, 1), (1, 2, 8, 1), (1, 1, 16, 1)]
    pcie = [(1, 8, 1, 1), (1, 4, 2, 1), (1, 2, 4, 1), (1, 1, 8, 1)]
    for tokens in (32 * KIB, 64 * KIB, 128 * KIB):
        for layouts, hardware in ((two_hosts, A800), (pcie, L20)):
            best = fastest(timed(hardware=hardware, tokens=tokens, layouts=layouts))
            assert best not in (layouts[0], layouts[-1]), (tokens, best)


def test_tip_2_data_before_the_sequence() -> None:
    for tokens in (4 * KIB, 8 * KIB, 16 * KIB):
        layouts = [(1, 1, 1, 8), (1, 8, 1, 1), (1, 4, 2, 1), (1, 2, 4, 1), (1, 1, 8, 1)]
        assert fastest(timed(LLAMA_2, tokens=tokens, step_rows=8, layouts=layouts)) == layouts[0]


def test_tip_3_zero_1_moves_least() -> None:
    for rows in (1, 4):
        first, *others = (
            timed(layouts=[(1, 8, 2, 1)], step_rows=rows, zero_stage=stage)[1, 8, 2, 1].seconds
            for stage in (1, 2, 3)
        )
        assert first < min(others)


@pytest.mark.parametrize("model", ["llama2-7b", "llama3-8b"])
def test_tip_4_sequence_parallelism_moves_less_than_tensor(model: str) -> None:
    times = timed(model_of(model), layouts=[(8, 1, 1, 1), (1, 8, 1, 1)])
    tensor, ulysses = (
        sum(part.seconds for part in time.parts if part.name in ("tensor", "all_to_all"))
        for time in times.values()
    )
    assert ulysses < tensor / 2
    if model == "llama3-8b":  # grouped heads widen the gap
        others = timed(LLAMA_2, layouts=[(1, 8, 1, 1)])[1, 8, 1, 1]
        assert ulysses < others.of("all_to_all")


def longest(gpus: int, tensor: int, ulysses: int, ring: int) -> int:
    """The longest row in kilotokens of every rank that a layout of the paper's program ran."""
    run = {"model": "llama3-8b", "tensor": tensor, "ulysses": ulysses, "ring": ring, "micro": 1}
    run["data"] = gpus // (tensor * ulysses * ring)
    step, count = KIB * tensor * ulysses * ring, 0
    while bytes_of({**run, "tokens": (count + 1) * step}) <= USABLE_SHARE * CARD_BYTES:
        count += 1
    return count * step // KIB


def test_tips_5_and_6_what_fits_on_16_and_on_128() -> None:
    assert TABLES["models"]["llama3-8b"]["kv_heads"] == 8
    tensor, sequence = longest(16, 8, 1, 2), longest(16, 1, 8, 2)
    assert sequence < tensor, "tensor parallelism divides the weights too"
    assert 208 <= tensor < 240
    wide = longest(128, 1, 8, 16)
    assert wide > 6 * sequence, "a ring grows beyond the heads"
    ours = [
        longest_row(LLAMA_3, layout, CARD_BYTES, options=options)
        for layout, options in (
            (Layout(8, ring=2), replace(PLAIN, use_seq_parallel=True)),
            (Layout(1, 8, 2), PLAIN),
            (Layout(1, 8, 16), PLAIN),
        )
    ]
    assert ours[1] < ours[0] < ours[2] and ours[2] > 6 * ours[1], "uspft's own memory says so too"


def test_tip_7_tensor_lies_innermost_and_data_outermost() -> None:
    """Of all axes matrices suffer most between hosts, and replicas exchange no activations."""
    apart = A800.model_copy(update={"ranks_per_host": 1})
    layouts = [(8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8)]
    near, far = (timed(hardware=one, step_rows=8, layouts=layouts) for one in (A800, apart))
    names = ("tensor", "all_to_all", "ring")
    lost = []
    for degrees in layouts:
        pair = [
            sum(p.seconds - p.hidden for p in time.parts if p.name in names)
            for time in (near[degrees], far[degrees])
        ]
        lost.append(pair[1] - pair[0])
    assert lost[0] > 5 * max(lost[1:3]) and min(lost[1:3]) > lost[3] == 0, lost
    assert AXES.index("mesh_columns") < AXES.index("ulysses") < AXES.index("ring")
    assert AXES.index("ring") < AXES.index("data")
