"""README's first command: what it teaches, what it writes, and what a person sees."""

from __future__ import annotations

import math
import re
import subprocess
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT, environment, records

COMMAND = "./launch.sh recipes/quickstart.yaml"
LAYOUT = "layout: 4 processes, each row shared by 4 (Ulysses 2 × ring 2), 1 row at a time; ZeRO-3"
STEP = re.compile(
    r"step (\d+)/(\d+)  loss \d+\.\d{4}  rate \d\.\d\de[+-]\d\d  gradient norm [\d.e+-]+  "
    r"epoch \d+\.\d\d  [\d,]+ tokens/s  \d\d:\d\d:\d\d left"
)
WRITTEN = {"recipe.yaml", "metrics.jsonl", "checkpoints", "hf", "environment.json", "logs"}
WRITTEN |= {"report.html"}


def command(folder: Path) -> list[str]:
    """README's first command, its output in folder/out."""
    readme = (ROOT / "README.md").read_text()
    first = readme.partition("```\n")[2].splitlines()[0]
    assert first.partition("#")[0].strip() == COMMAND
    return [*COMMAND.split(), f"output_dir={folder}/out"]


def quickstart(folder: Path) -> list[str]:
    """The lines that a person sees of it."""
    done = subprocess.run(
        command(folder),
        cwd=ROOT,
        env=environment(XDG_CACHE_HOME=str(folder / "cache")),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def is_complete(folder: Path, lines: list[str], steps: int) -> None:
    """What a run of the quickstart owes, however long it is."""
    output = folder / "out"
    shown = [match for line in lines if (match := STEP.fullmatch(line))]
    said = [int(match[1]) for match in shown]
    assert said == sorted(set(said)), "a step stands there once: only rank 0 speaks"
    assert said[-1] == steps and {int(match[2]) for match in shown} == {steps}
    for start in (LAYOUT, "done: loss ", "try next:   ./launch.sh recipes/quickstart.yaml "):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    for where in ("hf", "checkpoints", "metrics.jsonl", "report.html"):
        assert sum(str(output / where) in line for line in lines) == 1, (where, lines)
    assert {path.name for path in output.iterdir()} == WRITTEN
    last = f"step-{steps:08d}"
    assert (output / "checkpoints/latest").read_text() == f"{last}\n"
    assert (output / "checkpoints" / last).is_dir()
    logs = sorted((output / "logs").iterdir())
    assert [log.name for log in logs] == [f"rank-{rank}.log" for rank in range(4)]
    assert [log.read_text() for log in logs] == [""] * 4
    found = records(folder)
    assert [record["step"] for record in found] == list(range(1, steps + 1))
    assert {record["strategy"] for record in found} == {"ulysses2-ring2"}
    page = (output / "report.html").read_text()
    assert f"<td>1 to {steps}, {steps} of them logged</td>" in page
    assert "<td>sent: all_to_all</td><td>3 MiB</td><td>3 MiB</td><td>1</td>" in page


def test_what_a_person_sees_of_three_steps(tmp_path: Path) -> None:
    """Of a folder of a few files: to read all of Python's takes longer than the steps."""
    words = [*command(tmp_path)[1:], "training.steps=3", "data.train=recipes"]
    process = Forked(words, tmp_path, USPFT_PROGRAM=COMMAND.split()[0])
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, err) == (0, "")
    lines = out.splitlines()
    is_complete(tmp_path, lines, 3)
    told = ("data: ", "layout: ", "parameters: ", "step ", "done: ", "model: ", "checkpoint: ")
    told += ("hardware: ", "run: ", "waiting: ", "numbers: ", "try next: ", "report: ")
    assert [line for line in lines if not line.startswith(told)] == []


@pytest.mark.full
def test_the_quickstart_learns(tmp_path: Path) -> None:
    started = time.monotonic()
    lines = quickstart(tmp_path)
    assert time.monotonic() - started < 300
    found = records(tmp_path)
    steps = len(found)
    assert steps >= 100
    is_complete(tmp_path, lines, steps)
    assert min(record["tokens"] / record["rows"] for record in found) >= 4096
    losses = [record["loss"] for record in found]
    tenth = steps // 10
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    assert last <= math.log(8192) - 2.0 and last < first
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/hf")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out/hf")("import os", return_tensors="pt")
    assert model(input_ids=tokens["input_ids"]).logits.shape[-1] == 8192
