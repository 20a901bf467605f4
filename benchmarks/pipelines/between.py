"""Layouts of two hosts behind a slow link: what is sent between the hosts, and what a rank holds.

One rank on its host: python -m benchmarks.pipelines.between FOLDER RANK.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml

from benchmarks.attention.counting import interface_bytes
from benchmarks.lab.processes import Tell, as_rank, from_all
from benchmarks.lab.rows import llama_of, write_rows
from benchmarks.switching.worker import SMALL, storages
from uspft.assemble import Run, assemble
from uspft.data.corpus.prepare import prepare
from uspft.engine.quarantine import forget_mpu, prepare_deepspeed
from uspft.job import Job
from uspft.mesh import Groups
from uspft.prepare.examine import examine

HOSTS, RANKS_PER_HOST = 2, 2
RANKS = HOSTS * RANKS_PER_HOST
SAME = 1e-4
"""Losses and norms that differ by more, relatively, are not those of the same computation."""
RATE, LINK, VOCABULARY = 1e-3, "eth0", 1024
BUCKETS = {"reduce_bucket_size": 300_000, "stage3_prefetch_bucket_size": 300_000}
"""Elements; the default ones are larger than the model."""


class Layout(NamedTuple):
    """What a recipe says of a layout: `parallel_config`, and ZeRO's stage."""

    parallel: dict[str, Any]
    zero: int


LAYOUTS = {
    "data 4": Layout({}, 3),
    "tensor 2 × data 2": Layout({"model_parallel": 2}, 3),
    "tensor 4": Layout({"model_parallel": 4}, 1),
    "stages 2 × data 2": Layout({"pipeline_stage": 2}, 3),
    "stages 2 × tensor 2": Layout({"pipeline_stage": 2, "model_parallel": 2}, 3),
}
"""Stages come last: after an engine with stages DeepSpeed numbers a later one's modules otherwise
on each rank, which ZeRO-3 refuses."""


@dataclass(frozen=True)
class Setting:
    """A launch. mbit: of each host's link. folder: holds the model, the rows and the jobs."""

    mbit: int
    rounds: int
    layers: int
    hidden: int
    rows: int
    tokens: int
    names: tuple[str, ...]
    folder: str = ""

    @property
    def steps(self) -> int:
        """One warms up."""
        return 1 + self.rounds

    @property
    def sentence(self) -> str:
        """It tells the case to a person."""
        model = f"{self.layers} layers × {self.hidden}, 8/4 heads"
        return f"{model}, {self.rows} rows of {self.tokens:,} tokens a step, {self.mbit} Mbit/s"

    def as_record(self) -> dict[str, Any]:
        """It returns what the JSON keeps of it."""
        return {key: value for key, value in asdict(self).items() if key != "folder"}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Setting:
        return cls(**{**record, "names": tuple(record["names"])})

    def place(self, name: str) -> Path:
        """It returns the folder of a layout's job."""
        return Path(self.folder) / str(self.names.index(name))


def make_jobs(setting: Setting) -> None:
    """This writes the model's config, the rows and a job for each layout."""
    folder = Path(setting.folder)
    sizes = llama_of(VOCABULARY, setting.layers, setting.hidden, setting.tokens, heads=8)
    (folder / "config.json").write_text(json.dumps(sizes))
    rows = setting.rows * setting.steps
    write_rows(folder / "rows.jsonl", rows, setting.tokens, VOCABULARY)
    for name in setting.names:
        place = setting.place(name)
        place.mkdir()
        path = place / "recipe.yaml"
        path.write_text(yaml.safe_dump(_recipe(setting, name)))
        one = examine(path, [], HOSTS, None)
        corpus = prepare(one.recipe.data, None, VOCABULARY, folder / "cache")
        Job(one.recipe, corpus, setting.steps, {}).write(place)


def _recipe(setting: Setting, name: str) -> dict[str, Any]:
    folder, layout = Path(setting.folder), LAYOUTS[name]
    whole = {"stage3_param_persistence_threshold": 0} if layout.zero == 3 else {}
    return {
        "output_dir": str(setting.place(name) / "out"),
        "model": {"config": str(folder / "config.json"), "dtype": "float32"},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "sequence_length": setting.tokens,
            "packing": "none",
            "shuffle": False,
        },
        "parallel_config": layout.parallel,
        "deepspeed": {"zero_optimization": {"stage": layout.zero, **BUCKETS, **whole}},
        "training": {"steps": setting.steps, "global_batch_size": setting.rows},
        "memory": {"gradient_checkpointing": False},
        "checkpoint": {"every_steps": None},
        "export": {"huggingface": False},
        "launch": {"device": "cpu", "processes": RANKS_PER_HOST},
    }


def measured(record: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return what every layout took on the slowest rank, what hosts sent, and what ranks hold."""
    setting = Setting.of(record)
    prepare_deepspeed()
    groups = Groups(ranks_per_host=RANKS_PER_HOST)
    found, runs = dict[str, Any](), dict[str, Run]()
    for name in setting.names:
        before = storages()
        runs[name] = assemble(Job.read(setting.place(name)), torch.device("cpu"), groups)
        forget_mpu()
        found[name] = {"seconds": [], "host_bytes": [], "answers": []}
        _step(runs[name], 1)
        held = (each.nbytes() for at, each in storages().items() if at not in before)
        found[name]["held_bytes"] = from_all(sum(n for n in held if n > SMALL))
        tell(f"{name}: ready")
    gc.collect()
    gc.freeze()
    for number in range(setting.rounds):
        turn = number * len(runs) // setting.rounds  # nobody always comes after the same one
        for name in (*setting.names[turn:], *setting.names[:turn]):
            _timed(runs[name], number + 2, found[name])
        _require_same(found)
        seconds = (f"{name} {one['seconds'][-1]:.2f}" for name, one in found.items())
        tell(f"round {number + 1}: {', '.join(seconds)}")
    return found


def _step(run: Run, number: int) -> tuple[float, float]:
    result = run.engine.step(run.loader.batches(number), RATE, stop=False)
    return result.loss, result.grad_norm


def _timed(run: Run, number: int, record: dict[str, Any]) -> None:
    gc.collect()
    dist.barrier()
    crossed = interface_bytes(LINK)
    dist.barrier()
    began = time.perf_counter()
    answer = _step(run, number)
    took = time.perf_counter() - began
    dist.barrier()
    crossed = interface_bytes(LINK) - crossed
    every = from_all((took, crossed))
    record["seconds"].append(max(one[0] for one in every))
    record["host_bytes"].append(max(one[1] for one in every))
    record["answers"].append(answer)


def _require_same(found: dict[str, Any]) -> None:
    """Raises RuntimeError where a layout's last step is not the first one's."""
    first, *others = found
    for name in others:
        pairs = zip(found[first]["answers"][-1], found[name]["answers"][-1], strict=True)
        for want, got in pairs:
            if abs(got - want) > SAME * abs(want):
                raise RuntimeError(f"a loss or norm of {name} is {got}, of {first} {want}")


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
