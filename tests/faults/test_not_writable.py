"""Folders that a run could not write to, and a folder in a file's place: refused before a run."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

from tests.support.refused import Ground
from uspft.__main__ import main


def test_folders_that_cannot_be_written(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    (ground.folder / "file").write_text("")
    for key in ("output_dir", "data.cache_dir"):
        for name in ("file", "file/below/it"):
            ground.write({key: name})
            for verb in ("train", "check"):
                found = ground.call(capsys, verb, str(ground.path))
                found.about(key, f"`{name}` cannot be written", f"{ground.folder}/file is not")
    ground.write({"output_dir": "a" * 300, "data.train": "b" * 300})
    found = ground.call(capsys)
    found.about("output_dir", "File name too long")
    found.about("data.train.path", "does not exist")
    (ground.folder / "out").mkdir()
    (ground.folder / "out/logs").write_text("")
    for verb in ("train", "check"):
        ground.write({"output_dir": "/proc/uspft"})  # root has every permission there, in vain
        found = ground.call(capsys, verb, str(ground.path))
        found.about("output_dir", "`/proc/uspft` cannot be written", "name another")
        ground.write({"output_dir": "out"})
        found = ground.call(capsys, verb, str(ground.path))
        found.about("output_dir", "`out/logs` cannot be written", "out/logs is not a folder")


def test_a_cache_that_cannot_be_written(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    found = ground.call(capsys, "check", str(ground.path))
    found.about("data.cache_dir", "`/proc/cache/uspft` cannot be written", "name another folder")
    ground.write({"data.cache_dir": str(ground.folder)})
    assert main(["check", str(ground.path)]) == 0


def test_a_read_only_mount_is_named_and_may_hold_the_inputs(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system as it answers where another folder is mounted without the right to write."""
    mounted = ground.folder.parent / "mounted"
    shutil.copytree(ground.recipe["model"]["name_or_path"], mounted / "model")
    of_mount = os.statvfs

    def read_only(place: Any) -> Any:
        found = of_mount(place)
        if str(place).startswith(str(mounted)):
            fields = [*found]
            fields[8] |= os.ST_RDONLY
            return os.statvfs_result(fields)
        return found

    monkeypatch.setattr(os, "statvfs", read_only)
    for key in ("output_dir", "data.cache_dir"):
        ground.write({key: str(mounted / "new")})
        for verb in ("train", "check"):
            found = ground.call(capsys, verb, str(ground.path))
            told = f"`{mounted}/new` cannot be written: {mounted} is on a read-only mount"
            found.about(key, told, "name another folder")
    ground.write({"model.name_or_path": str(mounted / "model")})
    assert main(["check", str(ground.path)]) == 0


def test_a_folder_as_template(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    ground.write({"data.chat_template": "."})
    for verb in ("train", "check"):
        found = ground.call(capsys, verb, str(ground.path))
        found.about("data.chat_template", "is a folder, and a template is one file", "name the")
