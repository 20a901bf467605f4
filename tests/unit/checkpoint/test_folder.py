"""Checkpoint folders: which is the newest whole one, what a path names, which go."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from uspft.checkpoint.checksums import sealed, write_part
from uspft.checkpoint.folder import (
    Checkpoint,
    CheckpointError,
    delete_older,
    folder_of,
    named,
    newest,
    step_folders,
)
from uspft.written import clear_partial

PART = "part-00000-00000.safetensors"


def made(output: Path, *steps: int, summed: bool = False) -> None:
    """Checkpoints of one tensor; summed: with checksums, as a run writes them."""
    for step in steps:
        folder = folder_of(output, step)
        folder.mkdir(parents=True)
        written = write_part({"weight/x": torch.full((9,), float(step))}, folder / PART)
        state: dict[str, Any] = {
            "format": 1,
            "step": step,
            "adam_steps": step,
            "identity": {},
            "files": {"weight/x": PART},
            "sizes": {PART: written.size},
        }
        text = json.dumps(state)
        if summed:
            text = sealed({**state, "checksums": {PART: written.checksum}})
        (folder / "state.json").write_text(text)


def steps(output: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in step_folders(output / "checkpoints")]


def newest_step(output: Path) -> int | None:
    checkpoint = newest(output).checkpoint
    return checkpoint.step if checkpoint else None


def test_the_newest_is_found_and_older_ones_go(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    made(tmp_path, 50, 100, 150)
    assert newest_step(tmp_path) == 150 and newest(tmp_path).damaged == []
    delete_older(tmp_path, 2)
    assert steps(tmp_path) == [100, 150]


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    made(tmp_path, 2, 4, 6, 8)
    delete_older(tmp_path, 1, best=4)
    assert steps(tmp_path) == [4, 8]
    delete_older(tmp_path, 1, best=8)  # it is the newest itself, and the one before it goes
    assert steps(tmp_path) == [8]
    made(tmp_path, 10, 12)
    delete_older(tmp_path, 2, best=2)  # gone long since
    assert steps(tmp_path) == [10, 12]


def test_the_best_goes_when_its_follower_is_there(tmp_path: Path) -> None:
    """While the one of the new best step is written beside steps, the best before it stays."""
    made(tmp_path, 2, 4, 6)
    delete_older(tmp_path, 1, best=8)
    assert steps(tmp_path) == [2, 4, 6]
    made(tmp_path, 8)
    delete_older(tmp_path, 1, best=8)
    assert steps(tmp_path) == [8]


def test_the_last_good_one_stays_through_bad_steps(tmp_path: Path) -> None:
    made(tmp_path, 2, 4, 6, 8)
    delete_older(tmp_path, 1, best=2, good=5)
    assert steps(tmp_path) == [2, 4, 8]
    delete_older(tmp_path, 1, good=8)
    assert steps(tmp_path) == [8]
    delete_older(tmp_path, 1, good=1)  # gone long since
    assert steps(tmp_path) == [8]


def test_one_that_is_half_deleted_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill in the middle leaves it, or a file that another process keeps open on NFS."""
    made(tmp_path, 1, 2)
    unlink = os.unlink

    def fails(path: Any, **more: Any) -> None:
        if str(path).endswith(PART):
            raise OSError(errno.EBUSY, "busy", str(path))
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", fails)
    delete_older(tmp_path, 1)
    monkeypatch.undo()
    assert steps(tmp_path) == [2] and newest(tmp_path).damaged == []
    left = tmp_path / "checkpoints/.step-00000001.partial"
    assert [file.name for file in left.iterdir()] == [PART]
    clear_partial(tmp_path)
    assert not left.exists()


