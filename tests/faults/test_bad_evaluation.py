"""Evaluation that cannot be: refused before a rank starts, by `check` too where no data is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.refused import Ground

GOOD = '{"input_ids": [5, 6, 7]}\n'
EVERY, ROWS = "training.eval_every_steps", "training.eval_micro_batch_size"

# By what is wrong: changes to the good recipe, the key, words of its line.
RECIPES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "steps alone": ({EVERY: 5}, EVERY, ("is 5, and there is no `data.eval`", "write data.eval")),
    "rows alone": ({ROWS: 2}, ROWS, ("is 2, and there is no `data.eval`", "write data.eval")),
    "no file": ({"data.eval": "no.jsonl"}, "data.eval.path", ("no.jsonl does not exist",)),
    "no second file": (
        {"data.eval": ["good.jsonl", "no.jsonl"]},
        "data.eval[1].path",
        ("no.jsonl does not exist", "name a file"),
    ),
    "no sets": ({"data.eval": []}, "data.eval", ("an empty list",)),
    "weight": (
        {"data.eval": [{"path": "good.jsonl", "weight": 2}]},
        "data.eval[0].weight",
        ("is 2, and evaluation takes each sample once", "leave it out"),
    ),
    "twice": (
        {"data.eval": ["good.jsonl", {"path": "good.jsonl"}]},
        "data.eval[1]",
        ("is `good.jsonl` again, as data.eval[0]", "keep one"),
    ),
    "never": ({"data.eval": "good.jsonl", EVERY: 0}, EVERY, ("is 0, out of range",)),
    "another tool's key": (
        {"data.eval": "good.jsonl", "training.eval_steps": 3},
        "training.eval_steps",
        ("eval_every_steps",),
    ),
}


@pytest.mark.parametrize("verb", ["train", "check"])
@pytest.mark.parametrize("case", RECIPES)
def test_a_wrong_recipe(
    ground: Ground, capsys: pytest.CaptureFixture[str], case: str, verb: str
) -> None:
    changes, key, words = RECIPES[case]
    (ground.folder / "good.jsonl").write_text(GOOD)
    ground.write(changes)
    found = ground.call(capsys, verb, str(ground.path))
    assert len(found.lines) == 1
    found.about(key, *words)


def test_a_wrong_set(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    (ground.folder / "good.jsonl").write_text(GOOD)
    bad = ground.folder / "bad.jsonl"
    bad.write_text("")
    ground.write({"data.eval": ["good.jsonl", "bad.jsonl"]})
    assert ground.call(capsys).lines == [
        "bad.jsonl: holds no sample; give it data, or leave it out"
    ]
    ground.write({"data.eval": ["good.jsonl", "bad.jsonl"], "data.on_bad_sample": "skip"})
    ground.call(capsys).about("data.eval[1]", "bad.jsonl", "no sample is left", "mend the records")
    bad.write_text(json.dumps({"input_ids": [5, 6], "labels": [-100, -100]}) + "\n")
    ground.write({"data.eval": "bad.jsonl"})
    ground.call(capsys).about("data.eval", "no token of any sample is trained", "check the labels")
    bad.write_text(GOOD + json.dumps({"input_ids": [5] * 33}) + "\n")
    (line,) = ground.call(capsys).lines
    assert line.startswith("bad.jsonl:2: 33 tokens, a row has 32; set data.overlong")


def test_a_good_set_is_let_through(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    from uspft.__main__ import main

    (ground.folder / "good.jsonl").write_text(GOOD)
    ground.write({"data.eval": "good.jsonl", EVERY: 5, ROWS: 3})
    assert main(["check", str(ground.path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "evaluation: good.jsonl, after every 5 steps and at the end" in said
    assert main([str(ground.path)]) == 1 and ground.started
    assert "evaluation data good.jsonl: 1 sample, 3 tokens" in capsys.readouterr().out
