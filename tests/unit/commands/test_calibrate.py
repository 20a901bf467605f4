"""The command that measures: a file that a run takes, never over one that is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.models import make_documents, make_model
from uspft.__main__ import main
from uspft.calibration.sweeps import SIZES
from uspft.planner.machine import read_hardware


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    make_model(tmp_path / "model", "llama")
    given = {
        "model": {"name_or_path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(make_documents(tmp_path / "d.jsonl", [32, 20], masked=[0.0]).path)},
        "training": {"steps": 1, "global_batch_size": 2},
        "launch": {"device": "cpu", "processes": 2},
        "output_dir": str(tmp_path / "out"),
    }
    given["data"] |= {"sequence_length": 32}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(given))
    return tmp_path / "r.yaml"


def test_two_processes_write_a_file_that_the_recipe_takes(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate = Forked(["calibrate", str(recipe)], recipe.parent)
    out, err = calibrate.communicate(timeout=HANG_SECONDS)
    assert calibrate.returncode == 0, err
    file = recipe.parent / "out" / "hardware.yaml"
    found = read_hardware(file)
    assert (found.name, found.ranks_per_host, found.products.dtype) == ("hardware", 2, "float32")
    assert found.inside.all_to_all and found.inside.point_to_point
    assert "all_gather inside" in out and "worst" in out and f"written: {file}" in out
    assert len(SIZES["cpu"].messages) == 7 and "  7" in out
    told = [line for line in out.splitlines() if " s: measuring " in line]
    assert len(told) == 5 and "links, 1 of 1: groups of 2 inside a host" in told[1]
    assert found.measured and found.measured.figures[-2:] == ("inside", "hide")
    assert main(["check", str(recipe), f"launch.hardware={file}"]) == 0
    assert "hardware: hardware (as launch.hardware says)" in capsys.readouterr().out
    assert main(["plan", str(recipe), "--hardware", str(file)]) == 0
    assert f"machine: measured on {found.measured.date} (uspft " in (
        page := capsys.readouterr().out
    )
    assert "attention): memory, products, attention, inside, hide; layouts within 5 %" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["to={folder}/r.yaml"], "r.yaml` is there already"),
        (["to={folder}/r.yaml/x.yaml"], "r.yaml is not a folder; write to=FILE"),
        (["to=a", "to=b"], "command line: to: is given twice"),
        (["to="], "command line: to: names no file"),
        (["tu=a"], "command line: tu: unknown key"),
        (["--ranks", "2"], "calibrate takes no such option; write launch.processes=N"),
        (["--hardware=h100"], "calibrate takes no such option; write launch.hardware=NAME"),
    ],
)
def test_wrong_words_are_refused_before_ranks_start(
    words: list[str],
    told: str,
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("uspft.commands.calibrate.start_ranks", lambda *a, **k: pytest.fail())
    before = {path: path.read_bytes() for path in recipe.parent.glob("*.yaml")}
    given = [word.format(folder=recipe.parent) for word in words]
    assert main(["calibrate", str(recipe), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and "; " in line
    assert {path: path.read_bytes() for path in recipe.parent.glob("*.yaml")} == before
