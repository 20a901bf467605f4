"""The bytes of activations on a pipeline rank: what micro-batches in flight save, what a running
backward needs in addition, and messages (engine/pipelined.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from uspft.pipeline.schedules import Schedule, actions_of
from uspft.pipeline.stages import Stages
from uspft.planner.memory.passes import ChunkKeys, LayerBytes, PassBytes

SENT = 2
"""Sent tensors that stay alive per connection until later ones are sent."""
ROUNDS = 3
"""After this many rounds of as many micro-batches as ranks, 1F1B has its maximum in flight."""


class Moment(NamedTuple):
    """A time at which a rank begins a backward."""

    stage: int
    """Which of the rank's stages, from 0."""
    chunk: int
    under_way: tuple[tuple[int, ...], ...]
    """For each stage of the rank and each chunk, the micro-batches in flight, without the one whose
    backward begins."""
    messages: int
    """Tensors of messages to be received or being sent."""


class RankBytes(NamedTuple):
    """The bytes of activations on a rank at its peak."""

    kept: float
    """What other micro-batches save."""
    at_work: float
    """What the running forward or backward takes, with messages."""
    on_host: float
    inputs: int
    """The most stage inputs stored at a time."""


class StageBytes(NamedTuple):
    """The bytes of a chunk of a micro-batch in one stage."""

    kept: float
    """Saved on the device between forward and backward, with keys for later chunks."""
    on_host: float
    peak: float
    """The peak of the backward, or of a forward without one."""


def rank_bytes(
    chunks: Sequence[PassBytes],
    stages: Stages,
    schedule: Schedule,
    micro_batches: int,
    rank: int,
    comes: float = 0.0,
) -> RankBytes:
    """Return the activation memory of a rank of a pipeline in a step of so many micro-batches.

    chunks: what each chunk of a micro-batch takes if a rank has all layers. comes: the bytes of the
    tied table's gradient, which arrives before the rank's last backward.
    """
    mine, numbers = range(rank, stages.count, stages.ranks), range(len(chunks))
    each = [[_stage_bytes(chunks, number, stages, stage) for number in numbers] for stage in mine]
    few = micro_batches
    if schedule.scheduler != "gpipe":
        few = min(micro_batches, ROUNDS * stages.ranks)
    anywhere, first = schedule._replace(sizes=()), stages.of_layer(chunks[0].first)
    every_moment = moments(stages.ranks, anywhere, few, rank, first)
    hidden = [one.hidden for one in chunks]
    if not every_moment:  # forward alone: no gradient of its output, but messages under way
        runs: list[int] = [*numbers] * min(micro_batches * schedule.virtual, SENT + 2)

        def forward(run: int) -> float:
            under_way = runs[max(0, run - SENT) : run] + runs[run + 1 : run + 2] * (rank > 0)
            most = max(stage[runs[run]].peak for stage in each) - hidden[runs[run]]
            return most + sum(hidden[number] for number in under_way)

        return RankBytes(0.0, max(map(forward, range(len(runs)))), 0.0, 0)
    message = sum(hidden) / len(hidden)

    def bytes_at(moment: Moment) -> tuple[float, float, float]:
        both = [*zip(chain(*moment.under_way), chain(*each), strict=True)]
        others, here = sum(n * one.kept for n, one in both), each[moment.stage][moment.chunk]
        on_host = sum(n * one.on_host for n, one in both) + here.on_host
        return others + here.peak + message * moment.messages, others, on_host

    found = [bytes_at(moment) for moment in every_moment]
    if comes:
        found.append((each[0][0].peak + message + comes, 0.0, each[0][0].on_host))
    peak, others, _ = max(found)
    inputs = max(sum(map(sum, moment.under_way)) + 1 for moment in every_moment)
    return RankBytes(others, peak - others, max(on_host for *_, on_host in found), inputs)


def _stage_bytes(
    chunks: Sequence[PassBytes], number: int, stages: Stages, stage: int
) -> StageBytes:
    """Return the bytes of a chunk in a stage."""
    one, mine, last = chunks[number], stages.layers(stage), stage == stages.count - 1
    trains = stage >= stages.of_layer(one.first)
    alone = one.bare if stage or not trains else ()
    layers = [(*alone, *one.layers[len(alone) :])[layer] for layer in mine]
    keeps = one.keeps_input[mine.start] and layers[0].kept  # one without a backward keeps nothing
    entered = one.hidden * (not keeps) if stage else one.embedded.kept
    waiting = (layer.held if one.offloads else layer.kept for layer in layers)
    below = [*accumulate(waiting, initial=entered)]
    if not trains:  # nothing is saved, but the stage's input stays alive until its end
        below = [0.0, *[one.hidden] * len(layers)]
    made = 0.0 if last else one.hidden
    every = [made + before + layer.most for before, layer in zip(below, layers, strict=False)]
    every += [below[-1] + one.head.most] if last else []
    keys = [_keys_of(of, zip(mine, layers, strict=True)) for of in chunks]
    peak = max(a + b for a, b in zip(every, _sums(keys, number, len(layers)), strict=False))
    if not trains:  # of the row's earlier chunks; in a stage that trains these are under way
        peak += sum(own.kept for each in keys[:number] for own in each)
    kept = below[-1] + one.angles + (one.head.kept if last else made)
    kept += sum(each.kept for each in keys[number]) * (number + 1 < len(chunks))
    on_host = sum(layer.kept - layer.held for layer in layers) if one.offloads else 0.0
    return StageBytes(kept * trains, on_host, peak + one.angles)


