"""The bytes of activations on a pipeline rank: what micro-batches in flight save, what a running
backward needs in addition, and messages (engine/pipelined.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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


def _sums(keys: Sequence[ChunkKeys], sizes: Sequence[float], chunk: int) -> list[float]:
    """Return the bytes of gradients of a row's keys, and of this chunk's saved keys in lower
    layers, during the chunk's backward in each layer of a stage, and (last) before it begins.
    sizes: of the chunks."""
    last, before = len(sizes) - 1, sum(sizes[:chunk])
    with_this = (before + sizes[chunk]) * (chunk < last)
    found = []
    for layer in range(len(keys) + 1):
        # In layers above there are gradients from this chunk alone, or else the float32 sums.
        above = sum(one.first if chunk == last else one.summed for one in keys[layer + 1 :])
        below = sum(one.first if chunk == last - 1 else one.summed for one in keys[: layer + 1])
        kept = sizes[chunk] * (chunk < last) * sum(one.kept for one in keys[:layer])
        found.append(before * above + with_this * below + kept)
    return found


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
    """The bytes of a micro-batch in one stage."""

    kept: float
    """Saved on the device between forward and backward, for the tokens of its largest chunk."""
    keys: float
    """Of keys for later chunks, for a chunk that is not the last, in the same way."""
    whole: float
    """Of a chunk regardless of its tokens."""
    on_host: float
    peaks: tuple[float, ...]
    """The peak in the backward of each chunk."""


def rank_bytes(
    one: PassBytes,
    stages: Stages,
    schedule: Schedule,
    micro_batches: int,
    rank: int,
    sizes: Sequence[float] = (1.0,),
    chunks: Sequence[PassBytes] = (),
    comes: float = 0.0,
) -> RankBytes:
    """Return the activation memory of a rank of a pipeline in a step of so many micro-batches.

    one: what a micro-batch takes if a rank has all layers. sizes: the tokens of each chunk relative
    to the largest one's. chunks: what each chunk takes if it has as many tokens as the largest, of
    which `one` is the first. comes: the bytes of the tied table's gradient, which arrives before
    the rank's last backward.
    """
    mine = range(rank, stages.count, stages.ranks)
    each = [_stage_bytes(one, stages, stage, sizes, chunks) for stage in mine]
    few = micro_batches
    if schedule.scheduler != "gpipe":
        few = min(micro_batches, ROUNDS * stages.ranks)
    anywhere, first = schedule._replace(sizes=()), stages.of_layer(one.first)
    every_moment = moments(stages.ranks, anywhere, few, rank, first)
    if not every_moment:  # forward alone: no gradient of its output, but messages under way
        runs = micro_batches * schedule.virtual * schedule.chunks
        under_way = [min(n, SENT) + (rank > 0 and n + 1 < runs) for n in range(min(runs, SENT + 2))]
        beside = (max(under_way) - 1) * one.hidden
        return RankBytes(0.0, max(peak for stage in each for peak in stage.peaks) + beside, 0.0, 0)
    message = one.hidden * sum(sizes) / len(sizes)

    def bytes_at(moment: Moment) -> tuple[float, float, float]:
        weighed = [
            [n * size for n, size in zip(counts, sizes, strict=True)] for counts in moment.under_way
        ]
        both = list(zip(each, weighed, strict=True))
        others = sum(sum(tokens) * stage.kept for stage, tokens in both)
        others += sum(sum(tokens[:-1]) * stage.keys for stage, tokens in both)
        others += sum(sum(n) * s.whole for s, n in zip(each, moment.under_way, strict=True))
        here = each[moment.stage]
        at_work = here.peaks[moment.chunk] + message * moment.messages
        on_host = sum(sum(tokens) * stage.on_host for stage, tokens in both) + here.on_host
        return others + at_work, others, on_host

    found = [bytes_at(moment) for moment in every_moment]
    if comes:
        found.append((each[0].peaks[0] + message + comes, 0.0, each[0].on_host))
    peak, others, _ = max(found)
    inputs = max(sum(map(sum, moment.under_way)) + 1 for moment in every_moment)
    return RankBytes(others, peak - others, max(on_host for *_, on_host in found), inputs)


def _stage_bytes(
    one: PassBytes,
    stages: Stages,
    stage: int,
    sizes: Sequence[float],
    chunks: Sequence[PassBytes],
) -> StageBytes:
    """Return the bytes of a micro-batch in a stage; other arguments are as in rank_bytes."""
    trains, last = stage >= stages.of_layer(one.first), stage == stages.count - 1
    alone, mine = one.bare if stage or not trains else (), stages.layers(stage)

    def of_mine(layers: Sequence[LayerBytes]) -> list[LayerBytes]:
        return [(*alone, *layers[len(alone) :])[layer] for layer in mine]

    layers, keys = of_mine(one.layers), [one.keys[layer] for layer in mine] if one.keys else []
    entered = one.hidden * (not one.keeps_input[mine.start]) if stage else one.embedded.kept
    waiting = (layer.held if one.offloads else layer.kept for layer in layers)
    below = [*accumulate(waiting, initial=entered)]
    if not trains:  # nothing is saved, but the stage's input stays alive until its end
        below = [0.0, *[one.hidden] * len(layers)]
    made = 0.0 if last else one.hidden
    out = one.head.kept - one.any_head.kept if last else made
    peaks = []
    for chunk, size in enumerate(sizes):
        at_work = of_mine(chunks[chunk].layers) if chunks else layers
        every = [made + before + layer.most for before, layer in zip(below, at_work, strict=False)]
        every += [below[-1] + one.head.most - one.any_head.most] if last else []
        sums = _sums(keys, sizes, chunk) if keys else [0.0] * (len(layers) + 1)
        sums[-1] += one.any_head.most * last
        most = max(size * a + b for a, b in zip(every, sums, strict=False))
        peaks.append(most + size * one.angles)
    return StageBytes(
        kept=(below[-1] + one.angles + out) * trains,
        keys=sum(own.kept for own in keys),
        whole=one.any_head.kept * last * trains,
        on_host=sum(layer.kept - layer.held for layer in layers) if one.offloads else 0.0,
        peaks=tuple(peaks),
    )


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


def each_chunk(
    tokens: Sequence[int], ring: int, taking: Callable[[float], PassBytes]
) -> list[PassBytes]:
    """Return what each chunk would take with as many tokens as the largest one.

    tokens: of each chunk. taking: returns it for a number of earlier tokens per token of the chunk.
    A ring gathers the keys of all earlier chunks; without one, attention to earlier chunks runs one
    after another, so that their number does not matter.
    """
    before = accumulate(tokens[:-1], initial=0)
    behind = [a / b if ring > 1 else float(a > 0) for a, b in zip(before, tokens, strict=True)]
    known = {one: taking(one) for one in {*behind}}
    return [known[one] for one in behind]
