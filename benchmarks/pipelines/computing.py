"""Stages that compute, on two hosts of one process with a core of its own each: what every action
takes, and steps beside the simulator fed with that.

One rank on its host: python -m benchmarks.pipelines.computing FOLDER RANK.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml

from benchmarks.lab.processes import Tell, as_rank, from_all
from benchmarks.lab.rows import llama_of, write_rows
from benchmarks.pipelines.sleeping import SCHEDULES, messages_alone
from uspft.assemble import Run, assemble
from uspft.data.corpus.prepare import prepare
from uspft.engine.quarantine import forget_mpu, prepare_deepspeed
from uspft.job import Job
from uspft.mesh import Groups
from uspft.pipeline.schedules import Action, forward_and_backward
from uspft.pipeline.simulator import simulate
from uspft.prepare.examine import examine
from uspft.prepare.make_plan import chunk_prices_of

HOSTS = 2
NAMES = "1f1b", "interleaved", "seqpipe"
RATE, VOCABULARY, ELEMENT_BYTES = 1e-3, 1024, 4


class Contender(NamedTuple):
    """A schedule with rows of so many tokens, and so many micro-batches of one row."""

    schedule: str
    tokens: int
    micro_batches: int

    @property
    def name(self) -> str:
        return f"{self.schedule}, {self.tokens:,} tokens, m {self.micro_batches}"

    @property
    def lists(self) -> list[list[Action]]:
        order, virtual, _, chunks = SCHEDULES[self.schedule]
        return forward_and_backward(order, HOSTS, self.micro_batches, virtual, chunks)


@dataclass(frozen=True)
class Setting:
    """A launch. mbit: of each host's link. wide: tokens of rows as multiples of the hidden size.
    folder: holds the model, the rows and the jobs."""

    mbit: int
    rounds: int
    layers: int
    hidden: int
    wide: tuple[int, ...]
    micro_batches: tuple[int, ...]
    folder: str = ""

    @property
    def contenders(self) -> list[Contender]:
        rows = [wide * self.hidden for wide in self.wide]
        return [Contender(name, n, m) for n in rows for m in self.micro_batches for name in NAMES]

    @property
    def sentence(self) -> str:
        """It tells the case to a person."""
        model = f"{self.layers} layers × {self.hidden}, 4/2 heads"
        return f"{model}, two hosts of one process with a core each, {self.mbit} Mbit/s, float32"

    def as_record(self) -> dict[str, Any]:
        """It returns what the JSON keeps of it."""
        return {key: value for key, value in asdict(self).items() if key != "folder"}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Setting:
        tuples = {key: tuple(record[key]) for key in ("wide", "micro_batches")}
        return cls(**{**record, **tuples})

    def place(self, schedule: str, tokens: int) -> Path:
        """It returns the folder of a job."""
        return Path(self.folder) / f"{schedule}-{tokens}"


def make_jobs(setting: Setting) -> None:
    """This writes the model's config, the rows, and a job for each schedule and length of rows."""
    folder, most = Path(setting.folder), max(setting.micro_batches)
    longest = max(setting.wide) * setting.hidden
    sizes = llama_of(VOCABULARY, setting.layers, setting.hidden, longest, heads=4)
    (folder / "config.json").write_text(json.dumps(sizes))
    for tokens in sorted({one.tokens for one in setting.contenders}):
        rows = folder / f"{tokens}.jsonl"
        write_rows(rows, most, tokens, VOCABULARY)
        for name in NAMES:
            place = setting.place(name, tokens)
            place.mkdir()
            path = place / "recipe.yaml"
            path.write_text(yaml.safe_dump(_recipe(setting, name, tokens)))
            one = examine(path, [], HOSTS, None)
            corpus = prepare(one.recipe.data, None, VOCABULARY, folder / "cache")
            prices = chunk_prices_of(one)
            Job(one.recipe, corpus, 1, {}, chunk_prices=prices).write(place)


def _recipe(setting: Setting, name: str, tokens: int) -> dict[str, Any]:
    folder, schedule = Path(setting.folder), SCHEDULES[name]
    return {
        "output_dir": str(setting.place(name, tokens) / "out"),
        "model": {"config": str(folder / "config.json"), "dtype": "float32"},
        "data": {
            "train": str(folder / f"{tokens}.jsonl"),
            "sequence_length": tokens,
            "packing": "none",
            "shuffle": False,
        },
        "parallel_config": {
            "pipeline_stage": HOSTS,
            "pp_interleave_num": schedule.virtual,
            "seq_split_num": schedule.chunks,
        },
        "training": {"steps": 1, "global_batch_size": max(setting.micro_batches)},
        "memory": {"gradient_checkpointing": False},
        "checkpoint": {"every_steps": None},
        "export": {"huggingface": False},
        "launch": {"device": "cpu", "processes": 1},
    }


