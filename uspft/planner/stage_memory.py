"""The bytes of activations on a rank of a pipeline, from those of its layers: what micro-batches
under way keep, what one that goes back needs beside, and messages (engine/pipelined.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from uspft.pipeline.schedules import Schedule, actions_of
from uspft.pipeline.stages import Stages
from uspft.planner.activations import ChunkKeys, PassBytes

SENT = 2
"""Sent tensors that a line to another rank keeps, until the next ones are sent."""
ROUNDS = 3
"""Rounds of as many micro-batches as there are ranks in which 1F1B reaches all that it ever has
under way."""


class Moment(NamedTuple):
    """A time at which a rank begins a backward."""

    stage: int
    """Which of the rank's, from 0."""
    under_way: tuple[float, ...]
    """Of each of the rank's stages, micro-batches that have gone forward and not back, this one not
    counted; of chunks as many as their tokens are of the largest one's."""
    messages: int
    """Tensors that are to come or have gone."""
    chunk: int = 0
    inputs: tuple[int, ...] = ()
    """Of each of the rank's stages how many have gone forward and not back, but for this one."""
    awaited: tuple[float, ...] = ()
    """Of those under way the chunks that later ones follow."""


def _sums(keys: Sequence[ChunkKeys], sizes: Sequence[float], chunk: int) -> list[float]:
    """Return the bytes of a row's keys, and of the sums of their gradients, while each layer of a
    stage takes a chunk's backward, and before the last one does: of its own keys those in layers
    below. sizes: of the chunks."""
    last, before = len(sizes) - 1, sum(sizes[:chunk])
    with_this = (before + sizes[chunk]) * (chunk < last)
    found = []
    for layer in range(len(keys) + 1):
        # In layers above there is what this one found for others, else what later ones did.
        above = sum(one.first if chunk == last else one.summed for one in keys[layer + 1 :])
        below = sum(one.first if chunk == last - 1 else one.summed for one in keys[: layer + 1])
        kept = sizes[chunk] * (chunk < last) * sum(one.kept for one in keys[:layer])
        found.append(before * above + with_this * below + kept)
    return found


class RankBytes(NamedTuple):
    """What rows take on a rank at its peak."""

    kept: float
    at_work: float
    on_host: float
    inputs: int
    """The most stage inputs that are kept at a time."""


