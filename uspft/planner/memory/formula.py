"""The only memory formula: the bytes of one rank by part, their peak, and the longest row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from uspft.config.algorithms import WHOLE, AlgorithmRow
from uspft.pipeline.schedules import PLAIN
from uspft.planner.memory.operations import WIDE
from uspft.planner.memory.passes import PassBytes, pass_bytes
from uspft.planner.memory.pipeline import ROUNDS, rank_bytes
from uspft.planner.memory.zero import State, state_of
from uspft.planner.options import Options
from uspft.planner.products import head_projection
from uspft.planner.stages import cut_by_flops, stage_layers, stages_of
from uspft.planner.step_shape import ROUNDING, DrawnRows, Memo
from uspft.planner.trained import EMBEDDING, kinds_of_layers, outside_trains
from uspft.sequence import chunk_multiple

if TYPE_CHECKING:
    from uspft.families import ModelShape
    from uspft.layout import Layout

USABLE_SHARE = 0.92
"""The share of a card's memory, as torch reports it, that a rank's peak may fill: the context, NCCL
and gaps take the rest."""
ACTIVATIONS = ("activations", "at work", "batch")
"""The parts that depend on the rows."""
KILOTOKEN = 1024
MOST_KILOTOKENS = 1 << 20
"""Kilotokens per rank at which the search for the longest row ends."""


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank."""

    parts: Mapping[str, int]
    """Bytes on the device at its peak, by part."""
    host_bytes: int = 0
    """Bytes that wait in the host's memory."""
    stage_inputs: int = 0
    """The most stage inputs that a pipeline rank stores at a time."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def activation_bytes(self) -> int:
        """The bytes that depend on the rows."""
        return sum(self.parts[name] for name in ACTIVATIONS)

    @property
    def state_bytes(self) -> int:
        """The bytes of weights, gradients and the optimizer, whatever the rows."""
        return self.peak_bytes - self.activation_bytes


def memory_of(
    shape: ModelShape,
    layout: Layout,
    row_tokens: int,
    *,
    options: Options,
    memo: Memo | None = None,
) -> Memory:
    """Return a rank's memory for rows of this many tokens; in a pipeline that of the rank with
    most.

    memo: a cache that other layouts and options of the model share; None: none is shared.
    """
    if layout.pipeline > 1:
        every = memory_of_ranks(shape, layout, row_tokens, options=options, memo=memo)
        return max(every, key=lambda one: one.peak_bytes)
    known = Memo() if memo is None else memo
    state = _state(shape, layout, options, known)
    device, waits = activations_in(*_pass(shape, layout, row_tokens, options, known), state)
    return Memory(state.beside(device), int(sum(state.host.values()) + waits))


def memory_of_ranks(
    shape: ModelShape,
    layout: Layout,
    row_tokens: int,
    *,
    options: Options,
    memo: Memo | None = None,
) -> list[Memory]:
    """Return the memory of each pipeline rank for rows of this many tokens.

    memo: as in memory_of; with one, of ranks whose layers take and store the same only the first,
    which has most micro-batches in flight, and the last are returned.
    """
    schedule, multiple = options.schedule, chunk_multiple(layout, options.use_seq_parallel)
    cut = cut_by_flops(shape, schedule.chunks, multiple)
    chunks = (cut.of_tokens if options.equal_tokens else cut).of_one_document(row_tokens)
    if len(chunks) == 1:
        of_pass, batch = _pass(shape, layout, row_tokens, options, Memo() if memo is None else memo)
        passes = [of_pass]
    else:
        passes, batch = _each_chunk(shape, layout, chunks, options)
    stages = stages_of(shape, DrawnRows.whole(row_tokens), layout.pipeline, options)
    number = options.passes(layout) if options.step_rows else ROUNDS * stages.ranks
    found, met = list[Memory](), set[object]()
    kinds = kinds_of_layers(shape, options.lora, options.freeze)
    layers = [
        (*both, n <= passes[0].first)
        for n, both in enumerate(zip(passes[0].layers, kinds, strict=True))
    ]
    trains_tied = shape.tied and outside_trains(options.lora, options.freeze)[EMBEDDING]
    table = head_projection(shape).on(layout.mesh_columns).parameters / layout.mesh_rows
    table *= WIDE * trains_tied
    for rank in range(stages.ranks):
        mine, last = stage_layers(stages, rank), rank == stages.ranks - 1
        alike = stages.sizes[rank :: stages.ranks], tuple(layers[n] for n in mine.layers)
        if alike in met and memo is not None and not last:
            continue
        met.add(alike)
        comes = table * (rank == 0)
        taken = rank_bytes(passes, stages, schedule, number, rank, comes)
        state = state_of(shape, layout, options, mine)
        parts = {"activations": taken.kept, "at work": taken.at_work, "batch": number * batch}
        host = int(sum(state.host.values()) + taken.on_host)
        found.append(Memory(state.beside(parts), host, taken.inputs))
    return found


def _each_chunk(
    shape: ModelShape, layout: Layout, chunks: Sequence[int], options: Options
) -> tuple[list[PassBytes], float]:
    """Return pass_bytes of each chunk of a row, and the bytes of a batch, which is in memory whole
    and chunk by chunk. chunks: their tokens.

    A ring gathers the keys of all earlier chunks; without one, attention to earlier chunks runs one
    after another, so that their number does not matter.
    """
    before = accumulate(chunks[:-1], initial=0)
    far = [a / b if layout.ring > 1 else float(a > 0) for a, b in zip(before, chunks, strict=True)]
    each = [*zip(chunks, far, strict=True)]
    known = {one: pass_bytes(shape, layout, one[0], options, one[1]) for one in {*each}}
    return [known[one][0] for one in each], 2 * sum(known[one][1] for one in each)


def least_bytes(
    shape: ModelShape, layout: Layout, row_tokens: int, options: Options, memo: Memo
) -> float:
    """Return a lower bound of a rank's memory: the model's state and each layer's input, which
    every layer with trained weights saves; in a pipeline the mean of its ranks' state. memo: as of
    memory_of."""
    device = _state(shape, layout, options, memo).device
    if layout.pipeline > 1:
        whole = sum(device.get(part, 0.0) for part in ("weights", "gradients", "optimizer"))
        return whole / layout.pipeline * (1 - ROUNDING)
    state = sum(device.values())
    if options.lora or options.freeze or options.offload_activations:
        return state
    tokens = options.micro_batch * row_tokens // layout.context
    split = layout.mesh_columns if options.use_seq_parallel or layout.is_mesh else 1
    return state + shape.layers * (tokens // split) * shape.hidden_size * options.element


def _state(shape: ModelShape, layout: Layout, options: Options, memo: Memo) -> State:
    """Return state_of, worked out once for all ways in which it is the same."""
    plain = replace(
        options, algorithm=WHOLE, micro_batch=1, recompute="", use_seq_parallel=False, slices=()
    )
    degrees = layout.mesh_columns, layout.mesh_rows, layout.copies, layout.experts
    key = "state", *degrees, options.passes(layout) > 1, plain
    return memo.once(key, lambda: state_of(shape, layout, options))


def _pass(
    shape: ModelShape, layout: Layout, row_tokens: int, options: Options, memo: Memo
) -> tuple[PassBytes, float]:
    """Return pass_bytes, worked out once for all ways in which they are the same."""
    # Activations depend on the number of replicas only through expert parallelism, and on ZeRO's
    # stage only if copies of tokens put off the gradients of weights.
    layout = replace(layout, data=layout.experts)
    stage = options.zero_stage if options.copies > 1 else 1
    options = replace(options, zero_stage=stage, step_rows=None)
    if options.first_layers is None:  # stages say which layers are checkpointed
        layout = replace(layout, pipeline=1)
        options = replace(options, schedule=PLAIN)
    key = "pass", layout, row_tokens, options
    return memo.once(key, lambda: pass_bytes(shape, layout, row_tokens, options))


def activations_in(one: PassBytes, batch: float, state: State) -> tuple[dict[str, float], float]:
    """Return the bytes of activations by part at their peak, and those on the host, if all layers
    are one stage.

    one, batch: of one micro-batch. state: of the model. The gradients that are there at the peak,
    or what the state takes beside layers during the loss, are parts too.
    """
    layers = list(zip((one.embedded, *one.layers), (0.0, *one.routers), strict=True))
    waiting = [(each.held if one.offloads else each.kept) + own for each, own in layers]
    come = state.coming or (0.0,) * len(one.layers)
    below = [*accumulate(waiting, initial=0.0)]
    every = zip(below, layers, (*come[:1], *come), strict=False)
    peak, kept, made = max((kept + own + each.most + g, kept, g) for kept, (each, own), g in every)
    loss, beside = below[-1] + one.head.most, {"gradients": made} if made else dict[str, float]()
    if loss + sum(state.at_loss.values()) > peak:
        peak, kept, made, beside = loss, below[-1], 0.0, dict(state.at_loss)
    work = peak - made - kept
    parts = {"activations": kept, "at work": work, "batch": batch + one.angles, **beside}
    return parts, sum(each.kept - each.held for each in one.layers) if one.offloads else 0.0


def fits(memory: Memory, card_bytes: float) -> bool:
    """Tell whether a rank fits on a card with this much memory."""
    return memory.peak_bytes <= USABLE_SHARE * card_bytes


def longest_row(shape: ModelShape, layout: Layout, card_bytes: float, *, options: Options) -> int:
    """Return the longest row in tokens that fits on a card, in kilotokens of each rank, or 0."""
    return longest_of(
        lambda row: memory_of(shape, layout, row, options=options).peak_bytes, layout, card_bytes
    )


def longest_of(peak: Callable[[int], float], layout: Layout, card_bytes: float) -> int:
    """Return the longest row in tokens, in kilotokens of each rank, whose peak fits on a card, or
    0.

    peak: from the tokens of a row to bytes. They are nearly linear, so that the search starts where
    the line reaches the card's memory.
    """
    step, usable = KILOTOKEN * layout.context, USABLE_SHARE * card_bytes
    low, high = (0, 0.0), (MOST_KILOTOKENS, math.inf)
    line, guess = list[tuple[int, float]](), 1
    while high[0] - low[0] > 1:
        tried = guess, peak(guess * step)
        low, high = (tried, high) if tried[1] <= usable else (low, tried)
        line = [*line[-1:], tried]
        guess = (low[0] + high[0]) // 2 if math.isfinite(high[1]) else 64 * low[0]
        if len(line) == 2 and (more := line[1][1] - line[0][1]):
            slope = more / (line[1][0] - line[0][0])
            guess = math.floor(tried[0] + (usable - tried[1]) / slope)
        guess = min(max(guess, low[0] + 1), high[0] - 1)
    return low[0] * step


MANY = 32
"""A number of rows with which the layers are the peak of a forward and backward."""


def row_memory(
    options: Options, shape: ModelShape, row: AlgorithmRow, layout: Layout, length: int
) -> tuple[int, int]:
    """Return the bytes of each further row of this length on one of the ranks that share it, and
    the bytes that do not depend on the number of rows.

    Together they are an upper bound: with few rows the loss may be the peak, and with many the
    layers, of which a row takes more. Of one row it is exact, unless a second one brings what no
    later one does, such as a second tile of the loss, or the index by which Ulysses sorts rows.
    """

    def of(rows: int) -> int:
        # A pipeline has as many micro-batches of several rows as of one.
        step = options.step_rows and rows * options.step_rows
        how = replace(options, algorithm=row, micro_batch=rows, zero_stage=0, step_rows=step)
        return memory_of(shape, layout, length, options=how).activation_bytes

    one, two, some, more = map(of, (1, 2, MANY, 2 * MANY))
    each = -(-(more - some) // MANY)
    return each, max(one - each, two - 2 * each)
