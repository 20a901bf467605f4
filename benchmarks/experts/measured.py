"""Steps of a small Qwen3-MoE on two hosts of two processes behind a slow link, by how many ranks
divide its experts, in turn."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.lab.cluster import hosts_of
from benchmarks.lab.rows import write_rows
from benchmarks.planning.hosts.runs import on_all, predicted
from uspft.written import METRICS

HOSTS, HERE = 2, 2
DEGREES = {"local": 1, "2, inside hosts": 2, "4, over both": 4}
"""The ranks that divide experts, by what they are called."""
WARM_UP = 1
"""So many steps at the start of a run are not timed."""


@dataclass(frozen=True)
class HostsCase:
    """The sizes of a model with experts, a row length, and how often each degree runs."""

    tokens: int = 512
    layers: int = 2
    hidden: int = 256
    inner: int = 128
    experts: int = 32
    met: int = 4
    mbit: int = 200
    rounds: int = 7
    steps: int = 2

    @property
    def sentence(self) -> str:
        """It tells the case to a person."""
        of = f"{self.layers} layers × {self.hidden}, {self.met} of {self.experts} experts"
        links = f"{HOSTS} hosts × {HERE} processes behind {self.mbit} Mbit/s"
        return f"{of} × {self.inner}, a row of {self.tokens:,} tokens a rank, ZeRO-3, {links}"

    def make(self, folder: Path) -> None:
        """It writes the model's config, and rows of one document each."""
        sizes = {
            "model_type": "qwen3_moe",
            "vocab_size": 1024,
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.inner,
            "moe_intermediate_size": self.inner,
            "num_experts": self.experts,
            "num_experts_per_tok": self.met,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": self.tokens,
            "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(sizes))
        rows = HOSTS * HERE * (WARM_UP + self.steps)
        write_rows(folder / "rows.jsonl", rows, self.tokens, 1024)

    def recipe(self, folder: Path, degree: int, turn: int) -> Path:
        """It writes the recipe of a degree in a round, whose run goes into a folder beside it."""
        name = f"experts-{degree}-{turn}"
        tree = {
            "output_dir": str(folder / name),
            "model": {"config": str(folder / "config.json"), "dtype": "float32"},
            "data": {
                "train": str(folder / "rows.jsonl"),
                "sequence_length": self.tokens,
                "packing": "none",
                "shuffle": False,
            },
            "parallel_config": {"expert_parallel": degree},
            "deepspeed": {"zero_optimization": {"stage": 3}},
            "training": {
                "steps": WARM_UP + self.steps,
                "global_batch_size": HOSTS * HERE,
            },
            "memory": {"gradient_checkpointing": False},
            "checkpoint": {"every_steps": None},
            "export": {"huggingface": False},
            "launch": {"device": "cpu", "processes": HERE},
        }
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path


def measured(case: HostsCase) -> dict[str, Any]:
    """Calibrate, then train under each degree in each round, another one first each time; return
    by degree the seconds of all timed steps of each round, and what `plan` predicts.

    Raises NoCluster, and RuntimeError where a run fails.
    """
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="experts-") as name,
        hosts_of(HOSTS, case.mbit) as hosts,
    ):
        folder = Path(name)
        case.make(folder)
        print("calibrate", flush=True)
        hardware, first = folder / "hardware.yaml", case.recipe(folder, 1, 0)
        words = ["calibrate", str(first), f"to={hardware}"]
        on_all(hosts, words, folder / "calibrate-log", folder)
        for what, degree in DEGREES.items():
            said = predicted(case.recipe(folder, degree, 0), hardware, HOSTS)
            found[what] = {"rounds": [], **said}
        names = list(DEGREES)
        for turn in range(case.rounds):
            at = turn % len(names)
            for what in names[at:] + names[:at]:
                recipe = case.recipe(folder, DEGREES[what], turn)
                seconds = _run(recipe, hosts, folder)
                found[what]["rounds"].append(seconds)
                print(f"  round {turn}, {what:16} {seconds} s", flush=True)
    return {"case": asdict(case), "degrees": found}


def _run(recipe: Path, hosts: Sequence[Sequence[str]], folder: Path) -> list[float]:
    output = folder / recipe.stem
    on_all(hosts, ["train", str(recipe)], folder / f"{recipe.stem}-log", output)
    lines = [json.loads(line) for line in (output / METRICS).read_text().splitlines()]
    return [one["step_seconds"] for one in lines if "loss" in one][WARM_UP:]
