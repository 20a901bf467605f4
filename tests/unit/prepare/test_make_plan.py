"""The step that is predicted for a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import ROOT
from uspft.prepare.examine import examine
from uspft.prepare.make_plan import step_of


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