def _keys_of(one: PassBytes, layers: Iterable[tuple[int, LayerBytes]]) -> list[ChunkKeys]:
    """Return the bytes of a chunk's keys in each of these layers. One that saves nothing has no
    backward."""
    every = ((one.keys[number], layer) for number, layer in layers if one.keys)
    return [keys if layer.kept else keys.without_backward for keys, layer in every]


def _sums(keys: Sequence[Sequence[ChunkKeys]], chunk: int, layers: int) -> list[float]:
    """Return the bytes of gradients of a row's keys, and of a chunk's saved keys in lower layers,
    during the chunk's backward in each layer of a stage, and (last) before it begins. keys: of each
    chunk in these layers."""
    last, found = len(keys) - 1, list[float]()
    later = chunk < last
    for layer in range(layers + 1):
        # In layers above there are gradients from this chunk alone, or else the float32 sums.
        above = [one for each in keys[:chunk] for one in each[layer + 1 :]]
        below = [one for each in keys[: chunk + 1] for one in each[: layer + 1] if later]
        total = sum(one.summed if later else one.first for one in above)
        total += sum(one.first if chunk == last - 1 else one.summed for one in below)
        found.append(total + later * sum(one.kept for one in keys[chunk][:layer]))
    return found


@lru_cache(maxsize=4096)
def moments(
    ranks: int, schedule: Schedule, micro_batches: int, rank: int, first: int = 0
) -> tuple[Moment, ...]:
    """Return the times at which a rank begins a backward, without those at which it has less than
    at another. first: the first stage that has one; earlier ones save nothing."""
    virtual, last = schedule.virtual, ranks * schedule.virtual - 1
    every = actions_of(schedule.scheduler, rank, ranks, micro_batches, virtual, schedule.chunks)
    actions = [one for one in every if one.kind == "forward" or one.stage >= first]
    under_way = [[0] * schedule.chunks for _ in range(virtual)]
    # From each sending rank one receive is posted ahead.
    coming: Counter[int] = Counter()
    for action in actions:
        coming[_source(action.kind, action.stage, last, ranks)] += 1
    lines: dict[int, list[bool]] = {}
    found: dict[tuple[int, int], list[Moment]] = {}
    for kind, stage, _, chunk in actions:
        own = stage // ranks
        coming[_source(kind, stage, last, ranks)] -= 1
        if kind == "forward":
            under_way[own][chunk] += stage >= first
            if stage < last:
                _send(lines, (stage + 1) % ranks, alone=stage < first)
            continue
        under_way[own][chunk] -= 1
        posted = sum(1 for source, left in coming.items() if left and source not in (-1, rank))
        sent = sum(sum(line) for line in lines.values())
        one = Moment(own, chunk, tuple(map(tuple, under_way)), posted + sent)
        most = found.setdefault((own, chunk), [])
        if not any(_covers(other, one) for other in most):
            most[:] = [*(other for other in most if not _covers(one, other)), one]
        if stage > first:
            _send(lines, (stage - 1) % ranks, alone=True)
    return tuple(chain.from_iterable(found.values()))


def _covers(one: Moment, other: Moment) -> bool:
    """Tell whether a time has at least as much of everything as another of its stage and chunk."""
    every = zip(one.under_way, other.under_way, strict=True)
    counts = (pair for both in every for pair in zip(*both, strict=True))
    return one.messages >= other.messages and all(a >= b for a, b in counts)


def _source(kind: str, stage: int, last: int, ranks: int) -> int:
    """Return the rank that sends the input of an action; -1 if nothing is sent."""
    other = stage - 1 if kind == "forward" else stage + 1
    return other % ranks if 0 <= other <= last else -1


def _send(lines: dict[int, list[bool]], to: int, *, alone: bool) -> None:
    """Count a tensor that a connection keeps alive. alone: whether nothing else does; a forward's
    output is needed by the backward anyway."""
    lines[to] = [*lines.get(to, []), alone][-SENT:]
