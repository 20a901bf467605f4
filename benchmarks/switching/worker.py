"""One rank on its host: python -m benchmarks.switching.worker FOLDER RANK."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.counting import interface_bytes, written_bytes
from benchmarks.lab.processes import Tell, as_rank, from_all
from benchmarks.memory.livebytes import LiveBytes
from benchmarks.switching.contenders import PEER, Contender
from benchmarks.switching.setting import HOSTS, RATE, WARM_UP, Setting
from benchmarks.switching.straight import StraightEngine
from uspft.assemble import Run, assemble
from uspft.engine.quarantine import forget_mpu, prepare_deepspeed
from uspft.job import Job
from uspft.mesh import Groups
from uspft.switching.deal.dealing import SwitchingLoader
from uspft.switching.move.moving import MovingEngine

SAME = 1e-4
"""Losses and norms that differ by more, relatively, are not those of the same computation."""
SMALL = 1024
"""Bytes of a tensor that is left out of what is counted: scalars, rotary frequencies."""
LINK = "eth0"


class Racer(Protocol):
    """What takes a step: it returns its loss, its gradient's norm, and what it says of itself."""

    def step(self, number: int) -> tuple[float, float, dict[str, Any]]: ...


class Ours:
    """A run of the project."""

    def __init__(self, setting: Setting, name: str, one: Contender, groups: Groups) -> None:
        job = Job.read(setting.place(name))
        moving = StraightEngine if one.straight else MovingEngine
        with patch("uspft.assemble.MovingEngine", moving):
            self.run: Run = assemble(job, torch.device("cpu"), groups)
        assert isinstance(self.run.loader, SwitchingLoader)
        self.loader = self.run.loader

    def step(self, number: int) -> tuple[float, float, dict[str, Any]]:
        result = self.run.engine.step(self.loader.batches(number), RATE, stop=False)
        books = [world.books for world in self.loader.worlds]
        books.append(self.run.engine.holders.everyone.books)
        sent = sum((Counter(each.close()) for each in books), Counter[str]())
        about = {"own_bytes": dict(sent), "switch_seconds": result.switch_seconds}
        return result.loss, result.grad_norm, about

    def schedule_seconds(self, step: int) -> float:
        """Return how long the plan of a step takes that is not yet planned."""
        began = time.perf_counter()
        self.loader.plan(step)
        return time.perf_counter() - began


class Theirs:
    """DeepSpeed's engine on the rows of a static run of ours."""

    def __init__(self, setting: Setting, static: Ours) -> None:
        from benchmarks.switching.deepspeed_ulysses import DeepSpeedUlysses

        self._engine, self._loader = DeepSpeedUlysses(setting), static.loader

    def step(self, number: int) -> tuple[float, float, dict[str, Any]]:
        plan = self._loader.plan(number)
        loss, norm = self._engine.step([self._loader.row(row) for row in plan.rows])
        return loss, norm, {}


def measured(record: dict[str, Any], tell: Tell) -> Any:
    """This returns what every contender took, on the slowest rank, and what it sent and held."""
    setting = Setting.of(record)
    prepare_deepspeed()
    found, racers = _built(setting, tell)
    gc.collect()
    gc.freeze()  # a collection before every step need not walk through all packages again
    for number in range(setting.rounds):
        turn = number * len(racers) // setting.rounds  # nobody always comes after the same one
        for name in (*setting.names[turn:], *setting.names[:turn]):
            _timed(racers[name], WARM_UP + number + 1, found[name])
        _require_same(found)
        tell(
            f"round {number + 1}: " + ", ".join(f"{k} {found[k]['seconds'][-1]:.2f}" for k in found)
        )
    for name, racer in racers.items():
        if isinstance(racer, Ours):
            found[name]["schedule_seconds"] = racer.schedule_seconds(setting.steps + 2)
    return found


def _built(setting: Setting, tell: Tell) -> tuple[dict[str, Any], dict[str, Racer]]:
    """Make every contender, and count what it holds in and between its first steps."""
    groups = Groups(ranks_per_host=setting.ranks // HOSTS)
    found, racers = dict[str, Any](), dict[str, Racer]()
    for name in setting.names:
        one, before = setting.every[name], storages()
        if one.kind == PEER:
            static = next(r for n, r in racers.items() if n.startswith("static Ulysses"))
            assert isinstance(static, Ours)
            racers[name] = Theirs(setting, static)
        else:
            racers[name] = Ours(setting, name, one, groups)
        forget_mpu()
        record: dict[str, Any] = {"seconds": [], "steps": []}
        racers[name].step(1)
        held = [each.nbytes() for place, each in storages().items() if place not in before]
        live = LiveBytes()
        with live:
            racers[name].step(WARM_UP)
        counts = sum(n for n in held if n > SMALL), live.most["all"]
        record["held_bytes"], record["live_bytes"] = map(max, zip(*from_all(counts), strict=True))
        found[name] = record
        tell(f"{name}: ready")
    return found, racers


def _timed(racer: Racer, step: int, record: dict[str, Any]) -> None:
    gc.collect()
    dist.barrier()
    wrote, crossed = written_bytes(), interface_bytes(LINK)
    dist.barrier()
    began = time.perf_counter()
    loss, norm, about = racer.step(step)
    took = time.perf_counter() - began
    wrote = written_bytes() - wrote
    dist.barrier()
    crossed = interface_bytes(LINK) - crossed
    every = from_all({"seconds": took, "written": wrote, "crossed": crossed, **about})
    record["seconds"].append(max(each["seconds"] for each in every))
    record["steps"].append(
        {
            "loss": loss,
            "norm": norm,
            "written_bytes": sum(each["written"] for each in every),
            "host_bytes": max(each["crossed"] for each in every),
            "own_bytes": dict(sum((Counter(one.get("own_bytes", {})) for one in every), Counter())),
            "switch_seconds": max(each.get("switch_seconds", 0.0) for each in every),
        }
    )


def _require_same(found: dict[str, Any]) -> None:
    """Raises RuntimeError where a contender's last step is not the first one's."""
    first, *others = found
    for name in others:
        for what in ("loss", "norm"):
            want, got = (found[one]["steps"][-1][what] for one in (first, name))
            if abs(got - want) > SAME * abs(want):
                raise RuntimeError(f"{what} of {name} is {got}, of {first} {want}")


def storages() -> dict[int, torch.UntypedStorage]:
    """Return what all tensors of this process live in, by where it is."""
    gc.collect()
    every: Sequence[Tensor] = [
        one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)
    ]
    memory = [one.untyped_storage() for one in every if not one.is_meta]
    return {one.data_ptr(): one for one in memory if one.nbytes()}


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
