"""The only memory formula: the bytes of one rank by part, their peak, and the longest row."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from uspft.config.algorithms import WHOLE, AlgorithmRow, row_of
from uspft.config.deepspeed_fields import (
    REDUCE_BUCKET,
    live_parameters,
    prefetch_bucket,
    reuse_distance,
)
from uspft.families import NO_KEYS, layer_windows
from uspft.pipeline.schedules import PLAIN as PLAIN_SCHEDULE
from uspft.pipeline.schedules import Schedule
from uspft.pipeline.stages import Each, first_layers
from uspft.planner.activations import (
    HeadSizes,
    LayerBytes,
    balance_bytes,
    head_bytes,
    layer_bytes,
    router_bytes,
)
from uspft.planner.attention_memory import Sharing
from uspft.planner.attention_work import DrawnRows
from uspft.planner.expert_memory import Experts
from uspft.planner.expert_traffic import ranks_met
from uspft.planner.in_flight import RING, KeyTransfer, Window
from uspft.planner.layer_kinds import LayerKind, layer_kind, layer_kinds
from uspft.planner.layer_sizes import LayerSizes
from uspft.planner.operations import WIDE
from uspft.planner.products import head_projection, inner_features, layer_projections
from uspft.planner.stage_memory import ROUNDS, PassBytes, chunk_keys, each_chunk, rank_bytes
from uspft.planner.stages import chunk_multiple, cut_by_flops, schedule_of, stage_layers, stages_of
from uspft.planner.state import ADAM, State, Zero, state_of
from uspft.planner.state_memory import StateHeads
from uspft.planner.trained import (
    EMBEDDING,
    HEAD,
    LAST_NORM,
    Lora,
    StageLayers,
    Trained,
    counts_of,
    matrices_of_experts,
    outside_trains,
    trained_layers,
)

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.config.inputs import ModelBlock
    from uspft.families import ModelShape
    from uspft.layout import Layout

USABLE_SHARE = 0.92
"""The share of a card's memory, as torch reports it, that a rank's peak may fill: the context, NCCL
and gaps take the rest."""
RECOMPUTES = ("nothing", "exchange", "attention")
"""What of attention may be made again, the least work first."""
ACTIVATIONS = ("activations", "at work", "batch")
"""The parts that rows need."""
BATCH_BYTES = 6 * 8
"""Of a token in a batch: its number, label, position, place in the stream, row, and whether it has
a target, all in int64."""
KILOTOKEN = 1024
MOST_KILOTOKENS = 1 << 20
"""Of a rank, at which the search for the longest row ends."""


@dataclass(frozen=True)
class Options:
    """What decides the memory of a rank beside the model, the layout and the row's length."""

    algorithm: AlgorithmRow = WHOLE
    """The row of the algorithm that shares rows."""
    exchange_stages: int = 0
    """Of an exchange; 0 for auto."""
    use_seq_parallel: bool = False
    copies: int = 1
    """Of a rank's tokens, which blocks of split matrices take by turns."""
    micro_batch: int = 1
    """Rows of a rank in one forward."""
    dtype: str = "bfloat16"
    zero_stage: int = 1
    bucket: int = REDUCE_BUCKET
    """The elements of DeepSpeed's reduce_bucket_size; under overlap_comm there are two_buckets."""
    live: int = live_parameters({})
    """The gathered elements up to which ZeRO-3 fetches weights ahead."""
    prefetch: int = prefetch_bucket({})
    """The elements that ZeRO-3 fetches ahead together."""
    reuse: int = reuse_distance({})
    """The elements of weights within which ZeRO-3 keeps those that come again."""
    two_buckets: bool = False
    offload_optimizer: bool = False
    offload_weights: bool = False
    saves_beside: bool = False
    """Whether a checkpoint waits on the host while it is written."""
    gradient_reduction: str = "float32"
    """The type in which gradients cross ranks."""
    checkpointing: bool = True
    first_layers: int | Each | None = None
    """How many layers of a stage, or of each, are checkpointed, where not all are."""
    recompute: str = "nothing"
    at_once: int | None = None
    """How many query heads of a KV head are attended with at once; None for all heads."""
    offload_activations: bool = False
    loss_tile: int | None = 1024
    """Tokens; None for all at once."""
    mlp_tile: int | None = None
    slices: tuple[int, ...] = (1, 1, 1, 1)
    """Of each product on a mesh."""
    lora: Lora | None = None
    freeze: tuple[str, ...] = ()
    """Regular expressions over parameter names."""
    schedule: Schedule = PLAIN_SCHEDULE
    """Of a pipeline's ranks."""
    equal_tokens: bool = False
    """Whether chunks of a row have equal tokens; else they take equal time."""
    step_rows: int | None = None
    """Rows of a step, over all replicas; None: enough to fill a pipeline."""

    @property
    def element(self) -> int:
        """The bytes of a weight."""
        return 4 if self.dtype == "float32" else 2

    def several(self, layout: Layout) -> bool:
        """Tell whether a step has more than one forward and backward."""
        return (self.step_rows or 0) > self.micro_batch * layout.data


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank."""

    parts: Mapping[str, int]
    """Bytes on the device at its peak, by part."""
    host_bytes: int = 0
    """Bytes that wait in the host's memory."""
    unpredicted: tuple[str, ...] = ()
    """What there is of the layout that the formula does not know; parts are a guess with any."""
    stage_inputs: int = 0
    """The most inputs of stages that a rank of a pipeline keeps at a time."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def weight_bytes(self) -> int:
        """What weights alone need, which is known of every layout."""
        return self.parts.get("weights", 0)

    @property
    def activation_bytes(self) -> int:
        """What rows need."""
        return sum(self.parts[name] for name in ACTIVATIONS)

    @property
    def state_bytes(self) -> int:
        """What weights, gradients and the optimizer need, whatever the rows."""
        return self.peak_bytes - self.activation_bytes


def options_of(recipe: Recipe, layout: Layout) -> Options:
    """Return the options of a recipe in a layout.

    `auto` counts as what it is without a need to save memory.
    """
    zero, memory, model = recipe.deepspeed.zero_optimization, recipe.memory, recipe.model
    parallel, slices = recipe.parallel_config, recipe.parallel_config.tensor_slices
    again = memory.gradient_checkpointing

    def away(key: str) -> bool:
        return bool((zero.get(key) or {}).get("device", "none") != "none")

    def number(value: Any) -> int | None:
        return value if isinstance(value, int) else None

    return Options(
        algorithm=row_of(parallel.context_parallel_algo, layout.context),
        exchange_stages=number(parallel.exchange_stages) or 0,
        use_seq_parallel=bool(parallel.use_seq_parallel),
        copies=parallel.fine_grain_interleave,
        micro_batch=recipe.training.micro_batch_size,
        dtype=model.dtype,
        zero_stage=int(zero.get("stage", 1)),
        bucket=int(zero.get("reduce_bucket_size") or REDUCE_BUCKET),
        live=live_parameters(zero),
        prefetch=prefetch_bucket(zero),
        reuse=reuse_distance(zero),
        two_buckets=bool(zero.get("overlap_comm")),
        offload_optimizer=away("offload_optimizer"),
        offload_weights=away("offload_param"),
        saves_beside=recipe.checkpoint.overlap,
        gradient_reduction=memory.gradient_reduction,
        checkpointing=bool(memory.gradient_checkpointing),
        first_layers=None if isinstance(again, bool) else again,
        recompute="nothing" if memory.recompute == "auto" else memory.recompute,
        at_once=memory.heads_at_once,
        offload_activations=memory.offload_activations == "cpu",
        loss_tile=number(memory.loss_tile_tokens),
        mlp_tile=number(memory.mlp_tile_tokens),
        slices=slices if isinstance(slices, tuple) else (number(slices) or 1,) * 4,
        lora=lora_of(model),
        freeze=tuple(model.freeze),
        schedule=schedule_of(parallel),
        equal_tokens=parallel.sequence_chunks == "tokens",
        step_rows=recipe.training.global_batch_size,
    )


def lora_of(model: ModelBlock) -> Lora | None:
    """Return the adapters of a recipe's model."""
    if not model.adapter:
        return None
    block = model.adapter
    lora = Lora(block.rank, block.target_modules, dropout=block.dropout > 0)
    return replace(lora, parameters=block.target_parameters)


