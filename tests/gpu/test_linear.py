"""Layers with a state on GPUs: their kernels beside the written-out form, and two ranks beside one.

On CPU the first is tests/unit/model/test_linear.py, the second tests/parity/test_linear.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.support.gpu import Row, agree, needs, steps_of
from tests.support.models import make_documents, make_model
from tests.support.runs import small_recipe
from uspft.model.linear import probe

LAYOUTS: dict[str, dict[str, Any]] = {
    "ulysses_cp": {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"},
    "ring_cp": {"context_parallel": 2, "context_parallel_algo": "ring_cp"},
    "planned_cp": {"context_parallel": 2, "context_parallel_algo": "planned_cp"},
    "megatron": {"model_parallel": 2, "use_seq_parallel": True},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (96, 192)])
def test_kernels_agree_with_what_is_written_out(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    layer: Any = SimpleNamespace(
        head_k_dim=dims[0], head_v_dim=dims[1], conv1d=SimpleNamespace(kernel_size=(4,))
    )
    for modelling in (modeling_qwen3_5, modeling_olmo_hybrid):
        probe(modelling, layer, dtype, torch.device("cuda"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("device", "count"),
    [
        pytest.param("cpu", 2, id="cpu-2", marks=pytest.mark.full),
        pytest.param("cuda", 2, id="cuda-2", marks=needs(2)),
    ],
)
def test_two_ranks_agree_with_one(device: str, count: int, tmp_path: Path, row: Row) -> None:
    dims = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = make_model(
        tmp_path / "m",
        "qwen3_5_text",
        max_position_embeddings=2048,
        heads=4,
        kv_heads=2,
        head_dim=64,
        **dims,
    )
    data = make_documents(tmp_path / "d.jsonl", [30, 50, 64, 20, 1, 63] * 40, masked=[0.2]).path

    def recipe(parallel: dict[str, Any], processes: int) -> dict[str, Any]:
        return small_recipe(
            model,
            data,
            2048 if device == "cuda" else 64,
            model={"dtype": "bfloat16" if device == "cuda" else "float32"},
            parallel_config=parallel,
            deepspeed={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
            training={"steps": 2, "global_batch_size": 2},
            launch={"device": device, "processes": processes},
        )

    packed = "data.packing=best_fit"
    alone = steps_of(recipe({}, 1), tmp_path / "alone", packed)
    wrong = []
    for name, parallel in LAYOUTS.items():
        fine, told = agree(steps_of(recipe(parallel, count), tmp_path / name, packed), alone)
        row(f"layers with a state, {name}, {count} GPUs", told)
        wrong += [] if fine else [f"{name}: {told}"]
    assert not wrong and len(LAYOUTS) == 4
