"""What MindSpore Transformers shards, makes again and offloads is that here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mindspore import STAGES, converted, line_of, with_blocks

LAYERS: dict[str, tuple[dict[str, Any], Any, str | None]] = {
    "all": ({"recompute": True}, True, None),
    "none": ({"recompute": False, "select_recompute": False}, False, None),
    "of each stage": ({"recompute": [3, 2, 1, 0]}, [3, 2, 1, 0], None),
    "of each virtual stage": ({"recompute": [[2, 1, 1, 0]] * 2}, [[2, 1, 1, 0]] * 2, None),
    "operators everywhere": ({"select_recompute": True}, True, "nothing"),
    "operators of each stage": ({"select_recompute": [3, 2, 1, 0]}, [3, 2, 1, 0], "nothing"),
    "operators by pattern": ({"select_recompute": ["feed_forward", "norm"]}, True, "nothing"),
    "patterns in a block": ({"select_recompute": {r"feed\.mul": True}}, True, "nothing"),
    "patterns of each stage": (
        {"select_recompute": {r"a\.b": [3, 2, 0, 0], r"c\.d": [1, 1, 1, 0]}},
        [3, 2, 1, 0],
        "nothing",
    ),
    "patterns that are off": ({"select_recompute": {r"feed\.mul": False}}, False, None),
    "both, whole": ({"recompute": True, "select_recompute": True}, True, None),
    "both, by stage": (
        {"recompute": [1, 1, 0, 0], "select_recompute": [2, 0, 0, 1]},
        [2, 1, 0, 1],
        None,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_made_again(name: str, tmp_path: Path) -> None:
    block, layers, kept = LAYERS[name]
    more = {"pp_interleave_num": 2} if "virtual" in name else {}
    tree = with_blocks(parallel_config=STAGES, recompute_config=block, config=more)
    outcome = converted(tmp_path, tree)
    assert not outcome.refused, outcome.lines()
    assert outcome.values["memory.gradient_checkpointing"] == layers
    assert outcome.values.get("memory.recompute") == kept
    selects = [r for r in outcome.remarks if r.key.startswith("recompute_config.select_recompute")]
    assert bool(selects) == ("select_recompute" in block)
    assert {"nearest" in r.what for r in selects} <= {kept is not None}


def test_what_is_offloaded(tmp_path: Path) -> None:
    swap = {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]}
    tree = with_blocks(swap_config=swap, recompute_config={"recompute": True})
    assert converted(tmp_path, tree).values["memory.offload_activations"] == "cpu"
    outcome = converted(tmp_path, with_blocks(swap_config=swap))
    assert "memory.offload_activations" not in outcome.values
    assert "only checkpointed layers" in line_of(outcome, "swap_config.swap")


def shards(**more: Any) -> Iterator[tuple[str, dict[str, Any], int]]:
    """The four cases of optimizer parallelism, and what is asked beside it where it is off."""
    on = {"enable_parallel_optimizer": True}
    summed = {"parallel_optimizer_config": {"gradient_accumulation_shard": True}}
    again = {"parallel_optimizer_comm_recompute": True}
    yield "off", {}, 0
    yield "off beside others", {"parallel": summed, "recompute_config": again}, 0
    yield "on", {"parallel": on}, 1
    yield "gradients", {"parallel": on | summed}, 2
    yield "weights", {"parallel": on | summed, "recompute_config": again}, 3


@pytest.mark.parametrize(("name", "blocks", "stage"), shards())
def test_optimizer_parallelism_is_a_stage(
    name: str, blocks: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    key = "deepspeed.zero_optimization.stage"
    assert converted(tmp_path, with_blocks(**blocks)).values[key] == stage
    several = {"runner_config": {"batch_size": 1, "gradient_accumulation_steps": 2}}
    outcome = converted(tmp_path, with_blocks(**blocks, **several))
    assert outcome.values[key] == max(1, stage)
    told = line_of(outcome, "parallel.enable_parallel_optimizer")
    assert ("several micro-batches in bfloat16" in told) == (stage == 0)
    exact = with_blocks(**blocks, **several, config={"compute_dtype": "float32"})
    assert converted(tmp_path, exact).values[key] == stage
    staged = with_blocks(**blocks, parallel_config=STAGES)
    assert converted(tmp_path, staged).values[key] == max(1, stage)


@pytest.mark.parametrize(
    ("config", "legacy", "elements"),
    [
        ({"param_init_type": "float32"}, True, 64 * 1024 // 4),
        ({"param_init_type": "bfloat16"}, True, 64 * 1024 // 2),
        ({}, True, 64 * 1024 // 2),
        ({}, False, 64 * 1024 // 4),
        ({"params_dtype": "bfloat16"}, False, 64 * 1024 // 2),
    ],
)
def test_a_size_in_kb_is_elements(
    config: dict[str, Any], legacy: bool, elements: int, tmp_path: Path
) -> None:
    block = {"parallel_optimizer_threshold": 64}
    parallel = {"enable_parallel_optimizer": True, "parallel_optimizer_config": block}
    again = {"parallel_optimizer_comm_recompute": True}
    tree = with_blocks(parallel=parallel, recompute_config=again, config=config, use_legacy=legacy)
    found = converted(tmp_path, tree).values
    assert found["deepspeed.zero_optimization.stage3_param_persistence_threshold"] == elements
    one = converted(tmp_path, with_blocks(parallel=parallel))
    assert not any("persistence" in key for key in one.values)
    where = "parallel.parallel_optimizer_config.parallel_optimizer_threshold"
    assert "splits everything evenly" in line_of(one, where)
