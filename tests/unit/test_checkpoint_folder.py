"""Checkpoint folders: which is the newest, which go, and that nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from uspft.checkpoint.folder import (
    Checkpoint,
    CheckpointError,
    delete_older,
    folder_of,
    newest,
    set_aside,
    set_aside_after,
)


def made(output: Path, *steps: int) -> None:
    for step in steps:
        folder = folder_of(output, step)
        folder.mkdir(parents=True)
        state = {"format": 1, "step": step, "adam_steps": step, "identity": {}, "files": {}}
        (folder / "state.json").write_text(json.dumps(state))


def steps(output: Path) -> list[int]:
    return sorted(int(f.name[5:]) for f in (output / "checkpoints").glob("step-*"))


def test_the_newest_is_found_and_older_ones_go(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    made(tmp_path, 50, 100, 150)
    found = newest(tmp_path)
    assert found and found.step == 150
    delete_older(tmp_path, 2)
    assert steps(tmp_path) == [100, 150]


def test_going_on_moves_later_checkpoints_and_exports_aside(tmp_path: Path) -> None:
    made(tmp_path, 50, 100, 150)
    for name in ("hf", "adapter"):
        (tmp_path / name).mkdir()
    place = set_aside_after(tmp_path, 50)
    assert steps(tmp_path) == [50] and not (tmp_path / "hf").exists()
    assert place and sorted(f.name for f in place.iterdir()) == ["adapter", "checkpoints", "hf"]
    assert sorted(f.name for f in (place / "checkpoints").iterdir()) == [
        "step-00000100",
        "step-00000150",
    ]
    assert set_aside_after(tmp_path, 50) is None


def test_what_an_earlier_run_left_is_moved_and_never_twice_to_one_place(tmp_path: Path) -> None:
    assert set_aside(tmp_path) is None
    for _ in range(3):
        (tmp_path / "metrics.jsonl").write_text("x")
        (tmp_path / "logs").mkdir(exist_ok=True)
        place = set_aside(tmp_path, ["logs"])
        assert place and (place / "metrics.jsonl").read_text() == "x"
    assert len(list(tmp_path.glob("earlier-*"))) == 3
    assert (tmp_path / "logs").is_dir()


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    made(tmp_path, 1)
    folder = folder_of(tmp_path, 1)
    state = json.loads((folder / "state.json").read_text())
    state["files"] = {"weight/x": "part-00000-00000.safetensors"}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="lacks part-00000-00000"):
        Checkpoint.open(folder)
