"""The only memory formula: the bytes of one rank by part, their peak, and the longest row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from uspft.planner.products import head_projection, layer_projections, parameters_of

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.families import ModelShape
    from uspft.layout import Layout

USABLE_SHARE = 0.92
"""The share of a card's memory, as torch reports it, that a rank's peak may fill: the context, NCCL
and gaps take the rest."""
RECOMPUTES = ("nothing", "exchange", "attention")
"""What of attention may be made again, the least work first."""
BUCKET = 500_000_000
"""The elements of DeepSpeed's reduce_bucket_size where a recipe says none."""


@dataclass(frozen=True)
class Options:
    """What decides the memory of a rank beside the model, the layout and the row's length."""

    algorithm: str = "ring_cp"
    """The value of `context_parallel_algo` that shares rows."""
    exchange_stages: int = 0
    """Of planned_cp; 0 for auto."""
    use_seq_parallel: bool = False
    micro_batch: int = 1
    """Rows of a rank in one forward."""
    dtype: str = "bfloat16"
    zero_stage: int = 1
    bucket: int = BUCKET
    """The elements of DeepSpeed's reduce_bucket_size."""
    offload_optimizer: bool = False
    offload_weights: bool = False
    gradient_reduction: str = "float32"
    """The type in which gradients cross ranks."""
    checkpointing: bool = True
    recompute: str = "nothing"
    offload_activations: bool = False
    loss_tile: int | None = 1024
    """Tokens; None for all at once."""
    mlp_tile: int | None = None
    lora_rank: int | None = None
    lora_modules: tuple[str, ...] | None = None
    """The last words of the projections that have an adapter; None for all."""
    freeze: tuple[str, ...] = ()
    """Regular expressions over parameter names."""


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank."""

    parts: Mapping[str, int]
    """Bytes on the device at its peak, by part."""
    host_bytes: int = 0
    """Bytes that wait in the host's memory."""
    unpredicted: tuple[str, ...] = ()
    """What there is of the layout that the formula does not know; parts are a guess with any."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


def options_of(recipe: Recipe) -> Options:
    """Return the options of a recipe. `auto` counts as what it is without a need to save memory."""
    zero, memory, model = recipe.deepspeed.zero_optimization, recipe.memory, recipe.model
    parallel = recipe.parallel_config

    def away(key: str) -> bool:
        return bool((zero.get(key) or {}).get("device", "none") != "none")

    def number(value: Any) -> int | None:
        return value if isinstance(value, int) else None

    rank = modules = None
    if model.adapter:
        rank, modules = model.adapter.rank, model.adapter.target_modules
    return Options(
        algorithm=parallel.context_parallel_algo or "ring_cp",
        exchange_stages=number(parallel.exchange_stages) or 0,
        use_seq_parallel=bool(parallel.use_seq_parallel),
        micro_batch=recipe.training.micro_batch_size,
        dtype=model.dtype,
        zero_stage=int(zero.get("stage", 1)),
        bucket=int(zero.get("reduce_bucket_size") or BUCKET),
        offload_optimizer=away("offload_optimizer"),
        offload_weights=away("offload_param"),
        gradient_reduction=memory.gradient_reduction,
        checkpointing=memory.gradient_checkpointing,
        recompute="nothing" if memory.recompute == "auto" else memory.recompute,
        offload_activations=memory.offload_activations == "cpu",
        loss_tile=number(memory.loss_tile_tokens),
        mlp_tile=number(memory.mlp_tile_tokens),
        lora_rank=rank,
        lora_modules=None if modules is None else tuple(modules),
        freeze=tuple(model.freeze),
    )


def memory_of(
    shape: ModelShape, layout: Layout, row_tokens: int, *, options: Options = Options()
) -> Memory:
    """Return what a rank needs for rows of so many tokens."""
    element = 4 if options.dtype == "float32" else 2
    outside, layer = parameters_of(shape, layout.mesh_columns)
    own = (outside + shape.layers * layer) / layout.mesh_rows
    copies = [layout.copies if options.zero_stage >= first else 1 for first in (1, 2, 3)]
    master = 12 if element == 2 else 8
    state: dict[str, float] = {
        "weights": element * own / copies[2],
        "gradients": 4 * own / copies[1],
        "optimizer": master * own / copies[0],
    }
    host = 0.0
    for name, away in (
        ("optimizer", options.offload_optimizer),
        ("weights", options.offload_weights),
    ):
        if away:
            host += state.pop(name)
    if options.zero_stage == 3:
        state["gathered"] = 2 * element * layer
    tokens = -(-options.micro_batch * row_tokens // layout.context)
    divided = layout.mesh_columns if options.use_seq_parallel or layout.is_mesh else 1
    d, q = shape.hidden_size / divided, shape.heads * shape.head_dim / layout.mesh_columns
    kv = shape.kv_heads * shape.head_dim / layout.mesh_columns
    inner = sum(p.outputs * p.per_token for p in layer_projections(shape)[-2:-1])
    inner = inner / layout.mesh_columns
    every = 9 * d + 2 * q + 2 * kv + 4 * inner
    kept = (
        every if not options.checkpointing else d + (0 if options.recompute == "attention" else q)
    )
    work = 10 * d + 4 * q + 4 * kv + 6 * inner
    held = element * tokens * kept * shape.layers
    if options.offload_activations and options.checkpointing:
        host, held = host + held, held / shape.layers
    tile = min(options.loss_tile or tokens, tokens)
    logits = head_projection(shape).on(layout.mesh_columns)
    state["activations"] = held
    state["working"] = max(
        element * tokens * work, 10 * tile * logits.outputs + 4 * logits.parameters
    )
    return Memory({name: int(size) for name, size in state.items()}, int(host))


def fits(memory: Memory, card_bytes: float) -> bool:
    """Tell whether a card with this much memory has what a rank needs."""
    return memory.peak_bytes <= USABLE_SHARE * card_bytes


def longest_row(
    shape: ModelShape, layout: Layout, card_bytes: float, *, options: Options = Options()
) -> int:
    """Return the longest row in tokens that fits a card, by kilotokens of each rank, or 0."""
    step = 1024 * layout.context

    def has_room(count: int) -> bool:
        return fits(memory_of(shape, layout, count * step, options=options), card_bytes)

    low, high = 0, 1
    while high < 1 << 20 and has_room(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle)
    return low * step


def least_work(
    shape: ModelShape, layout: Layout, row_tokens: int, card_bytes: float, *, options: Options
) -> str:
    """Return what `memory.recompute: auto` is on a card: the least work that fits, or where nothing
    does, what keeps least."""
    for choice in RECOMPUTES:
        if choice == "exchange" and layout.ulysses == 1:
            continue
        asked = replace(options, recompute=choice)
        if fits(memory_of(shape, layout, row_tokens, options=asked), card_bytes):
            return choice
    return RECOMPUTES[-1]
