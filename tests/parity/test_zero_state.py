"""What a rank holds at its most in a step, counted in a run's own engine from its first forward to
the end of its update, beside what is predicted: every stage, the optimizer's state here and on the
host, in both types, with an adapter and with frozen parameters. Stage 3 on the device:
test_zero3_state.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.live import Live
from tests.support.ranks import spawn
from tests.support.runs import run_recipe
from tests.support.zero_state import BUCKET, LAYERS, LORA, Case, apart, make_inputs

AWAY = {"offload_optimizer": {"device": "cpu"}}
FROZEN = {"freeze": ["mlp"]}
ONE, TWO, THREE = {"stage": 1, **BUCKET}, {"stage": 2, **BUCKET}, {**LAYERS, **BUCKET}
LITTLE = {"stage": 2, "reduce_bucket_size": 20_000}
"""Of which a layer's larger matrices do not fit one."""
FEW = {
    "0": Case({"stage": 0}),
    "0, wide, frozen": Case({"stage": 0}, dtype="float32", trained=FROZEN),
    "1, much at once": Case(ONE),
    "1, little at once": Case(ONE, "bfloat16", flat=20_000),
    "1, wide": Case(ONE, dtype="float32"),
    "1, away, halves": Case({**ONE, **AWAY}, "bfloat16"),
    "2, lora": Case(TWO, trained=LORA),
    "2, wide": Case(TWO, dtype="float32"),
    "2, wide, thrice": Case(TWO, dtype="float32", passes=3),
    "2, away": Case({**TWO, **AWAY}),
    "2, head": Case(TWO, head="large"),
    "2, table, wide": Case(TWO, dtype="float32", head="tied"),
    "3, away, wide": Case({**THREE, **AWAY}, dtype="float32"),
}
MORE = {
    "0, halves": Case({"stage": 0}, "bfloat16"),
    "0, little at once": Case({"stage": 0}, flat=300_000),
    "0, lora": Case({"stage": 0}, trained=LORA),
    "1, halves": Case(ONE, "bfloat16"),
    "1, lora": Case(ONE, trained=LORA),
    "1, wide, lora": Case(ONE, dtype="float32", trained=LORA),
    "1, away": Case({**ONE, **AWAY}),
    "1, away, wide": Case({**ONE, **AWAY}, dtype="float32"),
    "1, away, lora": Case({**ONE, **AWAY}, trained=LORA),
    "2": Case(TWO),
    "2, halves": Case(TWO, "bfloat16"),
    "2, one bucket": Case({"stage": 2}),
    "2, frozen": Case({"stage": 2, "reduce_bucket_size": 148_300}, trained=FROZEN),
    "2, wide, lora": Case(TWO, dtype="float32", trained=LORA),
    "2, away, wide": Case({**TWO, **AWAY}, dtype="float32"),
    "2, away, lora": Case({**TWO, **AWAY}, trained=LORA),
    "3, away": Case({**THREE, **AWAY}),
    "0, wide, thrice": Case({"stage": 0}, dtype="float32", passes=3),
    "1, thrice": Case(ONE, passes=3),
    "1, wide, thrice": Case(ONE, dtype="float32", passes=3),
    "1, away, wide, thrice": Case({**ONE, **AWAY}, dtype="float32", passes=3),
    "2, halves, twice": Case(TWO, "bfloat16", passes=2),
    "2, wide, lora, twice": Case(TWO, dtype="float32", trained=LORA, passes=2),
    "2, away, wide, thrice": Case({**TWO, **AWAY}, dtype="float32", passes=3),
    "3, away, thrice": Case({**THREE, **AWAY}, passes=3),
    "1, head, wide": Case(ONE, dtype="float32", head="large"),
    "1, head, away": Case({**ONE, **AWAY}, head="large"),
    "1, table": Case(ONE, head="tied"),
    "1, table, wide": Case(ONE, dtype="float32", head="tied"),
    "2, head, wide": Case(TWO, dtype="float32", head="large"),
    "2, head, halves": Case(TWO, "bfloat16", head="large"),
    "2, head, away": Case({**TWO, **AWAY}, head="large"),
    "2, head, lora": Case(TWO, trained=LORA, head="large"),
    "2, head, two buckets": Case({**TWO, "overlap_comm": True}, head="large"),
    "2, table": Case(TWO, head="tied"),
    "2, table, away, wide": Case({**TWO, **AWAY}, dtype="float32", head="tied"),
    "2, table, wide, thrice": Case(TWO, dtype="float32", passes=3, head="tied"),
    "2, little buckets": Case(LITTLE),
    "2, little buckets, away": Case({**LITTLE, **AWAY}),
    "2, little buckets, thrice": Case(LITTLE, passes=3),
}


def work(rank: int, cases: dict[str, Case], folder: Path) -> dict[str, int]:
    from deepspeed import DeepSpeedEngine

    found, summed = {}, DeepSpeedEngine.buffered_allreduce_fallback
    for name, case in cases.items():
        live = Live()

        def by(engine: Any, flat: int = case.flat, **others: Any) -> None:
            summed(engine, **{**others, "elements_per_buffer": flat})

        with live.of_steps(), patch.object(DeepSpeedEngine, summed.__name__, by):
            run_recipe(case.recipe(folder), folder / name)
        found[name] = live.most
    return found


@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.full)])
def test_the_most_of_a_step_is_predicted_within_two_percent(
    cases: dict[str, Case], tmp_path: Path
) -> None:
    """Without what backwards' ends and updates take, it is not."""
    make_inputs(tmp_path, layers=6)
    predicted, blind = {}, {}
    for name, case in cases.items():
        need = case.predicted(tmp_path)
        predicted[name] = need.peak_bytes + need.host_bytes
        later = sum(need.parts.get(moment, 0) for moment in ("reduction", "update"))
        blind[name] = predicted[name] - later
    ranks = spawn(2, work, cases, tmp_path)
    found = {name: max(one[name] for one in ranks) for name in cases}
    assert apart(found, predicted) == {}
    assert len(apart(found, blind)) >= len(cases) // 3
