"""What a rank holds at its most under ZeRO-3, counted in a run's own engine over forward, backward
and update, beside what is predicted: `--full` in pairs of what trains, the head beside a layer,
what is gathered ahead and kept, the bucket, the type and where the optimizer is."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.live import Live
from tests.support.pairwise import pairwise
from tests.support.ranks import spawn
from tests.support.runs import run_recipe
from tests.support.zero_state import BUCKET, HEADS, LAYERS, LORA, Case, apart, make_inputs

LAYER = 147_712
"""The elements of a layer."""
MATRIX = 4 * 256 * 128
"""The bytes of its largest gradient. It is predicted beside the most that is gathered; which of a
layer's gradients comes then is by the order of all, and seen in a small model alone."""
WHOLE = {**BUCKET, **LAYERS}
DEFAULTS = {"stage": 3, "stage3_param_persistence_threshold": 0}
"""With bounds of DeepSpeed's, within which all of a small model is."""
CASES = {
    "some": Case(WHOLE),
    "wide": Case(WHOLE, dtype="float32"),
    "kept for the backward": Case(
        {**WHOLE, "stage3_max_reuse_distance": 1_600_000}, dtype="float32"
    ),
    "all ahead": Case({**WHOLE, "stage3_max_live_parameters": 1_000_000}, dtype="float32"),
    "head, wide": Case(WHOLE, dtype="float32", head="large"),
    "head, lora": Case(WHOLE, trained=LORA, head="large"),
    "head, one bucket": Case(LAYERS, head="large"),
    "table, wide": Case(WHOLE, dtype="float32", head="tied"),
    "all at once, lora": Case(DEFAULTS, trained=LORA, head="large"),
}

TRAINED: dict[str, dict[str, Any] | None] = {
    "all": None,
    "lora": LORA,
    "no mlp": {"freeze": ["mlp"]},
    "no tables": {"freeze": ["embed_tokens|lm_head"]},
}
AWAY = {"offload_optimizer": {"device": "cpu"}}
BUCKETS: dict[str, dict[str, int]] = {
    "a layer's": BUCKET,
    "all": {},
    "less than a matrix": {"reduce_bucket_size": 20_000},
}
ON_THE_HOST: dict[str, dict[str, Any]] = {
    "nothing": {},
    "optimizer": AWAY,
    "weights": {**AWAY, "offload_param": {"device": "cpu"}},
}
FACTORS: tuple[tuple[Any, ...], ...] = (
    tuple(TRAINED),
    tuple(HEADS),
    (34_000, 200_000, 0, 50_000_000),  # stage3_prefetch_bucket_size
    (300_000, 1_000_000, 1_000_000_000),  # stage3_max_live_parameters
    (400_000, 1_600_000),  # stage3_max_reuse_distance
    tuple(BUCKETS),
    (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")),
    tuple(ON_THE_HOST),
    (1, 2),  # passes
)


def legal(traits: tuple[Any, ...]) -> bool:
    """Whether the order of parameters decides less than two percent: it says what is fetched where
    as much may be at once as in all, and what is there as the bucket fills where nothing is fetched
    ahead and part of a layer trains."""
    trained, _, prefetch, live, *_ = traits
    return prefetch <= live and (prefetch > 0 or trained in ("all", "lora"))


def in_pairs() -> dict[str, Case]:
    cases = {}
    for traits in pairwise(*FACTORS, legal=legal):
        trained, head, prefetch, live, reuse, bucket, (reduction, dtype), away, passes = traits
        bounds = {
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": reuse,
        }
        zero = {**DEFAULTS, **bounds, **BUCKETS[bucket], **ON_THE_HOST[away]}
        case = Case(zero, reduction, dtype, TRAINED[trained], passes=passes, head=head)
        cases[str(traits)] = case
    return cases


MORE = Case({**WHOLE, "stage3_max_live_parameters": 690_000})
"""As "some", with as many times a layer as DeepSpeed's own bound is of one of 8B."""


def work(rank: int, cases: dict[str, Case], folder: Path) -> dict[str, tuple[int, int]]:
    """By case: the most bytes, and how many elements of weights ranks gathered in all."""
    from deepspeed.comm.torch import TorchBackend

    found, plain = {}, TorchBackend.all_gather_into_tensor
    for number, (name, case) in enumerate(cases.items()):
        live, gathered = Live(), list[int]()

        def counting(backend: Any, output_tensor: Any, *args: Any, to: Any = gathered, **how: Any):  # type: ignore[no-untyped-def]
            to.append(output_tensor.numel())
            return plain(backend, output_tensor, *args, **how)

        with live.of_steps(), patch.object(TorchBackend, "all_gather_into_tensor", counting):
            run_recipe(case.recipe(folder), folder / f"run-{number}")
        found[name] = live.most, sum(gathered)
    return found


def predicted(cases: dict[str, Case], folder: Path, without: str = "") -> dict[str, int]:
    """What is predicted of each case, but for one part."""
    needs = {name: case.predicted(folder) for name, case in cases.items()}
    return {
        name: need.peak_bytes + need.host_bytes - need.parts.get(without, 0)
        for name, need in needs.items()
    }


def test_the_most_of_stage_3_is_predicted_within_two_percent(tmp_path: Path) -> None:
    make_inputs(tmp_path, layers=6)
    counted = spawn(2, work, {**CASES, "more": MORE}, tmp_path)[0]
    _, of_more = counted.pop("more")
    found = {name: most for name, (most, _) in counted.items()}
    assert apart(found, predicted(CASES, tmp_path)) == {}
    assert "head, lora" in apart(found, predicted(CASES, tmp_path, without="head"))
    assert counted["some"][1] - of_more == 3 * LAYER  # gathered once more where fewer stay


@pytest.mark.full
def test_the_most_of_stage_3_is_predicted_in_pairs(tmp_path: Path) -> None:
    make_inputs(tmp_path, layers=6)
    cases = in_pairs()
    counted = spawn(2, work, cases, tmp_path)[0]
    found = {name: most for name, (most, _) in counted.items()}
    assert apart(found, predicted(cases, tmp_path), slack=MATRIX) == {}