def rank_bytes(
    one: PassBytes,
    stages: Stages,
    schedule: Schedule,
    micro_batches: int,
    rank: int,
    sizes: Sequence[float] = (1.0,),
    chunks: Sequence[PassBytes] = (),
) -> RankBytes:
    """Return what the micro-batches of a step take on a rank along the pipeline.

    sizes: the tokens of each chunk as shares of the largest one's. chunks: what each takes if it
    has as many tokens as that; `one` is the first.
    """
    mine = range(rank, stages.count, stages.ranks)
    kept, of_keys, host = list[float](), list[float](), []
    whole = list[float]()
    peaks: dict[tuple[int, int], float] = {}
    trained = [stages.bounds[stage + 1] > one.first for stage in mine]
    for stage, trains in zip(mine, trained, strict=True):
        alone = one.bare if stage or not trains else ()
        layers = [(*alone, *one.layers[len(alone) :])[layer] for layer in stages.layers(stage)]
        keys = [one.keys[layer] for layer in stages.layers(stage)] if one.keys else []
        of_keys.append(sum(own.kept for own in keys))
        last = stage == stages.count - 1
        held = one.keeps_input[stages.bounds[stage]]
        entered = one.embedded if stage == 0 else one.hidden * (not held)
        waiting = (0.0 if one.offloads else layer.kept for layer in layers)
        below = [*accumulate(waiting, initial=entered)]
        made = 0.0 if last else one.hidden
        out = one.head.kept - one.any_head.kept if last else made
        kept.append((below[-1] + one.angles + out) * trains)
        whole.append(one.any_head.kept * last * trains)
        for chunk, size in enumerate(sizes):
            if chunks:
                own = (*alone, *chunks[chunk].layers[len(alone) :])
                layers = [own[layer] for layer in stages.layers(stage)]
            every = [
                made + before + layer.most for before, layer in zip(below, layers, strict=False)
            ]
            every += [below[-1] + one.head.most - one.any_head.most] if last else []
            sums = _sums(keys, sizes, chunk) if keys else [0.0] * (len(layers) + 1)
            sums[-1] += one.any_head.most * last
            both = zip(every, sums, strict=False)
            peaks[stage // stages.ranks, chunk] = max(size * a + b for a, b in both)
        host.append(sum(layer.kept for layer in layers) if one.offloads else 0.0)
    few = micro_batches
    if schedule.scheduler != "gpipe":
        few = min(micro_batches, ROUNDS * stages.ranks)
    begun = trained.index(True) if any(trained) else len(trained)
    every_moment = moments(stages.ranks, schedule, few, rank, begun, tuple(sizes))
    message = one.hidden * sum(sizes) / len(sizes)

    def bytes_at(moment: Moment) -> tuple[float, float]:
        others = sum(n * size for n, size in zip(moment.under_way, kept, strict=True))
        others += sum(n * size for n, size in zip(moment.awaited, of_keys, strict=True))
        others += sum(n * size for n, size in zip(moment.inputs, whole, strict=True))
        here = peaks[moment.stage, moment.chunk] + message * moment.messages
        return others + here, others

    if not every_moment:  # forward alone, while what went in before, and what came out, is there
        beside = (SENT + 2) * one.hidden + 2 * one.angles
        return RankBytes(0.0, max(peaks.values()) + beside, 0.0, 0)
    peak, others = max(map(bytes_at, every_moment))
    waits = max(
        sum(n * size for n, size in zip(m.under_way, host, strict=True)) + host[m.stage]
        for m in every_moment
    )
    return RankBytes(others, peak - others, waits, max(sum(m.inputs) + 1 for m in every_moment))


@lru_cache(maxsize=4096)
def moments(
    ranks: int,
    schedule: Schedule,
    micro_batches: int,
    rank: int,
    begun: int = 0,
    sizes: tuple[float, ...] = (1.0,),
) -> tuple[Moment, ...]:
    """Return the times at which a rank begins a backward, each that differs once. begun: the first
    of its stages that has one. sizes: as of rank_bytes."""
    every = _moments(ranks, schedule, micro_batches, rank, begun, sizes)
    return tuple(dict.fromkeys(one for one in every if one.stage >= begun))


def _moments(
    ranks: int,
    schedule: Schedule,
    micro_batches: int,
    rank: int,
    begun: int,
    sizes: tuple[float, ...],
) -> Iterator[Moment]:
    virtual = schedule.virtual
    actions = actions_of(schedule.scheduler, rank, ranks, micro_batches, virtual, len(sizes))
    last = ranks * virtual - 1
    under_way = [[0] * len(sizes) for _ in range(virtual)]
    # What is received for its stages is posted one ahead for each rank that sends it.
    coming: Counter[int] = Counter()
    for action in actions:
        coming[_source(action.kind, action.stage, last, ranks)] += 1
    lines: dict[int, list[bool]] = {}
    for action in actions:
        kind, stage, _, chunk = action
        coming[_source(kind, stage, last, ranks)] -= 1
        if kind == "forward":
            under_way[stage // ranks][chunk] += 1
            if stage < last:
                _send(lines, (stage + 1) % ranks, alone=stage // ranks < begun)
            continue
        under_way[stage // ranks][chunk] -= 1
        posted = sum(1 for source, left in coming.items() if left and source not in (-1, rank))
        sent = sum(sum(line) for line in lines.values())
        weighed = [[n * size for n, size in zip(one, sizes, strict=True)] for one in under_way]
        inputs, awaited = tuple(map(sum, under_way)), tuple(sum(one[:-1]) for one in weighed)
        every = tuple(map(sum, weighed)), posted + sent, chunk, inputs, awaited
        yield Moment(stage // ranks, *every)
        if stage:
            _send(lines, (stage - 1) % ranks, alone=True)


def _source(kind: str, stage: int, last: int, ranks: int) -> int:
    """Return which rank sends what an action takes; -1 where nothing comes."""
    other = stage - 1 if kind == "forward" else stage + 1
    return other % ranks if 0 <= other <= last else -1


def _send(lines: dict[int, list[bool]], to: int, *, alone: bool) -> None:
    """Note what a line keeps. alone: nothing else does; what goes forward the backward needs."""
    lines[to] = [*lines.get(to, []), alone][-SENT:]


def each_chunk(
    tokens: Sequence[int], ring: int, taking: Callable[[float], PassBytes]
) -> list[PassBytes]:
    """Return what each chunk takes if it has as many tokens as the largest one.

    tokens: of each. taking: with so many tokens of earlier ones behind each of its own. Where no
    ring brings their keys together, one earlier chunk is at work at a time, however many there are.
    """
    before = accumulate(tokens[:-1], initial=0)
    behind = [a / b if ring > 1 else float(a > 0) for a, b in zip(before, tokens, strict=True)]
    known = {one: taking(one) for one in {*behind}}
    return [known[one] for one in behind]