def test_what_a_user_copied_beside_them_is_not_touched(tmp_path: Path) -> None:
    made(tmp_path, 2, 3, 4)
    place = tmp_path / "checkpoints"
    copies = "step-best", "step-00000003-good", "step-9", "step-000000099", "best"
    for copy in copies:
        shutil.copytree(place / "step-00000003", place / copy)
    (place / "step-00000100").write_text("a file")
    assert steps(tmp_path) == [2, 3, 4] and newest_step(tmp_path) == 4
    delete_older(tmp_path, 1)
    assert steps(tmp_path) == [4]
    assert all((place / copy / "state.json").exists() for copy in copies)
    assert named(place / "step-best").step == 3  # by its own name it is as good as any


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zeroed(path: Path) -> None:
    """As a power loss leaves what was not on the disk."""
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated part": (lambda f: cut(f / PART), f"is damaged: {PART} has "),
    "part of zeros": (lambda f: zeroed(f / PART), f"is damaged: {PART}: "),
    "part gone": (lambda f: (f / PART).unlink(), f"it lacks {PART}"),
    "part without its tensor": (
        lambda f: save_file({"weight/y": torch.zeros(9)}, f / PART),
        f"{PART} holds no weight/x",
    ),
    "state empty": (lambda f: (f / "state.json").write_text(""), "state.json is not JSON"),
    "state cut": (lambda f: cut(f / "state.json"), "state.json is not JSON"),
    "state of zeros": (lambda f: zeroed(f / "state.json"), "state.json is not JSON"),
    "state no text": (lambda f: (f / "state.json").write_bytes(b"\xff\xfe"), "is not JSON"),
    "state gone": (lambda f: (f / "state.json").unlink(), "is not a complete checkpoint"),
    "state mangled": (
        lambda f: (f / "state.json").write_text('{"format": 1, "step": 3, "adam_steps": 3}'),
        "state.json has no identity",
    ),
    "state of another kind": (lambda f: (f / "state.json").write_text("[]"), "has format None"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_it_is_taken(tmp_path: Path, case: str) -> None:
    made(tmp_path, 1, 2, 3)
    damage, told = DAMAGE[case]
    damage(folder_of(tmp_path, 3))
    found = newest(tmp_path)
    assert found.checkpoint and found.checkpoint.step == 2
    (line,) = found.damaged
    assert told in line and str(folder_of(tmp_path, 3)) in line and "\n" not in line
    for place in (folder_of(tmp_path, 3), tmp_path / "checkpoints", tmp_path):
        with pytest.raises(CheckpointError) as caught:
            named(place)
        assert told in str(caught.value)
        before = f"the one before it is {folder_of(tmp_path, 2)}"
        assert (before in str(caught.value)) == (place != folder_of(tmp_path, 3))
    damage(folder_of(tmp_path, 2))
    damage(folder_of(tmp_path, 1))
    with pytest.raises(CheckpointError) as caught:
        newest(tmp_path)
    assert str(caught.value).count(told) == 3


def test_a_path_names_a_step_all_checkpoints_or_a_run(tmp_path: Path) -> None:
    made(tmp_path, 1, 2)
    assert named(folder_of(tmp_path, 1)).step == 1
    assert named(tmp_path / "checkpoints").step == named(tmp_path).step == 2
    for place, told in (("nowhere", "does not exist"), ("empty", "holds no checkpoint")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=told):
            named(tmp_path / place)


def test_a_part_that_is_damaged_after_it_was_opened(tmp_path: Path) -> None:
    made(tmp_path, 1)
    checkpoint = Checkpoint.open(folder_of(tmp_path, 1))
    assert checkpoint.tensor("weight", "x").sum() == 9
    zeroed(folder_of(tmp_path, 1) / PART)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.tensor("weight", "x")


def test_one_without_sizes_is_read_too(tmp_path: Path) -> None:
    """As they were written before sizes stood in them."""
    made(tmp_path, 1)
    file = folder_of(tmp_path, 1) / "state.json"
    state = json.loads(file.read_text())
    del state["sizes"]
    file.write_text(json.dumps(state))
    assert newest_step(tmp_path) == 1


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("file", [PART, "state.json"])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, file: str) -> None:
    """Bits all over both files; without checksums those of the tensors pass."""
    made(tmp_path, 1, 2, summed=True)
    folder = folder_of(tmp_path, 2)
    assert Checkpoint.open(folder).has_checksums and newest(tmp_path).damaged == []
    passed = 0
    for bit in range(0, 8 * (folder / file).stat().st_size, 13):
        flip(folder / file, bit)
        found = newest(tmp_path)
        assert found.checkpoint and found.checkpoint.step == 1, bit
        assert file in found.damaged[0] and str(folder) in found.damaged[0], bit
        with suppress(CheckpointError):
            passed += Checkpoint.open(folder, contents=False).step == 2
        flip(folder / file, bit)
    assert newest_step(tmp_path) == 2
    assert passed >= 9 * 32 // 13 if file == PART else passed == 0


def test_a_path_to_one_with_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    made(tmp_path, 1, 2, summed=True)
    flip(folder_of(tmp_path, 2) / PART, -1)
    told = f"is damaged: {PART}: another checksum than was written"
    with pytest.raises(CheckpointError, match=told):
        named(folder_of(tmp_path, 2))
    with pytest.raises(CheckpointError, match=f"{told}; the one before it is "):
        named(tmp_path)


def test_one_without_checksums_is_read_and_known(tmp_path: Path) -> None:
    made(tmp_path, 1)
    assert not Checkpoint.open(folder_of(tmp_path, 1)).has_checksums
