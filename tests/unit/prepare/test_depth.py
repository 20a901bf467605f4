"""What fits in memory: how many layers `verify` builds, and whether plain transformers runs too."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model
from tests.support.verify import recipe
from uspft.config import Fault
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.model.hf_config import model_config
from uspft.planner.need import need_of
from uspft.prepare.depth import (
    BYTES_PER_PARAMETER,
    USABLE_SHARE,
    Sizes,
    fitting_depth,
    sizes_of,
    why_not_plain,
    with_depth,
)
from uspft.prepare.invocation import CONFIGS


def test_depth_follows_memory_and_keeps_every_kind_of_layer() -> None:
    sizes = Sizes(1000, (100,) * 6, ("full", "full", "window", "full", "full", "window"), 10, 5)
    assert sizes.shallowest == 3
    for depth in range(3, 7):
        need = math.ceil(sizes.need_bytes(depth) / USABLE_SHARE)
        assert fitting_depth(sizes, need) == depth
        assert depth == 3 or fitting_depth(sizes, need - 1) == depth - 1
    with pytest.raises(Fault, match="3 of 6 layers"):
        fitting_depth(sizes, math.ceil(sizes.need_bytes(3) / USABLE_SHARE) - 1)


def test_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    windows = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    make_model(tmp_path, "qwen2", kv_heads=2, sliding_window=5, **windows)
    given = recipe(tmp_path)
    sizes = sizes_of(given, model_config(given.model, given.data.sequence_length), with_plain=True)
    assert sizes.shallowest == 2 and len(sizes.layers) == 2
    shapes = json.loads((tmp_path / "config.json").read_text())
    assert sizes.outside == 2 * shapes["vocab_size"] * 64 + 64
    shorter = with_depth(given, 1)
    config = model_config(shorter.model, shorter.data.sequence_length)
    assert (config.num_hidden_layers, config.layer_types) == (1, ["full_attention"])
    assert sum(sizes_of(shorter, config, with_plain=True).layers) == sizes.layers[0]
    longer = recipe(tmp_path, data={"sequence_length": 192})
    more = sizes_of(
        longer, model_config(longer.model, longer.data.sequence_length), with_plain=True
    )
    assert more.need_bytes(2) > sizes.need_bytes(2)


@pytest.mark.parametrize("away", ["none", "cpu"])
def test_activations_are_by_the_formula_where_it_knows(tmp_path: Path, away: str) -> None:
    make_model(tmp_path, "llama", kv_heads=2)
    memory = {"offload_activations": away, "mlp_tile_tokens": 8}
    given = recipe(tmp_path, model={"dtype": "bfloat16"}, memory=memory)
    config, shape = model_config(given.model, 96), read_shape(given.model, CONFIGS)
    assert isinstance(shape, ModelShape)
    need = need_of(given, shape, Layout())
    assert need and need.activations.offloaded == (away == "cpu")
    sizes = sizes_of(given, config, shape, with_plain=False)
    for depth in (2, 3, 5):
        more = replace(sizes, layers=(0,) * depth)
        state = BYTES_PER_PARAMETER * sizes.outside
        assert more.need_bytes(depth) == state + need.activations.of_layers(depth).peak_bytes
    estimate = sizes_of(given, config, with_plain=False)
    assert estimate.working_bytes != sizes.working_bytes
    plain = sizes_of(given, config, shape, with_plain=True)
    assert plain == sizes_of(given, config, with_plain=True)
    whole = recipe(tmp_path, memory=memory)  # in float32, of which the formula knows nothing
    assert sizes_of(whole, config, shape, with_plain=False) != sizes


def test_plain_transformers_is_left_out_with_a_reason(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen2", kv_heads=2)

    def why(memory: int = 1 << 34, **blocks: Any) -> str | None:
        given = recipe(tmp_path, **blocks)
        return why_not_plain(given, model_config(given.model, 96), memory)

    assert why() is None
    assert "at most" in str(why(data={"sequence_length": 8192}))
    assert "dropout" in str(why(model={"adapter": {"dropout": 0.1}}))
    assert why(model={"adapter": {"dropout": 0.0}}) is None
    assert "too much memory" in str(why(memory=1 << 18))
    make_model(tmp_path, "gemma2", kv_heads=2)  # whose soft-cap transformers writes out
    assert why() is None
    long = {"data": {"sequence_length": 4096}, "memory": 1 << 30}
    assert "every score of 4,096 tokens" in str(why(**long))
    make_model(tmp_path, "qwen2", kv_heads=2)
    assert why(**long) is None