def memory_of(
    shape: ModelShape,
    layout: Layout,
    row_tokens: int,
    *,
    options: Options = Options(),
    one: tuple[PassBytes, float] | None = None,
    state: State | None = None,
) -> Memory:
    """Return what a rank needs for rows of so many tokens; of a pipeline the rank that needs most.

    one: as of memory_of_ranks. state: of the model, where that is known and is one stage.
    """
    if layout.pipeline > 1:
        every = memory_of_ranks(
            shape, layout, row_tokens, options=options, one=one, alike=one is None
        )
        return max(every, key=lambda one: one.peak_bytes)
    state = state or state_in(shape, layout, options)
    one = one or pass_bytes(shape, layout, row_tokens, options)
    device, waits = activations_in(*one, state.at_loss)
    return Memory(
        state.beside(device),
        int(sum(state.host.values()) + waits),
        unpredicted(shape, layout, row_tokens, options=options),
    )


def memory_of_ranks(
    shape: ModelShape,
    layout: Layout,
    row_tokens: int,
    *,
    options: Options = Options(),
    one: tuple[PassBytes, float] | None = None,
    alike: bool = True,
) -> list[Memory]:
    """Return what each rank along a pipeline needs for rows of so many tokens.

    one: what one micro-batch takes, and its batch, where that is known. alike: whether of ranks
    with as many layers all are wanted; else the first, which has most micro-batches under way, and
    the last.
    """
    windows, schedule = layer_windows(shape), options.schedule
    multiple = chunk_multiple(layout, options.use_seq_parallel)
    cut = cut_by_flops(shape, windows, schedule.chunks, multiple)
    chunks = (cut.of_tokens if options.equal_tokens else cut).of_one_document(row_tokens)
    largest, whole = max(chunks), len(chunks) == 1
    of_pass, batch = (whole and one) or pass_bytes(shape, layout, largest, options)
    every = list[PassBytes]()
    if not whole:
        of = shape, layout, largest
        every = each_chunk(chunks, layout.ring, lambda far: pass_bytes(*of, options, far)[0])
        of_pass = replace(of_pass, keys=tuple(map(chunk_keys, _layers(*of, options))))
        batch *= 2 * row_tokens / largest  # whole, and chunk by chunk
    again = options.checkpointing and options.first_layers is None
    rows = DrawnRows.whole(row_tokens)
    stages = stages_of(shape, windows, rows, layout.pipeline, schedule, again=again)
    of_passes = options.micro_batch * layout.data
    passes = -(-(options.step_rows or ROUNDS * stages.ranks * of_passes) // of_passes)
    unknown = unpredicted(shape, layout, row_tokens, options=options)
    found, met = list[Memory](), set[object]()
    for rank in range(stages.ranks):
        sizes, last = stages.sizes[rank :: stages.ranks], rank == stages.ranks - 1
        if sizes in met and not (alike or last):
            continue
        met.add(sizes)
        shares = [tokens / largest for tokens in chunks]
        taken = rank_bytes(of_pass, stages, schedule, passes, rank, shares, every)
        state = state_in(shape, layout, options, stage_layers(stages, rank))
        parts = {"activations": taken.kept, "at work": taken.at_work, "batch": passes * batch}
        host = int(sum(state.host.values()) + taken.on_host)
        found.append(Memory(state.beside(parts), host, unknown, taken.inputs))
    return found


def state_in(
    shape: ModelShape, layout: Layout, options: Options, stage: StageLayers | None = None
) -> State:
    """Return the bytes of weights, gradients and the optimizer, whatever the rows. stage: of a
    pipeline; None has all layers."""
    held = layout.mesh_columns, options.lora, options.freeze
    counts = counts_of(shape, *held, stage, layout.experts)
    if layout.mesh_rows > 1:
        counts = counts.divided(layout.mesh_rows)
    zero = Zero(
        stage=options.zero_stage,
        ranks=layout.copies,
        alike=layout.alike,
        element=options.element,
        crossing=2 if options.gradient_reduction == "bfloat16" else 4,
        bucket=options.bucket,
        live=options.live,
        # Stages run in another order each time: DeepSpeed knows none by which to fetch or keep.
        prefetch=options.prefetch if layout.pipeline == 1 else 0,
        reuse=options.reuse if layout.pipeline == 1 else 0,
        again=options.checkpointing,
        two_buckets=options.two_buckets,
        matrix=shape.hidden_size * shape.intermediate_size,
        several=options.several(layout),
        optimizer_away=options.offload_optimizer,
        weights_away=options.offload_weights,
    )
    state = state_of(zero, counts)
    if options.saves_beside:  # ranks that hold the same parts deal them out evenly
        state.host["checkpoint"] = (WIDE + ADAM) * counts.trained / layout.copies
    if stage and stage.last and shape.tied:  # a copy of the table, and the sum of its gradients
        table = head_projection(shape).on(layout.mesh_columns).parameters / layout.mesh_rows
        trains = outside_trains(options.lora, options.freeze)[EMBEDDING]
        state.device["tied copy"] = table * (options.element + WIDE * trains)
    return state


def unpredicted(
    shape: ModelShape, layout: Layout, row_tokens: int, *, options: Options = Options()
) -> tuple[str, ...]:
    """Return what there is of a model, a layout and options that the formula does not know."""
    found = {
        "experts beside an MLP": shape.beside_mlp,
        "embeddings of each layer": bool(shape.layer_features),
        "layers that use the keys of others": bool(shape.borrowers),
    }
    return tuple(what for what, here in found.items() if here)


def activations_in(
    one: PassBytes, batch: float, at_loss: Mapping[str, float]
) -> tuple[dict[str, float], float]:
    """Return the bytes of activations by part at their peak, and those that wait on the host. one,
    batch: what one micro-batch takes, and its batch, where all layers are one stage. at_loss: what
    the state takes beyond that of layers while the loss is made; parts too, if the peak is there.
    """
    layers = list(zip(one.layers, one.routers, strict=True))
    waiting = ((each.held if one.offloads else each.kept) + own for each, own in layers)
    below = [*accumulate(waiting, initial=one.embedded)]
    every = zip(below, layers, strict=False)
    peak, kept = max((kept + own + each.most, kept) for kept, (each, own) in every)
    loss, beside = below[-1] + one.head.most, dict[str, float]()
    if loss + sum(at_loss.values()) > peak:
        peak, kept, beside = loss, below[-1], dict(at_loss)
    parts = {"activations": kept, "at work": peak - kept, "batch": batch + one.angles, **beside}
    return parts, sum(each.kept - each.held for each in one.layers) if one.offloads else 0.0


def pass_bytes(
    shape: ModelShape, layout: Layout, row_tokens: int, options: Options, behind: float = 0.0
) -> tuple[PassBytes, float]:
    """Return what one micro-batch takes by layer, and its batch itself. behind: as of Sharing."""
    kinds = _layers(shape, layout, row_tokens, options, behind)
    outside = outside_trains(options.lora, options.freeze)
    # With checkpointing transformers makes the embedding's output ask for a gradient.
    reached, each = outside[EMBEDDING] or options.checkpointing, list[LayerBytes]()
    known: dict[tuple[int, bool, int], LayerBytes] = {}
    offloads = kinds[0].offloads
    # Where the embedding is frozen, its output is a leaf, which stays as long as there is a graph.
    copied = kinds[0].tensor > 1 or offloads or kinds[0].kind.scaled
    leaf = options.checkpointing and not outside[EMBEDDING] and copied
    embedded = kinds[0].inside_bytes() if leaf else 0.0
    if offloads and all(one is not kinds[0] for one in kinds[1:]):
        kinds[0] = replace(kinds[0], first=True)
    for sizes in kinds:
        # transformers' forward holds what the first layer takes, and what was scaled to it.
        scaled, apart = sizes.kind.scaled, not leaf or sizes.tensor > 1
        beside = (scaled and apart) + (offloads and bool(each) and (scaled or apart))
        if sizes.recompute is None:
            beside = (bool(each) and each[0].lets_go) + (scaled and options.element < WIDE)
        key = id(sizes), reached, beside
        known[key] = known.get(key) or layer_bytes(sizes, reached=reached, beside=beside)
        each.append(known[key])
        reached = reached or bool(sizes.trained or sizes.adapted)
    head = HeadSizes(
        kinds[-1],
        head_projection(shape).on(layout.mesh_columns).outputs,
        options.loss_tile,
        trains=outside[HEAD] if not shape.tied else outside[EMBEDDING],
        norm_trains=outside[LAST_NORM],
        capped=shape.full.get("final_logit_softcapping") is not None,
    )
    loss = head_bytes(head, reached=reached)
    any_head = LayerBytes(0.0, 0.0)
    if layout.pipeline > 1:  # of a token, beside which that is nothing
        one_token = replace(head.layer, sharing=replace(head.layer.sharing, tokens=1))
        any_head = head_bytes(replace(head, layer=one_token), reached=reached)
    tokens = kinds[0].sharing.tokens
    angles = tokens * kinds[0].kind.angle_bytes(shape.head_dim, options.element)
    # Without checkpointing a norm keeps its input where that is in float32 anyway.
    keeps = tuple((one.recompute or options.element == WIDE) and not offloads for one in kinds)
    trains = [bool(one.trained or one.adapted) for one in kinds]
    first = 0 if outside[EMBEDDING] or not any(trains) else trains.index(True)
    alone = kinds[: first + 1] if first else []
    routers = tuple(router_bytes(shape.full, sizes) for sizes in kinds)
    balanced = max(loss.most, balance_bytes(head, routers))
    one = PassBytes(
        tuple(each),
        LayerBytes(loss.kept, balanced),
        any_head,
        kinds[0].between_bytes(),
        float(angles),
        embedded,
        offloads,
        tuple(map(bool, keeps)),
        tuple(layer_bytes(sizes, reached=False, beside=not sizes.recompute) for sizes in alone),
        routers,
    )
    return one, float(BATCH_BYTES * tokens)


def _layers(
    shape: ModelShape, layout: Layout, row_tokens: int, options: Options, behind: float = 0.0
) -> list[LayerSizes]:
    """Return every layer as a rank has it, those that are alike as one object."""
    tokens = -(-options.micro_batch * row_tokens // layout.context)
    experts, windows = _experts(shape, layout, tokens, options), layer_windows(shape)
    everywhere = len(set(windows)) == 1
    trains = trained_layers(shape, options.lora, options.freeze)
    again = _checkpointed(shape, layout, row_tokens, options)
    known: dict[tuple[int, int | None, int, bool], LayerSizes] = {}
    found = []
    of_layers = zip(layer_kinds(shape), windows, trains, strict=True)
    for number, (kind, window, trained) in enumerate(of_layers):
        key = id(kind), window, id(trained), number in again
        if key not in known:
            seen = None
            if window not in (None, NO_KEYS) and window < row_tokens:
                seen = Window(window, row_tokens, everywhere)
            state = None
            if window == NO_KEYS:
                state = StateHeads.of(shape, layout, options.element, tokens)
            known[key] = LayerSizes(
                replace(
                    _sharing(shape.of_window(window), layout, tokens, options, seen, kind.sinks),
                    behind=behind,
                ),
                shape.hidden_size,
                inner_features(shape, layout.mesh_columns, experts=bool(kind.router)),
                kind,
                layout.mesh_columns,
                options.use_seq_parallel and not layout.is_mesh,
                mesh_rows=layout.mesh_rows if layout.is_mesh else 0,
                slices=options.slices,
                experts=_adapted(experts, kind, trained, options) if experts else None,
                trained=trained.weights,
                adapted=trained.adapters,
                rank=options.lora.rank if options.lora else 0,
                dropout=bool(options.lora and options.lora.dropout),
                state=state,
                tile=options.mlp_tile,
                at_once=options.at_once,
                recompute=options.recompute if number in again else None,
                offloads=options.offload_activations and options.checkpointing,
                copies=options.copies if layout.mesh_columns > 1 and not layout.is_mesh else 1,
                puts_off=options.zero_stage < 3,
            )
        found.append(known[key])
    return found


def _adapted(
    experts: Experts, kind: LayerKind, trained: Trained, options: Options
) -> Experts | None:
    """Return a model's experts with the adapters of a layer; None where this has none."""
    if not kind.router:
        return None
    return replace(
        experts,
        rank=options.lora.rank if options.lora else 0,
        adapted=tuple(name in trained.adapters for name in matrices_of_experts(kind.router)),
        adapts_router=kind.router in trained.adapters,
    )


def _checkpointed(
    shape: ModelShape, layout: Layout, row_tokens: int, options: Options
) -> Collection[int]:
    """Return the layers that are checkpointed."""
    if not options.checkpointing or options.first_layers is None:
        return range(shape.layers) if options.checkpointing else ()
    windows, schedule = layer_windows(shape), options.schedule
    rows = DrawnRows.whole(row_tokens)
    stages = stages_of(shape, windows, rows, layout.pipeline, schedule, again=False)
    return first_layers(options.first_layers, stages)


def _sharing(
    shape: ModelShape,
    layout: Layout,
    tokens: int,
    options: Options,
    window: Window | None,
    sinks: bool,
) -> Sharing:
    """Return how ranks share a row's attention. tokens: of one of them."""
    way = RING
    if options.algorithm.all_at_once:
        way = KeyTransfer(1, trimmed=False)
    elif "exchange_stages" in options.algorithm.options:
        way = KeyTransfer(options.exchange_stages)
    heads, kv = (-(-each // layout.mesh_columns) for each in (shape.heads, shape.kv_heads))
    degrees = layout.ulysses, layout.ring
    sizes = options.element, tokens, heads, kv, shape.head_dim
    return Sharing(*sizes, *degrees, way, window, sinks)


def _experts(shape: ModelShape, layout: Layout, tokens: int, options: Options) -> Experts | None:
    """Return the experts of a layer, where it has any."""
    kind = layer_kind(shape)
    down = layer_projections(shape)[-1].on(layout.tensor)
    if not kind.router:
        return None
    between = -(-tokens // layout.tensor) if options.use_seq_parallel else tokens
    return Experts(
        options.element,
        tokens,
        shape.hidden_size,
        down.inputs,
        down.copies,
        down.per_token,
        kind.router,
        kind.wide_router,
        kind.wide_scores,
        kind.probabilities,
        kind.clamped,
        layout.experts,
        ranks_met(shape, layout.experts),
        layout.tensor,
        between,
    )


def fits(memory: Memory, card_bytes: float) -> bool:
    """Tell whether a card with this much memory has what a rank needs."""
    return memory.peak_bytes <= USABLE_SHARE * card_bytes


def longest_row(
    shape: ModelShape, layout: Layout, card_bytes: float, *, options: Options = Options()
) -> int:
    """Return the longest row in tokens that fits a card, by kilotokens of each rank, or 0."""
    return longest_of(
        lambda row: memory_of(shape, layout, row, options=options).peak_bytes, layout, card_bytes
    )


def longest_of(peak: Callable[[int], float], layout: Layout, card_bytes: float) -> int:
    """Return the longest row in tokens, by kilotokens of each rank, whose peak fits a card, or 0.

    peak: from the tokens of a row to bytes, which grow nearly in a line: where that meets what a
    card has is looked first.
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


def row_memory(
    options: Options, shape: ModelShape, row: AlgorithmRow, layout: Layout, length: int
) -> tuple[int, int]:
    """Return the bytes that each further row of so many tokens takes on a rank of those that share
    it, and those that rows take once, whatever their number."""
    one, two = (
        memory_of(
            shape,
            layout,
            length,
            options=replace(options, algorithm=row, micro_batch=rows),
        ).activation_bytes
        for rows in (1, 2)
    )
    return two - one, 2 * one - two
