"""Rows longer than a model's positions, and the factor of a scaling that says none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.shapes import GEMMA2, LLAMA, PHI3, QWEN3, shape
from uspft.config.inputs import ModelBlock
from uspft.families import check_length, with_factor

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "scaling", "longest"),
    [
        (QWEN3, None, 40960),
        ({key: value for key, value in QWEN3.items() if key != "rope_theta"}, None, 40960),
        (QWEN3, {"rope_type": "default"}, 40960),
        (QWEN3, {"rope_type": "yarn", "factor": 4.0}, 163840),
        (QWEN3, {"rope_type": "linear", "factor": 1.5}, 61440),
        (QWEN3, {"rope_type": "linear", "factor": 61441 / 40960}, 61441),
        (LLAMA, {"rope_type": "dynamic", "factor": 2.0}, 262144),
        ({**QWEN3, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, 81920),
        (
            {**PHI3, "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4},
            None,
            40960,
        ),
        (QWEN3, YARN, 131072),
        ({**QWEN3, "rope_scaling": YARN}, None, 131072),
        (LLAMA, None, 131072),
        (
            {
                **GEMMA2,
                "model_type": "gemma3_text",
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            None,
            40960,
        ),
        (LLAMA, {**LLAMA["rope_parameters"]}, 131072),  # type: ignore[dict-item]
        (LLAMA, {**LLAMA["rope_parameters"], "factor": 32.0}, 262144),  # type: ignore[dict-item]
    ],
)
def test_the_longest_row(tmp_path: Path, config: Any, scaling: Any, longest: int) -> None:
    model = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": scaling})
    found = shape(tmp_path, config, rope_scaling=scaling)
    assert check_length(found, model, longest) == []
    ((key, what, _),) = check_length(found, model, longest + 1)
    assert key == "data.sequence_length"
    assert str(longest + 1) in what and str(longest) in what


def test_a_row_that_is_too_long_says_what_to_write(tmp_path: Path) -> None:
    plain = ModelBlock.model_validate({"name_or_path": "x"})
    assert check_length(shape(tmp_path, QWEN3), plain, 131072) == [
        (
            "data.sequence_length",
            "is 131072, and the model has 40960 positions",
            "write at most 40960, or model.rope_scaling: {rope_type: yarn, factor: 4.0}",
        )
    ]
    scaled = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": YARN})
    assert check_length(shape(tmp_path, QWEN3), scaled, 2**18) == [
        (
            "data.sequence_length",
            "is 262144, and model.rope_scaling reaches 131072 positions (32768 x 4)",
            "write at most 131072, or model.rope_scaling.factor: 8.0",
        )
    ]


LONG = {"rope_type": "longrope", "short_factor": (1.0,) * 64, "long_factor": (2.0,) * 64}


@pytest.mark.parametrize(
    ("config", "scaling", "length", "factor"),
    [
        (QWEN3, {"rope_type": "yarn"}, 61440, 1.5),
        (QWEN3, {"rope_type": "linear"}, 81920, 2.0),
        (QWEN3, {"rope_type": "yarn"}, 512, 1.0),
        (QWEN3, {"rope_type": "yarn", "original_max_position_embeddings": 32768}, 65536, 2.0),
        (QWEN3, {"rope_type": "dynamic"}, 81920, 2.0),
        (QWEN3, LONG, 81920, 2.0),
        (LLAMA, {"rope_type": "yarn"}, 262144, 32.0),
        (LLAMA, {"rope_type": "dynamic"}, 262144, 2.0),
        (
            LLAMA,
            {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            65536,
            8.0,
        ),
        (QWEN3, {"rope_type": "yarn", "factor": 4.0}, 512, 4.0),
    ],
)
def test_a_factor_that_is_left_out(
    tmp_path: Path, config: Any, scaling: Any, length: int, factor: float
) -> None:
    model = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": scaling})
    there = shape(tmp_path, config, rope_scaling=scaling)
    assert check_length(there, model, length) == []
    filled = with_factor(model, there, length)
    assert filled.rope_scaling == {**scaling, "factor": factor}
    assert check_length(there, filled, length) == []


def test_nothing_is_filled_in_where_no_scaling_is_asked_for(tmp_path: Path) -> None:
    for scaling in (None, {"rope_type": "default"}):
        model = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": scaling})
        assert with_factor(model, shape(tmp_path, QWEN3), 81920) == model


def test_longrope_has_a_factor_for_each_pair(tmp_path: Path) -> None:
    def problems(config: Any, **lists: Any) -> list[Any]:
        asked = {**LONG, **lists}
        model = ModelBlock.model_validate({"name_or_path": "x", "rope_scaling": asked})
        return check_length(shape(tmp_path, config, rope_scaling=asked), model, 40960)

    assert problems(QWEN3) == []
    ((key, what, remedy),) = problems(QWEN3, long_factor=(1.0,) * 63)
    assert key == "model.rope_scaling.long_factor" and "63" in what and "64" in remedy
    half = {**PHI3, "rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}
    assert len(problems(half)) == 2
    assert problems(half, long_factor=(1.0,) * 32, short_factor=(1.0,) * 32) == []
