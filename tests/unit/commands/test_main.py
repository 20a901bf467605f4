"""`plan` and `report` predict without torch and `check` refuses without it: it takes seconds.
The help of each verb."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from uspft.commands.arguments import HOSTFILE, OPTIONS, VERBS
from uspft.commands.main import main

HEAVY = ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets")
RECIPE = """
model: {name_or_path: meta-llama/Llama-3.1-8B, tokenizer: org/name}
data: {train: org/data, format: text, sequence_length: 8k}
parallel_config: {context_parallel: 2, context_parallel_algo: auto}
training: {steps: 1, global_batch_size: 8}
launch: {device: cuda, hardware: h100}
"""
CODE = """
import json, sys
from uspft.commands.main import main
imported = {}
def told(what):
    imported[what] = [name for name in sys.argv[3:] if name in sys.modules]
import uspft.commands.plan, uspft.commands.check, uspft.commands.report
told("imports")
assert main(["plan", sys.argv[1], "--ranks", "16", "--top", "2"]) == 0
told("plan")
assert main(["report", sys.argv[2]]) == 0
told("report")
assert main(["check", sys.argv[1], "--ranks", "16", "parallel_config.model_parallel=3"]) == 2
told("refused")
assert main(["check", sys.argv[1], "--ranks", "16"]) == 0
told("check")
print(json.dumps(imported))
"""


def test_plan_report_and_what_check_refuses_import_no_torch(tmp_path: Path) -> None:
    """A check of a model builds it, and imports torch for that."""
    (recipe := tmp_path / "recipe.yaml").write_text(RECIPE)
    (output := tmp_path / "out").mkdir()
    (output / "recipe.yaml").write_text(f"{RECIPE[:-2]}, processes: 8}}\n")
    (output / "environment.json").write_text('{"ranks": 16}')
    (output / "metrics.jsonl").write_text('{"step": 1, "learning_rate": 1, "loss": 2}\n')
    words = [sys.executable, "-c", CODE, str(recipe), str(output), *HEAVY]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout.splitlines()[-1])
    assert imported.pop("check")[:2] == ["torch", "transformers"]  # else nothing would show
    assert imported == {"imports": [], "plan": [], "report": [], "refused": []}
    page = (output / "report.html").read_text()
    assert re.search(r"seconds of a step</td><td>[\d.]+</td>", page), "nothing was predicted"


def test_what_is_started_in_another_encoding_goes_on_in_utf8() -> None:
    own = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    words = [sys.executable, "-m", "uspft", "recipes", "né"]
    done = subprocess.run(words, capture_output=True, check=False, env={**os.environ, **own})
    assert done.returncode == 2 and "né: is no shipped recipe" in done.stderr.decode()


def test_a_folder_that_is_no_more_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["check", "recipe.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "the folder in which the command runs is no more; change to one that exists"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_is_its_usage_and_says_every_option(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    usage, *options = out.split("\n  -")
    named = {f"-{line.split()[0]}" for line in options}
    taken = {
        *OPTIONS.get(verb, ()),
        *({HOSTFILE} if verb in ("train", "verify", "calibrate") else ()),
    }
    assert named == taken and all(len(line.split()) > 1 for line in options)
    assert usage.startswith("usage: ") and all(name in usage for name in taken - {HOSTFILE})
    assert not any(f" {other} " in usage for other in {*VERBS} - {verb, "recipes"})
    assert re.findall(r"\n  (\w+=) +\S", out) == re.findall(r"\[(\w+=)[A-Z]", out)
    if taken:
        assert main([verb, "x.yaml", "--fast"]) == 2
        wanted = capsys.readouterr().err.partition(" takes ")[2].partition("; ")[0]
        assert {*wanted.split(", ")} == taken
