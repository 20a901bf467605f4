"""The step that is predicted for a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT
from uspft.prepare.examine import examine
from uspft.prepare.make_plan import prices_of, step_of


@pytest.mark.parametrize(
    ("device", "asked", "overlaps"),
    [
        ("cuda", None, True),
        ("cuda", False, False),
        ("cpu", None, False),
        ("cpu", True, False),
    ],
)
def test_stage_3_overlaps_where_there_are_streams(
    device: str, asked: bool | None, overlaps: bool, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    tree = {
        "model": {"config": str(ROOT / "configs/models/quickstart.json")},
        "data": {"train": str(tmp_path / "d.jsonl"), "sequence_length": 64},
        "deepspeed": {"zero_optimization": {"stage": 3, "overlap_comm": asked}},
        "training": {"steps": 1, "global_batch_size": 2},
        "launch": {"device": device, "processes": 2},
    }
    if asked is None:
        tree["deepspeed"] = {"zero_optimization": {"stage": 3}}
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(tree))
    assert step_of(examine(path, [], 1, None, trains=False)).hides == overlaps


TENSOR = {"model_parallel": 2}
TOKENS = {**TENSOR, "use_seq_parallel": True}
RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}


def row_bytes(folder: Path, *layouts: dict[str, Any]) -> list[float]:
    """Of rows of 64, 128, … tokens on four ranks, each in its layout; the bytes of one token of the
    first."""
    (folder / "d.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    listed = [{"max_length": 64 << n, **layout} for n, layout in enumerate(layouts)]
    tree = {
        "model": {"config": str(ROOT / "configs/models/quickstart.json"), "dtype": "float32"},
        "data": {"train": str(folder / "d.jsonl"), "sequence_length": listed[-1]["max_length"]},
        "parallel_config": {"strategies": listed},
        "training": {"steps": 1, "global_batch_size": 4},
        "launch": {"device": "cpu", "processes": 4},
    }
    path = folder / "r.yaml"
    path.write_text(json.dumps(tree))
    prices = prices_of(examine(path, [], 1, None))
    assert prices
    return [each / prices.row_bytes[0] * 64 for each in prices.row_bytes]


def test_a_row_takes_its_tokens_and_what_the_tensor_degree_leaves_of_each(tmp_path: Path) -> None:
    """The bound was once tokens alone: groups of whole matrices then took as many as the longest
    row has, each of which takes more where no matrix is split."""
    first, two, four = row_bytes(tmp_path, {}, RING, {**RING, "context_parallel": 4})
    assert first == 64 and 64 <= two < 64 * 1.5 and 64 <= four < 64 * 1.5
    assert row_bytes(tmp_path, {}, TOKENS) == pytest.approx([64, 64], rel=0.1)
    _, some = row_bytes(tmp_path, {}, TENSOR)
    assert 64 * 1.1 < some < 128 * 0.9
    _, more, both = row_bytes(tmp_path, {}, TENSOR, {**TENSOR, **RING})
    assert more == both == some
