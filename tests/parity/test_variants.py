"""What the matrix of test_training leaves out, one case each: heads, rope, types, odd batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import Documents, make_documents, make_model, mismatch, reference
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe

ROW, STEPS = 64, 2
LENGTHS = [64, 60, 31, 64, 17, 50, 2, 44]
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
HYBRID = {"context_parallel": 4, "context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": 2}
RING = {"context_parallel": 4, "context_parallel_algo": "ring_cp"}
CASES: dict[str, dict[str, Any]] = {
    "grouped queries": {"parallel_config": HYBRID},
    "yarn": {"parallel_config": RING, "model": {"rope_scaling": YARN}},
    "linear rope": {
        "parallel_config": HYBRID,
        "model": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    },
    "two rows in a micro-batch": {
        "parallel_config": HYBRID,
        "training": {"global_batch_size": 4, "micro_batch_size": 2},
    },
    "rows that do not fill the replicas": {
        "parallel_config": {"context_parallel": 2, "context_parallel_algo": "ring_cp"},
        "training": {"global_batch_size": 3},
        "deepspeed": {"zero_optimization": {"stage": 3}},
    },
    "offloaded optimizer": {
        "parallel_config": HYBRID,
        "deepspeed": {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    },
    "no reduce_scatter": {
        "parallel_config": HYBRID,
        "deepspeed": {"zero_optimization": {"stage": 3, "reduce_scatter": False}},
    },
    "small loss tiles": {"parallel_config": RING, "memory": {"loss_tile_tokens": 5}},
}


def recipe(folder: Path, data: Documents, blocks: dict[str, Any]) -> dict[str, Any]:
    training = {"steps": STEPS, **blocks.get("training", {})}
    return small_recipe(folder / "model", data.path, ROW, **{**blocks, "training": training})


def work(rank: int, folder: Path, data: Documents) -> dict[str, Any]:
    return {
        name: run_recipe(recipe(folder, data, blocks), folder / "runs" / name)
        for name, blocks in CASES.items()
    }


def wrong_order(rank: int, folder: Path, data: Documents) -> Any:
    """Each rank is handed the tokens that another one should hold."""

    def share_as_before(_: Any) -> None:
        from uspft.world import World

        share = World.share

        def mixed(self: Any, rows: Any, orders: Any) -> Any:
            right = share(self, rows, orders)
            right.held = share(self, rows, [order[::-1] for order in orders]).held
            return right

        World.share = mixed  # type: ignore[method-assign]

    blocks = CASES["grouped queries"]
    return run_recipe(recipe(folder, data, blocks), folder / "wrong", before=share_as_before)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("variants")
    make_model(folder / "model", "qwen3", heads=4, kv_heads=2)
    return folder, make_documents(folder / "d.jsonl", LENGTHS, masked=[0.0, 0.9, 0.4])


def want(setting: tuple[Path, Documents], blocks: dict[str, Any]) -> Any:
    folder, data = setting
    rows = blocks.get("training", {}).get("global_batch_size", 1)
    stream = [data.documents[i % len(LENGTHS)] for i in range(STEPS * rows)]
    steps = [stream[i : i + rows] for i in range(0, STEPS * rows, rows)]
    rope = blocks.get("model", {}).get("rope_scaling")
    return reference(folder / "model", steps, rate=1e-3, clip=0.5, rope=rope)


def test_each_variant_equals_one_process(setting: tuple[Path, Documents]) -> None:
    answers = spawn(4, work, *setting)[0]
    wrong = {name: mismatch(got, want(setting, CASES[name])) for name, got in answers.items()}
    assert wrong == {name: [] for name in CASES}


def test_a_wrong_token_order_shows_in_loss_and_gradients(setting: tuple[Path, Documents]) -> None:
    found = mismatch(spawn(4, wrong_order, *setting)[0], want(setting, {}))
    assert any("loss" in line for line in found) and any("of its change" in line for line in found)


def random_weights(rank: int, folder: Path, data: Documents, stage: int) -> float:
    world = torch.distributed.get_world_size()
    parallel = HYBRID if world == 4 else {}
    blocks = {
        "model": {"name_or_path": None, "config": str(folder / "model")},
        "parallel_config": parallel,
        "deepspeed": {"zero_optimization": {"stage": stage}},
        "training": {"steps": 1},
    }
    got = run_recipe(recipe(folder, data, blocks), folder / f"random-{world}")
    return got[0][0]["loss"] if got else 0.0


def test_random_weights_are_a_function_of_the_seed_alone(setting: tuple[Path, Documents]) -> None:
    alone = spawn(1, random_weights, *setting, 0)[0]
    shared = spawn(4, random_weights, *setting, 3)[0]
    assert shared == pytest.approx(alone, rel=1e-6)
