"""The runs of the convergence experiment: which layouts train on which rows, and their losses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.convergence.ranks import train_all
from benchmarks.convergence.rows import rows_of
from benchmarks.lab.results import ROOT
from uspft.data.corpus.prepare import prepare
from uspft.job import Job
from uspft.prepare.examine import examine

RANKS = 4
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
    "head_dim": 16,
}
"""The model differs from configs/models/quickstart.json in being deeper, and narrow enough for two
cores."""


@dataclass(frozen=True)
class Curve:
    """A curve is one run: its layout, and whether the rows of a step are taken backwards."""

    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    backwards: bool = False
    whole: bool = False  # runs all the steps


def _shared(algorithm: str, **more: int) -> dict[str, Any]:
    return {"context_parallel": RANKS, "context_parallel_algo": algorithm, **more}


BASE = Curve("data parallel 4", whole=True)
YARDSTICK = Curve("data parallel 4, backwards", backwards=True, whole=True)
CURVES = (
    BASE,
    YARDSTICK,
    Curve("Ulysses 2 × ring 2", _shared("hybrid_cp", ulysses_degree_in_cp=2), whole=True),
    Curve("Ulysses 4", _shared("ulysses_cp")),
    Curve("ring 4", _shared("ring_cp")),
    Curve("all-gather 4", _shared("allgather_cp")),
    Curve("planned 4", _shared("planned_cp", ulysses_degree_in_cp=1)),
    Curve("Ulysses 2 × planned 2", _shared("planned_cp", ulysses_degree_in_cp=2)),
)


def losses_of(kind: str, steps: int, others: int, folder: Path) -> dict[str, list[float]]:
    """This returns the loss of every step, by curve, and trains what folder does not have yet.

    steps: of the curves that run the whole; others: of the other curves.
    """
    work = folder / kind
    work.mkdir(parents=True, exist_ok=True)
    data = rows_of(kind, work)
    jobs: list[tuple[Path, bool]] = []
    outputs = {}
    for number, curve in enumerate(CURVES):
        length = steps if curve.whole else others
        outputs[curve.name] = output = work / f"run-{number}-{length}"
        if len(_losses(output)) < length:
            jobs.append((_job(curve, length, data, output), curve.backwards))
    if jobs:
        train_all(jobs, RANKS)
    return {name: _losses(output) for name, output in outputs.items()}


def _job(curve: Curve, steps: int, data: dict[str, Any], output: Path) -> Path:
    """A folder that the ranks read the job from."""
    recipe = {
        "output_dir": str(output),
        "model": {
            "config": str(ROOT / "configs" / "models" / "quickstart.json"),
            "overrides": SHAPE,
            "tokenizer": str(ROOT / "data" / "tokenizer"),
            "dtype": "float32",
        },
        "data": {"sequence_length": 1024, **data},
        "parallel_config": curve.parallel,
        "optimizer": {"learning_rate": 1e-3},
        "lr_schedule": {"type": "constant", "warmup_steps": 30},
        "training": {"steps": steps, "global_batch_size": 4},
        "memory": {"gradient_checkpointing": False},
        "checkpoint": {"every_steps": None},
        "export": {"huggingface": False},
        "launch": {"device": "cpu", "processes": RANKS},
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / "written.yaml"
    path.write_text(yaml.safe_dump(recipe))
    (output / "metrics.jsonl").unlink(missing_ok=True)
    found = examine(path, [], 1, None).recipe
    corpus = prepare(found.data, found.model.tokenizer, 8192, output.parent / "cache")
    Job(found, corpus, steps, {}).write(output)
    return output


def _losses(output: Path) -> list[float]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines]