class Racer:
    """A contender on this rank."""

    def __init__(self, one: Contender, run: Run) -> None:
        self._run, self._batches = run, run.loader.batches(1)[: one.micro_batches]
        self._actions = one.lists[run.world.mesh.pipeline.index]
        self.took: list[list[float]] = []
        """In each round the seconds of this rank's actions, in their order."""

    def step(self) -> float:
        """Take a step; return the seconds from the first action of any rank to the last one's
        end."""
        spans = list[tuple[float, float]]()
        engine: Any = self._run.engine
        engine.take, engine.backward = _timed(engine.take, spans), _timed(engine.backward, spans)
        gc.collect()
        dist.barrier()
        engine.step(self._batches, RATE, stop=False)
        del engine.take, engine.backward
        assert len(spans) == len(self._actions)
        self.took.append([end - began for began, end in spans])
        every = from_all((spans[0][0], spans[-1][1]))  # hosts of one machine have one clock
        return float(max(end for _, end in every) - min(began for began, _ in every))


def _timed(call: Callable[..., Any], spans: list[tuple[float, float]]) -> Callable[..., Any]:
    @wraps(call)
    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        made = call(*given, **named)
        spans.append((began, time.perf_counter()))
        return made

    return timed


def measured(record: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the steps of all contenders, what actions took, and how long messages take."""
    setting = Setting.of(record)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    prepare_deepspeed()
    groups, runs = Groups(ranks_per_host=1), dict[tuple[str, int], Run]()
    for one in setting.contenders:
        if (key := one[:2]) not in runs:
            place = setting.place(*key)
            runs[key] = assemble(Job.read(place), torch.device("cpu"), groups)
            forget_mpu()
    racers = {one.name: Racer(one, runs[one[:2]]) for one in setting.contenders}
    steps: dict[str, list[float]] = {name: [] for name in racers}
    messages: dict[str, list[float]] = {}
    sizes = {message_bytes(setting, one) for one in setting.contenders}
    names, line = list(racers), next(iter(runs.values())).world.mesh.pipeline
    for number in range(-1, setting.rounds):
        for size in sorted(sizes):
            messages.setdefault(str(size), []).extend(messages_alone(size, line))
        turn = number * len(names) // setting.rounds  # nobody always comes after the same one
        for name in (*names[turn:], *names[:turn]):
            steps[name].append(racers[name].step())
        if number < 0:  # everything is warm, and nothing of it counts
            gc.freeze()
            messages.clear()
            for name, racer in racers.items():
                steps[name].clear()
                racer.took.clear()
        else:
            tell(f"round {number + 1}: {sum(one[-1] for one in steps.values()):.1f} s")
    found = {
        name: {"seconds": steps[name], "took": from_all(_medians(racer.took))}
        for name, racer in racers.items()
    }
    return {"messages": messages, "contenders": found}


def message_bytes(setting: Setting, one: Contender) -> int:
    """Return the bytes of a message between stages, of a chunk on the mean."""
    whole = ELEMENT_BYTES * one.tokens * setting.hidden
    return whole // SCHEDULES[one.schedule].chunks


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [median(each) for each in zip(*rounds, strict=True)]


def costs_of(one: Contender, took: Sequence[Sequence[float]]) -> dict[Action, float]:
    """Return the seconds of each action. took: by rank, of its actions in their order."""
    pairs = (zip(*both, strict=True) for both in zip(one.lists, took, strict=True))
    return {action: seconds for each in pairs for action, seconds in each}


def simulated(one: Contender, took: Sequence[Sequence[float]], message: float) -> float:
    """Return the seconds of a step that the simulator predicts of what actions took."""
    costs = costs_of(one, took)
    return simulate(one.lists, costs.__getitem__, lambda _: message).end


def of_equal_costs(one: Contender) -> float:
    """Return the same in forwards of a whole micro-batch in all stages of a rank, where every such
    forward takes as long, and a backward twice as long."""
    _, virtual, _, chunks = SCHEDULES[one.schedule]
    each = {"forward": 1 / (virtual * chunks), "backward": 2 / (virtual * chunks)}
    return simulate(one.lists, lambda action: each[action.kind]).end


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
