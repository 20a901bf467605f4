"""One ZeRO-3 step of each algorithm on GPUs, of groups of heads and of experts that ranks divide,
has the loss and gradient norm of one GPU.

`cpu-2` is the same run over gloo. What the last test asks for, tests/parity/test_experts.py,
test_experts_tensor.py and test_expert_adapters.py ask for on CPU beside plain transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import Row, agree, needs, steps_of
from tests.support.models import make_documents, make_model
from tests.support.runs import small_recipe
from uspft.config.algorithms import CONTEXT

LAYOUTS: dict[str, dict[str, Any]] = {
    **{name: {"context_parallel_algo": name} for name in CONTEXT},
    "megatron": {"tensor_parallel_algo": "megatron", "use_seq_parallel": True},
    "meshslice": {"tensor_parallel_algo": "meshslice"},
}
PLACES = [
    pytest.param("cpu", 2, id="cpu-2", marks=pytest.mark.full),
    *(pytest.param("cuda", n, id=f"cuda-{n}", marks=needs(n)) for n in (2, 8)),
]


def recipe_of(inputs: tuple[Path, Path], device: str, count: int, name: str = "") -> dict[str, Any]:
    """A recipe for as many processes that share a row, or the matrices, in a way."""
    model, data = inputs
    parallel = dict(LAYOUTS.get(name, {}))
    degree = "context_parallel" if "context_parallel_algo" in parallel else "model_parallel"
    if name in ("hybrid_cp", "planned_cp"):
        parallel["ulysses_degree_in_cp"] = count // 2
    return small_recipe(
        model,
        data,
        2048 if device == "cuda" else 64,
        model={"dtype": "bfloat16" if device == "cuda" else "float32"},
        parallel_config={**parallel, degree: count} if name else {},
        deepspeed={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        training={"steps": 2, "global_batch_size": 2},
        launch={"device": device, "processes": count},
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose heads any of the layouts divides, with head dim 64, and packed documents."""
    folder = tmp_path_factory.mktemp("steps")
    make_model(
        folder / "model", "llama", max_position_embeddings=2048, heads=8, kv_heads=8, head_dim=64
    )
    lengths = [30, 50, 64, 20, 1, 63] * 40
    return folder / "model", make_documents(folder / "d.jsonl", lengths, masked=[0.2]).path


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("device", "count"), PLACES)
def test_algorithms_agree_with_one_process(
    inputs: tuple[Path, Path], tmp_path: Path, device: str, count: int, row: Row
) -> None:
    packed = "data.packing=best_fit"
    alone = steps_of(recipe_of(inputs, device, 1), tmp_path / "alone", packed)
    wrong = []
    for name in LAYOUTS:
        found = steps_of(recipe_of(inputs, device, count, name), tmp_path / name, packed)
        fine, told = agree(found, alone)
        row(f"ZeRO-3, {name}, {count} GPUs", told)
        wrong += [] if fine else [f"{name}: {told}"]
    assert not wrong and len(LAYOUTS) >= 7


GROUPED = ("", "ulysses_cp", "planned_cp")
AWAY = {"recompute": "attention", "mlp_tile_tokens": 48, "offload_activations": "cpu"}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("device", "count"), PLACES[:2])
def test_groups_of_heads_agree_with_all_heads(
    inputs: tuple[Path, Path], tmp_path: Path, device: str, count: int, row: Row
) -> None:
    model = make_model(
        tmp_path / "model", "qwen3", max_position_embeddings=2048, heads=8, kv_heads=4, head_dim=64
    )
    alone = steps_of(recipe_of((model, inputs[1]), device, 1), tmp_path / "alone")
    wrong = []
    for name in GROUPED:
        for heads in (1, 2):
            recipe = recipe_of((model, inputs[1]), device, count if name else 1, name)
            recipe["memory"] = {**AWAY, "attention_heads": heads}
            found = steps_of(recipe, tmp_path / f"{name}-{heads}")
            fine, told = agree(found, alone)
            row(f"ZeRO-3, {name or 'whole'}, {heads} heads at once, {count} GPUs", told)
            wrong += [] if fine else [f"{name} {heads}: {told}"]
    assert not wrong


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS: dict[str, dict[str, Any]] = {
    "expert_parallel": {"parallel_config": {"expert_parallel": 2}},
    "in tensor parts": {"parallel_config": {"model_parallel": 2, "use_seq_parallel": True}},
    "with adapters": {
        "parallel_config": {"expert_parallel": 2},
        "model": {"adapter": {"rank": 8, "target_modules": [], "target_parameters": BOTH}},
    },
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("device", "count"), PLACES[:2])
def test_experts_that_ranks_divide_agree_with_one_process(
    inputs: tuple[Path, Path], tmp_path: Path, device: str, count: int, row: Row
) -> None:
    sizes = {"num_local_experts": 8, "head_dim": 64}
    model = make_model(
        tmp_path / "model", "mixtral", max_position_embeddings=2048, heads=8, kv_heads=8, **sizes
    )
    wrong = []
    for name, blocks in EXPERTS.items():
        whole = recipe_of((model, inputs[1]), device, 1)
        whole["model"] |= blocks.get("model", {})
        parts = recipe_of((model, inputs[1]), device, count)
        parts = {**parts, "model": whole["model"], "parallel_config": blocks["parallel_config"]}
        alone = steps_of(whole, tmp_path / "alone" / name, "data.packing=best_fit")
        found = steps_of(parts, tmp_path / name, "data.packing=best_fit")
        fine, told = agree(found, alone)
        row(f"ZeRO-3, experts {name}, {count} GPUs", told)
        wrong += [] if fine else [f"{name}: {told}"]
    assert not wrong and len(EXPERTS) == 3
