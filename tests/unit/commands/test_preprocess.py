"""`preprocess` leaves in the cache what a run then uses, and says where that is."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.data_cases import CHAT, TOKENIZER, write_lines
from tests.support.launch import ROOT
from uspft.__main__ import main
from uspft.prepare.examine import examine
from uspft.prepare.host import Invocation
from uspft.prepare.make_job import prepare_job


def recipe_in(folder: Path) -> Path:
    data = {
        "train": str(write_lines(folder / "a.jsonl", [CHAT] * 9)),
        "eval": str(write_lines(folder / "b.jsonl", [CHAT] * 2)),
        "sequence_length": 32,
    }
    tree = {
        "output_dir": str(folder / "out"),
        "model": {
            "config": str(ROOT / "configs/models/quickstart.json"),
            "tokenizer": str(TOKENIZER),
            "dtype": "float32",
        },
        "data": data,
        "training": {"steps": 2, "global_batch_size": 2},
        "launch": {"device": "cpu"},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_a_run_uses_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_in(tmp_path)
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert main(["preprocess", str(path)]) == 0
    again = f"uspft preprocess {path} --clean"
    said = capsys.readouterr().out
    assert "tokenised in " in said and " tokens/s, up to " in said
    place = Invocation("uspft", cache=home / "uspft")
    folder = place.data_cache(examine(path, [], 1, None).recipe)
    assert len(list(folder.iterdir())) == 2
    assert f"cache: {folder} holds " in said and f" of 2 data sets; {again} empties it" in said
    monkeypatch.setattr("uspft.data.corpus.prepare.build", None)  # nothing may be made again
    job = prepare_job(examine(path, [], 1, None), place, Console(quiet=True)).job
    for prepared in (job.corpus, *job.evaluation.values()):
        assert f"prepared: {prepared} (" in said
    assert main(["preprocess", str(path)]) == 0
    assert "all of it was in the cache" in capsys.readouterr().out
    (folder / "mine").mkdir()
    assert main(["preprocess", str(path), "--clean"]) == 0
    assert " of 2 data sets, now gone" in capsys.readouterr().out
    assert [entry.name for entry in folder.iterdir()] == ["mine"]
    assert not (tmp_path / "out").exists()


def test_the_cache_of_an_override_is_the_one_that_is_emptied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, mine = recipe_in(tmp_path), f"data.cache_dir={tmp_path / 'my cache'}"
    assert main(["preprocess", str(path), mine]) == 0
    assert f"preprocess {path} '{mine}' --clean empties it" in capsys.readouterr().out
    left = tmp_path / "my cache" / f".{'b' * 24}.{'c' * 32}.partial" / ("b" * 24)
    left.mkdir(parents=True)
    (left / "tokens.int32").write_bytes(bytes(5000))
    os.utime(left.parent, (0, 0))
    assert main(["preprocess", str(path), mine, "--clean"]) == 0
    assert " of 3 data sets, 1 of them unfinished, now gone" in capsys.readouterr().out
    assert not list((tmp_path / "my cache").iterdir())


def test_a_log_is_told_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("uspft.prepare.make_job.TOLD_SECONDS", 0.0)
    mine = f"data.cache_dir={tmp_path / 'mine'}"
    assert main(["preprocess", str(recipe_in(tmp_path)), mine]) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"tokenising: 100% after \d+ s", said[0])


def test_a_stop_is_no_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("uspft.commands.preprocess.prepare_data", stopped)
    assert main(["preprocess", str(recipe_in(tmp_path))]) == 130
    assert capsys.readouterr().err == "stopped\n"
