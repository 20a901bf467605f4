"""What steps lose to saves that are written in turn with them, and beside them."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.lab.results import ROOT

WIDTH, MLP, VOCABULARY, ROW = 1024, 2816, 1024, 64
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * MLP
STATE_BYTES = 12
"""Of a parameter in a checkpoint."""
STEPS, EVERY, WARM_UP = 8, 4, 1
"""Steps of a run, of which the last is saved too; after how many of them the save comes that is
looked at; and how many of the first are not counted."""
WAYS: dict[str, dict[str, Any]] = {
    "none": {"every_steps": None},
    "in turn": {"every_steps": EVERY, "overlap": False},
    "beside": {"every_steps": EVERY, "overlap": True},
}


def measured(gigabytes: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Return what runs of one process took without saves and with them, taking turns: the medians
    of rounds.

    What steps lose to a save in their middle is what they wait for it and what they take longer.
    """
    layers = max(1, round((gigabytes * 1e9 / STATE_BYTES - 2 * VOCABULARY * WIDTH) / LAYER))
    _make(folder, layers)
    found: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            found[way].append(_run(folder, way))
    plain = median(step for run in found["none"] for step in _seconds(run))
    result: dict[str, Any] = {"layers": layers, "rounds": rounds, "step_seconds": plain}
    for way in ("in turn", "beside"):
        saves = [next(one for one in run if "save_bytes" in one) for run in found[way]]
        lost = [
            save["save_waited_seconds"] + sum(after) - plain * len(after)
            for save, run in zip(saves, found[way], strict=True)
            if (after := _seconds(run)[EVERY - WARM_UP :])
        ]
        result[way] = {
            "save_seconds": median(one["save_seconds"] for one in saves),
            "waited_seconds": median(one["save_waited_seconds"] for one in saves),
            "lost_seconds": median(lost),
        }
        result["bytes"] = saves[0]["save_bytes"]
    return result


def _seconds(run: list[dict[str, Any]]) -> list[float]:
    steps = [one["step_seconds"] for one in run if "step_seconds" in one]
    return steps[WARM_UP:]


def _make(folder: Path, layers: int) -> None:
    """Write the model's config and the data."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": ROW,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = random.Random(0)
    rows = [[draw.randrange(3, VOCABULARY) for _ in range(ROW)] for _ in range(STEPS)]
    lines = [json.dumps({"input_ids": row}) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def _run(folder: Path, way: str) -> list[dict[str, Any]]:
    """Train once, and return the records of metrics.jsonl. Raises RuntimeError."""
    out = folder / "out"
    recipe = {
        "output_dir": str(out),
        "model": {"config": str(folder / "config.json"), "dtype": "float32"},
        "data": {"train": str(folder / "rows.jsonl"), "sequence_length": ROW, "packing": "none"},
        "training": {"steps": STEPS, "global_batch_size": 1},
        "checkpoint": {"keep_last": 1, **WAYS[way]},
        "export": {"huggingface": False},
        "launch": {"device": "cpu", "processes": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "uspft", "train", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"`{way}` failed:\n{done.stderr[-3000:]}")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    return records
