"""What fits in memory: how many layers `verify` builds, and whether plain transformers runs too."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model
from tests.support.verify import recipe
from uspft.config import Fault
from uspft.config.algorithms import OBJECTIVES, ObjectiveRow
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.model.hf_config import model_config
from uspft.planner.memory.formula import USABLE_SHARE, memory_of
from uspft.prepare.host import CONFIGS
from uspft.prepare.make_verify_job import (
    Sizes,
    fitting_depth,
    sizes_of,
    why_not_plain,
    with_depth,
)


def sizes_in(folder: Path, with_plain: bool = False, **blocks: Any) -> Sizes:
    given = recipe(folder, **blocks)
    config, shape = model_config(given.model, 96), read_shape(given.model, CONFIGS)
    assert isinstance(shape, ModelShape)
    return sizes_of(given, config, shape, with_plain=with_plain)


def test_depth_follows_memory_and_keeps_every_kind_of_layer(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", kv_heads=2)
    kinds = ("full", "full", "window", "full", "full", "window")
    sizes = replace(sizes_in(tmp_path), kinds=kinds)
    assert sizes.shallowest == 3
    for depth in range(3, 7):
        need = math.ceil(sizes.memory_bytes(depth) / USABLE_SHARE)
        assert fitting_depth(sizes, need) == depth
        assert depth == 3 or fitting_depth(sizes, need - 1) == depth - 1
    with pytest.raises(Fault, match="3 of 6 layers"):
        fitting_depth(sizes, math.ceil(sizes.memory_bytes(3) / USABLE_SHARE) - 1)


def test_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    windows = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    make_model(tmp_path, "qwen2", kv_heads=2, sliding_window=5, **windows)
    sizes = sizes_in(tmp_path, with_plain=True)
    assert sizes.shallowest == 2 and len(sizes.kinds) == 2
    given = recipe(tmp_path)
    shorter = with_depth(given, 1)
    config = model_config(shorter.model, shorter.data.sequence_length)
    assert (config.num_hidden_layers, config.layer_types) == (1, ["full_attention"])
    longer = sizes_in(tmp_path, with_plain=True, data={"sequence_length": 192})
    assert longer.memory_bytes(2) > sizes.memory_bytes(2) > sizes.memory_bytes(1)


@pytest.mark.parametrize("away", ["none", "cpu"])
def test_one_process_needs_what_the_formula_says(tmp_path: Path, away: str) -> None:
    """On the device and on the host, which is one where ranks are on CPUs; beside plain
    transformers at least what that needs in float32."""
    make_model(tmp_path, "llama", kv_heads=2)
    memory = {"offload_activations": away, "mlp_tile_tokens": 8}
    sizes = sizes_in(tmp_path, model={"dtype": "bfloat16"}, memory=memory)
    for depth in (1, 2, 5):
        shape = replace(sizes.shape, layers=depth)
        need = memory_of(shape, Layout(), sizes.row_tokens, options=sizes.options)
        assert sizes.options.zero_stage == 0
        assert sizes.memory_bytes(depth) == need.peak_bytes + need.host_bytes
    plain = sizes_in(tmp_path, True, model={"dtype": "bfloat16"}, memory=memory)
    assert plain.options.dtype == "float32" and plain.options.loss_tile is None
    assert plain.memory_bytes(2) != sizes.memory_bytes(2)


def test_plain_transformers_is_left_out_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, "qwen2", kv_heads=2)

    def why(memory: int = 1 << 34, **blocks: Any) -> str | None:
        given = recipe(tmp_path, **blocks)
        return why_not_plain(given, model_config(given.model, 96), memory)

    assert why() is None
    assert "at most" in str(why(data={"sequence_length": 8192}))
    monkeypatch.setitem(OBJECTIVES, "toy", ObjectiveRow("toy", "nowhere:Toy"))
    assert "training.objective: toy" in str(why(training={"objective": "toy"}))
    assert "dropout" in str(why(model={"adapter": {"dropout": 0.1}}))
    assert why(model={"adapter": {"dropout": 0.0}}) is None
    assert "too much memory" in str(why(memory=1 << 18))
    make_model(tmp_path, "gemma2", kv_heads=2)  # whose soft-cap transformers writes out
    assert why() is None
    long = {"data": {"sequence_length": 4096}, "memory": 1 << 30}
    assert "every score of 4,096 tokens" in str(why(**long))
    make_model(tmp_path, "qwen2", kv_heads=2)
    assert why(**long) is None
