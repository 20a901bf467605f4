"""Stages that sleep: the runner of a pipeline with real messages, and next to nothing to compute.

One rank on its host: python -m benchmarks.pipelines.sleeping FOLDER RANK.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lab.processes import Tell, as_rank, from_all
from uspft.comm import Books, Group
from uspft.engine.mail import Lines
from uspft.engine.pipelined import Pipeline
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.pipeline.schedules import Schedule, forward_and_backward
from uspft.pipeline.simulator import simulate
from uspft.pipeline.stages import Stages

RANKS = 4
WHOLE = {
    "gpipe": Schedule("gpipe"),
    "1f1b": Schedule("1f1b"),
    "interleaved": Schedule("1f1b", virtual=2),
}
"""Schedules that take rows whole."""
CHUNKED = {
    "seqpipe": Schedule("seqpipe", chunks=4),
    "interleaved seqpipe": Schedule("seqpipe", virtual=2, chunks=4),
}
SCHEDULES = {**WHOLE, **CHUNKED}
BACKWARD = 2
"""Times that a backward sleeps as long as a forward."""


class Contender(NamedTuple):
    """A schedule with so many micro-batches."""

    schedule: str
    micro_batches: int

    @property
    def name(self) -> str:
        return f"{self.schedule}, m {self.micro_batches}"


@dataclass(frozen=True)
class Setting:
    """A launch.

    mbit: of each host's link. forward_seconds: for which a rank sleeps in the forward of a
    micro-batch, in all its virtual stages and chunks together. message_bytes: of what stages send
    of a micro-batch. schedules: the names of those that take turns.
    """

    mbit: int
    rounds: int
    forward_seconds: float
    message_bytes: int
    micro_batches: tuple[int, ...]
    schedules: tuple[str, ...] = tuple(WHOLE)

    @property
    def contenders(self) -> list[Contender]:
        return [Contender(name, m) for m in self.micro_batches for name in self.schedules]

    @property
    def message_sizes(self) -> list[int]:
        """The bytes of the messages that are sent, whole rows' first."""
        chunks = sorted({SCHEDULES[name].chunks for name in self.schedules})
        return [self.message_bytes // number for number in chunks]

    def as_record(self) -> dict[str, Any]:
        """It returns what the JSON keeps of it."""
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Setting:
        tuples = {
            key: tuple(record[key]) for key in ("micro_batches", "schedules") if key in record
        }
        return cls(**{**record, **tuples})


@dataclass(frozen=True)
class Rows:
    """Stands for a micro-batch, or for one of its chunks."""

    world: Any
    chunks: tuple[Rows, ...] = ()
    keys: Any = None


class Sleeper:
    """Stands for the stages of a rank and for their engine: it sleeps, and makes messages."""

    idle, stage, device = None, 1, torch.device("cpu")

    def __init__(self, setting: Setting, schedule: Schedule, rank: int) -> None:
        virtual = schedule.virtual
        self.stages = dict.fromkeys(range(rank, RANKS * virtual, RANKS))
        self.deepspeed = SimpleNamespace(zero_optimization_stage=lambda: 1, zero_overlap_comm=bool)
        self.laps = SimpleNamespace(mark=lambda: None)
        self.took: dict[str, list[float]] = {"forward": [], "backward": []}
        self._last = RANKS * virtual - 1
        chunks = schedule.chunks
        self._floats = setting.message_bytes // (4 * chunks)
        self._seconds = setting.forward_seconds / (virtual * chunks)
        self._weight = torch.zeros((), requires_grad=True)

    def take(self, batch: Any, scales: Any, stage: int, x: Tensor | None) -> Tensor:
        """Sleep for a forward; return a message, or a loss."""
        with self._timed("forward"):
            time.sleep(self._seconds)
            made = (torch.zeros(self._floats) if x is None else x) + self._weight
            return made.sum()[None] if stage == self._last else made

    def backward(self, loss: Tensor, batch: Any, *, last: bool) -> None:
        """Sleep for a backward, and make the gradient of the stage's input."""
        with self._timed("backward"):
            time.sleep(BACKWARD * self._seconds)
            loss.backward()

    def hidden_buffer(self, batch: Any) -> Tensor:
        return torch.empty(self._floats)

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.took[kind].append(time.perf_counter() - began)


class Racer:
    """A contender on this rank."""

    def __init__(self, setting: Setting, one: Contender, group: Group) -> None:
        schedule = SCHEDULES[one.schedule]
        self.sleeper = Sleeper(setting, schedule, group.index)
        stages = Stages.of_sizes((1,) * RANKS * schedule.virtual, RANKS)
        made: Any = self.sleeper
        self._runner = Pipeline(made, stages, schedule, Lines(group), None, 0)
        counts = SimpleNamespace(mesh=SimpleNamespace(counts=True))
        batch = Rows(counts, (Rows(counts),) * schedule.chunks)
        self._batches: Any = [batch] * one.micro_batches

    def step(self) -> float:
        """Take a step; return its seconds on this rank."""
        engine: Any = self.sleeper
        dist.barrier()
        began = time.perf_counter()
        self._runner(engine, self._batches, (1.0,))
        return time.perf_counter() - began


def measured(record: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return the steps of all contenders, what they slept, and how long a message takes."""
    setting = Setting.of(record)
    group = make_mesh(Layout(pipeline=RANKS), Groups(), Books()).pipeline
    racers = {one.name: Racer(setting, one, group) for one in setting.contenders}
    steps: dict[str, list[float]] = {name: [] for name in racers}
    messages: dict[str, list[float]] = {}
    names = list(racers)
    for number in range(-1, setting.rounds):
        for size in setting.message_sizes:
            messages.setdefault(str(size), []).extend(messages_alone(size, group))
        turn = number * len(names) // setting.rounds  # nobody always comes after the same one
        for name in (*names[turn:], *names[:turn]):
            steps[name].append(max(from_all(racers[name].step())))
        if number < 0:  # lines are made, and nothing of it counts
            messages.clear()
            for racer in racers.values():
                steps = {name: [] for name in names}
                racer.sleeper.took = {kind: [] for kind in racer.sleeper.took}
        else:
            tell(f"round {number + 1}: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in steps.items()))
    found = {}
    for name, racer in racers.items():
        every = from_all(racer.sleeper.took)
        slept = {kind: median(chain(*(one[kind] for one in every))) for kind in every[0]}
        found[name] = {"seconds": steps[name], "slept": slept}
    whole, *less = messages.values()
    return {"messages": whole, "contenders": found, **({"of chunks": less[0]} if less else {})}


def messages_alone(size: int, group: Group) -> list[float]:
    """Return the seconds of a message of so many bytes alone, each way between neighbours along a
    pipeline; their clock is one."""
    found, lines = [], Lines(group)
    x, y = (torch.zeros(size // 4) for _ in range(2))
    for first in range(group.size):
        other = (first + 1) % group.size
        for there, here in ((first, other), (other, first)):
            wait = lines.receive(there, y) if group.index == here else None
            dist.barrier()
            clock = time.perf_counter()
            if group.index == there:
                lines.send(here, x).wait()
            if wait:
                wait()
                clock = time.perf_counter()
            clocks = from_all(clock)
            found.append(clocks[here] - clocks[there])
    return found


def simulated(one: Contender, slept: Mapping[str, float], message: float) -> float:
    """Return the seconds of a step that the simulator predicts of what was slept, and sent."""
    schedule = SCHEDULES[one.schedule]
    order, virtual, _, chunks = schedule
    lists = forward_and_backward(order, RANKS, one.micro_batches, virtual, chunks)
    return simulate(lists, lambda action: slept[action.kind], lambda _: message).end


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
