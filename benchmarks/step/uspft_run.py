"""uspft's side of the step benchmark: a recipe, trained as a user trains it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.step.case import (
    BETAS,
    CLIP,
    EPS,
    LEARNING_RATE,
    WARM_UP,
    WEIGHT_DECAY,
    Case,
    Measured,
    run_logged,
)

SPLITS: dict[str, dict[str, Any]] = {
    "ulysses_cp": {},
    "planned_cp": {},
    "hybrid_cp": {"ulysses_degree_in_cp": 1},
    "ring_cp": {},
    "allgather_cp": {},
}
"""These algorithms run on two processes, with what each needs; hybrid_cp is a ring of two here."""


def recipe(case: Case, output: Path, algorithm: str | None) -> dict[str, Any]:
    """This is for two processes that share each row, or one alone without ZeRO (algorithm None)."""
    parallel: dict[str, Any] = {}
    if algorithm:
        parallel = {"context_parallel": 2, "context_parallel_algo": algorithm, **SPLITS[algorithm]}
    return {
        "output_dir": str(output),
        "model": {"name_or_path": str(case.model), "dtype": "float32"},
        "data": {
            "train": str(case.rows),
            "sequence_length": case.tokens,
            "packing": "none",
            "shuffle": False,
        },
        "parallel_config": parallel,
        "deepspeed": {"zero_optimization": {"stage": 3 if algorithm else 0}},
        "optimizer": {
            "learning_rate": LEARNING_RATE,
            "betas": list(BETAS),
            "eps": EPS,
            "weight_decay": WEIGHT_DECAY,
        },
        "lr_schedule": {"type": "constant", "warmup_ratio": 0.0},
        "training": {"steps": case.all_steps, "global_batch_size": 1, "max_grad_norm": CLIP},
        "memory": {"gradient_checkpointing": False},
        "checkpoint": {"every_steps": None},
        "export": {"huggingface": False},
        "launch": {"device": "cpu", "processes": 2 if algorithm else 1},
    }


def run_uspft(
    case: Case, engine: str, algorithm: str | None, folder: Path, environment: dict[str, str]
) -> Measured:
    """This trains in folder, which must not exist yet; raises RuntimeError."""
    folder.mkdir(parents=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(case, folder / "out", algorithm)))
    run_logged([sys.executable, "-m", "uspft", "train", str(path)], environment, folder / "log")
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return Measured(
        engine,
        [record["step_seconds"] for record in records[WARM_UP:]],
        [record["loss"] for record in records],
        [record["grad_norm"] for record in records],
    )
