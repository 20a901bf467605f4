"""The sizes of layers with a state are those that transformers takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.shapes import PLAIN, shape
from uspft.families import FAMILIES, state_sizes

OWN = {
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 3,
}


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if family.states])
@pytest.mark.parametrize(
    "given", [{}, OWN, {"linear_num_key_heads": 8}], ids=["bare", "own", "few"]
)
def test_sizes_are_those_of_transformers(kind: str, given: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = state_sizes(shape(tmp_path, {**PLAIN, "model_type": kind, **given}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours
    assert ours.keys == theirs.linear_num_key_heads
    assert ours.values == theirs.linear_num_value_heads
    assert ours.key_dim == theirs.linear_key_head_dim
    assert ours.value_dim == theirs.linear_value_head_dim
    assert ours.taps == theirs.linear_conv_kernel_dim


def test_a_rank_has_whole_key_heads(tmp_path: Path) -> None:
    sizes = state_sizes(shape(tmp_path, {**PLAIN, "model_type": "qwen3_5_text", **OWN}))
    assert sizes and sizes.channels == 2 * 6 * 24 + 12 * 40
    assert sizes.on(4) == sizes._replace(keys=2, values=4)
    assert state_sizes(shape(tmp_path, {**PLAIN, "model_type": "llama"})) is None
