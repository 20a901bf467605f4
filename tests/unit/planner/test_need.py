"""What a rank needs for weights, gradients and optimizer: on the device, and on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from uspft.config import load
from uspft.config.inputs import ModelBlock
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.planner.need import fits, need_of, unknown, weight_bytes
from uspft.planner.products import head_projection, parameters_of

ROOT = Path(__file__).parents[3]
EIGHT = Layout(ulysses=8)
AWAY = {"device": "cpu"}


def needed(**zero: Any) -> tuple[float, float]:
    """Bytes a parameter that one of eight ranks has on its device and on the host, without buckets
    and what stage 3 has whole."""
    recipe = load(ROOT / "recipes" / "llama3.1-8b-text-ulysses-4m.yaml").recipe
    block = recipe.deepspeed.model_copy(update={"zero_optimization": zero})
    shape = read_shape(ModelBlock(name_or_path="meta-llama/Llama-3.1-8B"), ROOT / "configs")
    assert isinstance(shape, ModelShape)
    need = need_of(recipe.model_copy(update={"deepspeed": block}), shape, EIGHT)
    assert need
    outside, layer = parameters_of(shape)
    every = outside + shape.layers * layer
    head, matrix = head_projection(shape).parameters, shape.hidden_size * shape.intermediate_size
    away = "offload_optimizer" in zero
    buffer = 2 * head if away and zero["stage"] < 3 else 0  # of one gradient, on both sides
    beside = {1: buffer, 2: 2 * matrix + buffer, 3: 2 * max(head, 2 * layer)}[zero["stage"]]
    of_bucket = {1: 4 if away else 0, 2: 8, 3: 4}[zero["stage"]]
    buckets = of_bucket * zero.get("reduce_bucket_size", 5e8)
    offloaded = need.host_bytes - need.activations.host_bytes - buffer
    return (need.state_bytes - beside - buckets) / every * 8, offloaded / every * 8


@pytest.mark.parametrize(
    ("zero", "device", "host"),
    [
        ({"stage": 1}, 8 * 8 + 12, 0),
        ({"stage": 1, "offload_optimizer": AWAY}, 8 * 6, 18),
        ({"stage": 2}, 8 * 2 + 4 + 12, 0),
        ({"stage": 3}, 18, 0),
        ({"stage": 3, "reduce_bucket_size": 1000}, 18, 0),
        ({"stage": 2, "offload_optimizer": AWAY}, 8 * 2 + 4, 18),
        # Gradients are summed beside the optimizer's state.
        ({"stage": 3, "offload_optimizer": AWAY}, 2, 16),
        ({"stage": 3, "offload_optimizer": AWAY, "offload_param": AWAY}, 0, 18),
        ({"stage": 3, "offload_param": AWAY}, 16, 2),
    ],
)
def test_what_zero_offloads_lies_on_the_host(
    zero: dict[str, Any], device: float, host: float
) -> None:
    assert needed(**zero) == pytest.approx((device, host))


@pytest.mark.parametrize(
    ("layout", "zero", "share"),
    [
        (Layout(), {"stage": 1}, 1),
        (Layout(mesh_columns=8), {"stage": 1}, 1 / 8),
        (Layout(mesh_columns=2, ulysses=4), {"stage": 3}, 1 / 8),
        (Layout(data=8), {"stage": 2}, 1),
        (Layout(), {"stage": 3, "offload_param": AWAY}, 0),
    ],
)
def test_a_card_that_the_weights_alone_fill_is_too_small(
    layout: Layout, zero: dict[str, Any], share: float
) -> None:
    """Of LoRA on 8.03 billion parameters, of which nothing else is predicted."""
    recipe = load(ROOT / "recipes" / "llama3.1-8b-text-ulysses-4m.yaml").recipe
    shape = read_shape(ModelBlock(name_or_path="meta-llama/Llama-3.1-8B"), ROOT / "configs")
    assert isinstance(shape, ModelShape)
    block = recipe.deepspeed.model_copy(update={"zero_optimization": zero})
    model = recipe.model.model_copy(update={"adapter": {"type": "lora"}})
    asked = recipe.model_copy(update={"deepspeed": block, "model": model})
    assert "LoRA" in unknown(asked, shape, layout) and need_of(asked, shape, layout) is None
    alone = weight_bytes(asked, shape, layout)
    assert alone == pytest.approx(share * 2 * 8_030_261_248, rel=1e-3)
    assert fits(asked, shape, layout, alone) is (False if share else None)
    assert fits(asked, shape, layout, 1.2 * alone) is None
