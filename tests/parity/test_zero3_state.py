"""What a rank holds at its most under ZeRO-3, counted in a run's own engine over forward, backward
and update, beside what is predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.live import Live
from tests.support.ranks import spawn
from tests.support.runs import run_recipe
from tests.support.zero_state import BUCKET, LAYERS, LORA, Case, apart, make_inputs

LAYER = 147_712
"""The elements of a layer."""
WHOLE = {**BUCKET, **LAYERS}
CASES = {
    "some": Case(WHOLE),
    "wide": Case(WHOLE, dtype="float32"),
    "halves": Case(WHOLE, "bfloat16"),
    "kept for the backward": Case(
        {**WHOLE, "stage3_max_reuse_distance": 1_600_000}, dtype="float32"
    ),
    "all ahead": Case({**WHOLE, "stage3_max_live_parameters": 1_000_000}, dtype="float32"),
    "one bucket": Case(LAYERS, dtype="float32"),
    "one bucket, lora": Case(LAYERS, trained=LORA),
    "one bucket, lora, wide": Case(LAYERS, dtype="float32", trained=LORA),
}


MORE = Case({**WHOLE, "stage3_max_live_parameters": 690_000})
"""As "some", with as many times a layer as DeepSpeed's own bound is of one of 8B."""


def work(rank: int, folder: Path) -> dict[str, tuple[int, int]]:
    """By case: the most bytes, and how many elements of weights ranks gathered in all."""
    from deepspeed.comm.torch import TorchBackend

    found, plain = {}, TorchBackend.all_gather_into_tensor
    for name, case in {**CASES, "more": MORE}.items():
        live, gathered = Live(), list[int]()

        def counting(backend: Any, output_tensor: Any, *args: Any, to: Any = gathered, **how: Any):  # type: ignore[no-untyped-def]
            to.append(output_tensor.numel())
            return plain(backend, output_tensor, *args, **how)

        with live.of_steps(), patch.object(TorchBackend, "all_gather_into_tensor", counting):
            run_recipe(case.recipe(folder), folder / name)
        found[name] = live.most, sum(gathered)
    return found


def test_the_most_of_stage_3_is_predicted_within_two_percent(tmp_path: Path) -> None:
    make_inputs(tmp_path, layers=6)
    needs = {name: case.predicted(tmp_path) for name, case in CASES.items()}
    predicted = {name: need.peak_bytes + need.host_bytes for name, need in needs.items()}
    found = spawn(2, work, tmp_path)[0]
    _, of_more = found.pop("more")
    assert apart({name: most for name, (most, _) in found.items()}, predicted) == {}
    assert found["some"][1] - of_more == 3 * LAYER  # gathered once more where fewer stay
