"""`check` of a checkpoint reads every byte, loads nothing, and tells of each what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.checkpoint.test_folder import PART, flip, made
from uspft.__main__ import main
from uspft.checkpoint.folder import folder_of


def test_each_checkpoint_of_a_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, 1, 2, 3, summed=True)
    made(tmp_path, 4)
    for place in (tmp_path, tmp_path / "checkpoints"):
        assert main(["check", str(place)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 4 and all("every checksum is right" in line for line in lines[:3])
        assert f"{folder_of(tmp_path, 4)}: step 4, 1 files: whole by their lengths" in lines[3]
    flip(folder_of(tmp_path, 2) / PART, 800)
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    (line,) = said.err.splitlines()
    assert f"{folder_of(tmp_path, 2)} is damaged: {PART}: another checksum" in line
    assert main(["check", str(folder_of(tmp_path, 1))]) == 0
    assert "step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "holds no checkpoint; name a recipe, a checkpoint"),
        (["seed=1"], "command line: seed=1: a checkpoint is checked, and not a recipe"),
        (["--ranks", "2"], "command line: --ranks: a checkpoint is checked"),
    ],
)
def test_what_is_no_checkpoint_and_what_it_does_not_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["check", str(tmp_path), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("command line: ") and told in line
