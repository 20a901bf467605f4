"""Measures one GPU: python -m benchmarks.card [--only WORDS] [--no-kernels] [--results FOLDER].

Kernels first, then steps one at a time, each in a process of its own; what is there is written
after each. With --predict nothing is measured, and no GPU is needed: what the program predicts of
the steps that were measured is written anew beside them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.card.cases import CASES, Case
from benchmarks.card.kernels import measured
from benchmarks.card.predict import predicted
from benchmarks.card.worker import TURN
from benchmarks.lab.machine import circumstances
from benchmarks.lab.results import RESULTS, ROOT, read, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="cases whose names have one of these, split by `;`")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seconds", type=float, default=300.0, help="the most for one case")
    asked = parser.parse_args()
    if asked.predict:
        write(asked.results, "card", with_predictions(read(asked.results, "card")))
        return
    words = (asked.only or "").split(";")
    chosen = {name: one for name, one in CASES.items() if any(word in name for word in words)}
    result = {**read(asked.results, "card"), "circumstances": _circumstances()}
    with tempfile.TemporaryDirectory() as folder:
        started = {name: _start(one, Path(folder) / name) for name, one in chosen.items()}
        if asked.kernels:
            result["kernels"] = measured()
            write(asked.results, "card", result)
            torch.cuda.empty_cache()
        for name, process in started.items():
            own = Path(folder) / name
            (own / TURN).touch()
            found = _ended(process, own, asked.seconds)
            one = {"case": chosen[name].record(), "device": torch.cuda.get_device_name(), **found}
            found |= {} if chosen[name].plain else predicted(chosen[name], one["device"])
            result.setdefault("steps", {})[name] = one | found
            print(f"{name}: {json.dumps(found)}", flush=True)
            write(asked.results, "card", result)


def with_predictions(result: dict[str, Any]) -> dict[str, Any]:
    """Return results with what is predicted now of each step of ours."""
    every = result["steps"]
    ours = {name: one for name, one in every.items() if not one["case"]["plain"]}
    new = {n: {**one, **predicted(Case.of(one["case"]), one["device"])} for n, one in ours.items()}
    return {**result, "steps": {**every, **new}}


def _circumstances() -> dict[str, Any]:
    card = torch.cuda.get_device_properties(0)
    return {
        **circumstances(),
        "device": card.name,
        "device_bytes": card.total_memory,
        "cuda": torch.version.cuda,
    }


def _start(case: Case, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    case.write(folder)
    command = [sys.executable, "-m", "benchmarks.card.worker", json.dumps(case.record())]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, str(folder), "cuda"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )


def _ended(process: subprocess.Popen[bytes], folder: Path, limit: float) -> dict[str, Any]:
    """Return what a case found, or why it found nothing."""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    path = folder / "found.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"error": (folder / "log").read_text()[-3000:]}


if __name__ == "__main__":
    main()
