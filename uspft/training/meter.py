"""The records of metrics.jsonl: each step's loss, speed, memory, and communicated bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from uspft.comm import KINDS
from uspft.metrics import finite, peak_memory_bytes
from uspft.model.build import parameter_count
from uspft.model.hf_config import heads_of_layers, layer_windows
from uspft.model.router import ExpertLoad
from uspft.planner.machine import peak_flops
from uspft.planner.products import step_flops
from uspft.sequence import Heads
from uspft.sequence.rows.heads import split_heads

if TYPE_CHECKING:
    from uspft.assemble import Run
    from uspft.batch import Batch
    from uspft.data.rows.loader import Size
    from uspft.engine.step import StepResult
    from uspft.world import World


LOADS = 64
"""At most this many lines of a run, besides the last, have the load of every expert."""


class Meter:
    """A converter of a step's result to a record of metrics.jsonl; collective, with two small
    reductions per step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        named, part_of = run.engine.named, run.engine.part_of
        sizes = {id(parameter): prod(part_of(name).shape) for name, parameter in named.items()}
        count = partial(parameter_count, run.model, embedding=False, active_only=True, sizes=sizes)
        self._parameters, trained = count(), count(trained_only=True)
        self._frozen = self._parameters - trained
        device = run.engine.device
        self._peak = peak_flops(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
        every = [*zip(layer_windows(run.config), heads_of_layers(run.config), strict=True)]
        self._layers = len(every)
        self._kinds = {
            one.layout.pipeline: Counter(every[n] for n in one.layers_here(self._layers))
            for one in run.loader.worlds or [run.world]
        }
        """For each number of pipeline stages, the number of this rank's layers with each (sliding
        window, heads)."""
        self._experts = ExpertLoad(run.model, run.engine.holders, device)
        run.world.books.close()

    def record(
        self, step: int, batches: Sequence[Batch], result: StepResult, seconds: float
    ) -> dict[str, Any]:
        """Return the record of what the step sent and computed, over all layouts of its batches."""
        engine, everyone = self._run.engine, self._run.engine.holders.everyone
        here = {id(batch.world): batch.world for batch in batches}
        worlds = self._run.loader.worlds or list(here.values())  # the same order on every rank
        moved = [Counter(world.books.close()) for world in worlds]
        sent = sum(moved, Counter(everyone.books.close()))
        work = sum(map(self._work, batches))
        (pairs,) = engine.total(work)
        peak = peak_memory_bytes(engine.device)
        memory, busiest, *bytes_sent = engine.largest(peak, work, *(sent[k] for k in KINDS))
        sizes = self._run.loader.sizes(step)
        rows, row_tokens = (sum(parts) for parts in zip(*sizes, strict=True))
        (_, *others), (counter, *_) = result.means, result.counts
        record = {
            "loss": finite(result.loss),
            "grad_norm": finite(result.grad_norm),
            "rows": rows,
            "tokens": row_tokens,
            counter: result.counts[counter],
            "step_seconds": seconds,
            "tokens_per_second": row_tokens / seconds,
            "mfu": self._mfu(row_tokens, pairs, seconds),
            "peak_memory_bytes": int(memory),
            "comm_bytes": {k: int(b) for k, b in zip(KINDS, bytes_sent, strict=True) if b},
            "attention_balance": busiest * everyone.size / pairs if pairs else 1.0,
            "strategy": " + ".join(dict.fromkeys(world.name for world in worlds)),
        }
        if self._run.loader.worlds:
            laps = list(zip(batches, result.seconds, strict=True))
            took = [sum(lap for one, lap in laps if one.world is world) for world in worlds]
            record["strategies"] = self._strategies(worlds, took, moved, sizes)
        if result.switch_seconds:
            record["switch_seconds"] = result.switch_seconds
        record |= {name: finite(result.means[name]) for name in others}
        record |= self._experts.told(each=self._tells_loads(step))
        return record | ({"skipped": True} if result.skipped else {})

    def _tells_loads(self, step: int) -> bool:
        """Tell whether a step's line has the load of every expert: at most LOADS lines do, since a
        deep model has many numbers."""
        every, last = self._run.job.recipe.logging.every_steps, self._run.job.last_step
        apart = every * -(-last // (every * LOADS))
        return step % apart == 0 or step == last

    def _strategies(
        self,
        worlds: Sequence[World],
        seconds: Sequence[float],
        moved: Sequence[Counter[str]],
        sizes: Sequence[Size],
    ) -> list[dict[str, Any]]:
        """Return what ran under each strategy; seconds are those of the slowest rank, bytes those
        of the rank that sends most."""
        each = 1 + len(KINDS)
        told = [
            [took, *(sent[kind] for kind in KINDS)]
            for took, sent in zip(seconds, moved, strict=True)
        ]
        most = self._run.engine.largest(*chain.from_iterable(told))
        found = []
        for number, (world, size) in enumerate(zip(worlds, sizes, strict=True)):
            took, *sent = most[number * each : (number + 1) * each]
            sent_bytes = {k: int(b) for k, b in zip(KINDS, sent, strict=True) if b}
            found.append(
                {"name": world.name, **size._asdict(), "seconds": took, "comm_bytes": sent_bytes}
            )
        return found

    def _work(self, batch: Batch) -> float:
        """Return this rank's attention work per layer: the (query, key) pairs of its ring rank in
        its stages' layers, times the features of its heads, divided by the number of all layers."""
        return sum(
            count
            * batch.share.with_window(window).area
            * features_here(heads, batch.world)
            / self._layers
            for (window, heads), count in self._kinds[batch.world.layout.pipeline].items()
        )

    def _mfu(self, tokens: int, pairs: float, seconds: float) -> float | None:
        if self._peak is None:
            return None
        shape = self._layers, 1, 1  # every pair has the same features
        flops = step_flops(self._parameters, tokens, int(pairs), shape, frozen=self._frozen)
        return flops / (seconds * self._peak * self._run.engine.holders.everyone.size)


def features_here(every: Heads, world: World) -> int:
    """Return the features of a layer's query heads that this rank of a world computes."""
    mine, place = every.on(world.layout.mesh_columns), world.mesh.ulysses
    first, last = split_heads(mine.query, mine.kv, place.size).query[place.index]
    return (last - first) * every.dim
