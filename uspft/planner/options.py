"""The options of a step: the choices on which its time and memory depend, besides the model, the
layout and the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uspft.config.algorithms import AUTO, WHOLE, AlgorithmRow, row_of
from uspft.config.deepspeed_fields import ELEMENTS, elements
from uspft.config.inputs import ELEMENT_BYTES
from uspft.config.strategies import strategies_of
from uspft.pipeline.schedules import PLAIN, Schedule
from uspft.pipeline.stages import Each, schedule_of
from uspft.planner.trained import EVERYTHING, Lora, Trains
from uspft.sequence import FORWARDS, ONCE, Forwards

if TYPE_CHECKING:
    from uspft.config import ParallelBlock, Recipe
    from uspft.config.inputs import ModelBlock
    from uspft.layout import Layout

GRADIENT_BYTES = 4
"""The bytes of an element of a weight's gradient in the float32 sum."""
RECOMPUTES = ("nothing", "exchange", "attention")
"""The values of `memory.recompute`, those with the least work first."""


@dataclass(frozen=True)
class Options:
    """The options of a step on which its time or memory depends."""

    algorithm: AlgorithmRow = WHOLE
    """The table row of the sequence-parallel algorithm."""
    exchange_stages: int = 0
    """The number of stages in which an exchange's keys arrive; 0 for auto."""
    use_seq_parallel: bool = False
    copies: int = 1
    """The number of groups of a rank's tokens that take turns in blocks
    (`fine_grain_interleave`)."""
    micro_batch: int = 1
    """Rows of a replica in one forward."""
    dtype: str = "bfloat16"
    zero_stage: int = 1
    bucket: int = ELEMENTS["reduce_bucket_size"]
    """The elements of DeepSpeed's reduce_bucket_size."""
    live: int = ELEMENTS["stage3_max_live_parameters"]
    """The gathered elements up to which ZeRO-3 prefetches weights."""
    prefetch: int = ELEMENTS["stage3_prefetch_bucket_size"]
    """The elements that ZeRO-3 prefetches at a time."""
    reuse: int = ELEMENTS["stage3_max_reuse_distance"]
    """The distance in elements within which ZeRO-3 keeps weights that are used again."""
    two_buckets: bool = False
    """Whether DeepSpeed has two buckets of gradients (overlap_comm)."""
    overlaps: bool | None = False
    """DeepSpeed's overlap_comm where the device has streams; None: DeepSpeed's default, which
    overlaps at stage 3."""
    switches: bool = False
    """Whether the rows of a step run in several layouts, so that ZeRO-2 takes the gradients of a
    layer together (engine/zero.py)."""
    offload_optimizer: bool = False
    offload_weights: bool = False
    saves_beside: bool = False
    """Whether a checkpoint is copied to the host and written while training continues."""
    gradient_reduction: str = "float32"
    """The dtype in which gradients are reduced over ranks."""
    checkpointing: bool = True
    flash: bool = False
    """Whether attention runs with a GPU's flash kernel, which allocates workspace."""
    first_layers: int | Each | None = None
    """The number of checkpointed layers per stage, or for each stage, if not all are."""
    recompute: str = "nothing"
    at_once: int | None = None
    """How many query heads of a KV head attention computes at once; None for all heads."""
    open_heads: bool = False
    """Whether attention computes fewer heads at once where all of them do not fit."""
    offload_activations: bool = False
    loss_tile: int | None = 1024
    """Tokens per tile of the loss; None for all at once."""
    mlp_tile: int | None = None
    """The tokens of a tile of MLPs; None: all at once."""
    slices: tuple[int, ...] | None = None
    """MeshSlice's slices of each product of a layer; None: Megatron's tensor parallelism, or the
    fastest ones."""
    trains: Trains = EVERYTHING
    schedule: Schedule = PLAIN
    """The schedule of the pipeline."""
    equal_tokens: bool = False
    """Whether chunks of a row have equal tokens, rather than equal time."""
    step_rows: int | None = None
    """Rows of a step, over all replicas; None: for memory, enough to fill a pipeline."""

    @property
    def element(self) -> int:
        """The bytes of a weight."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def hides(self) -> bool:
        """Whether ZeRO's transfers overlap with products."""
        return self.zero_stage == 3 if self.overlaps is None else self.overlaps

    @property
    def gradient_bytes(self) -> int:
        """The bytes per element in which gradients are reduced."""
        return ELEMENT_BYTES[self.gradient_reduction]

    @property
    def checkpoints_all(self) -> bool:
        """Whether every layer is checkpointed."""
        return self.checkpointing and self.first_layers is None

    @property
    def forwards(self) -> int:
        """How often a layer runs forward in a step's pass, recomputation included."""
        return 2 if self.checkpointing else 1

    @property
    def attention(self) -> Forwards:
        """How often a layer makes its attention's forward transfers, recomputation included."""
        found = FORWARDS[self.recompute] if self.checkpointing else ONCE
        return found._replace(at_once=self.at_once)

    @property
    def keeps_keys(self) -> bool:
        """Whether received keys and values may be saved for the backward."""
        return not (self.checkpointing or self.at_once or self.schedule.chunks > 1)

    def passes(self, layout: Layout) -> int:
        """Return the forward and backward passes of a step; 1 if its rows are not known."""
        return -(-(self.step_rows or 1) // (self.micro_batch * layout.data))


def options_of(recipe: Recipe, layout: Layout) -> Options:
    """Return the options of a recipe in a layout.

    An `auto` counts as the value that it has when memory suffices.
    """
    zero, memory, model = recipe.deepspeed.zero_optimization, recipe.memory, recipe.model
    parallel, again = recipe.parallel_config, memory.gradient_checkpointing
    on_gpu, overlaps = recipe.launch.device == "cuda", zero.get("overlap_comm")

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
        zero_stage=stage_of(recipe),
        bucket=elements(zero, "reduce_bucket_size"),
        live=elements(zero, "stage3_max_live_parameters"),
        prefetch=elements(zero, "stage3_prefetch_bucket_size"),
        reuse=elements(zero, "stage3_max_reuse_distance"),
        two_buckets=bool(overlaps),
        overlaps=(None if overlaps is None else bool(overlaps)) if on_gpu else False,
        switches=len(strategies_of(recipe)) > 1,
        offload_optimizer=away("offload_optimizer"),
        offload_weights=away("offload_param"),
        saves_beside=recipe.checkpoint.overlap,
        gradient_reduction=memory.gradient_reduction,
        checkpointing=bool(memory.gradient_checkpointing),
        flash=on_gpu,
        first_layers=None if isinstance(again, bool) else again,
        recompute="nothing" if memory.recompute == "auto" else memory.recompute,
        at_once=memory.heads_at_once,
        open_heads=on_gpu and memory.attention_heads == AUTO,
        offload_activations=memory.offload_activations == "cpu",
        loss_tile=number(memory.loss_tile_tokens),
        mlp_tile=number(memory.mlp_tile_tokens),
        slices=slices_of(parallel),
        trains=trains_of(model),
        schedule=schedule_of(parallel),
        equal_tokens=parallel.sequence_chunks == "tokens",
        step_rows=recipe.training.global_batch_size,
    )


def trains_of(model: ModelBlock) -> Trains:
    """Return what a recipe trains of its model."""
    if not (block := model.adapter):
        return Trains(freeze=tuple(model.freeze))
    dropout = block.dropout > 0
    lora = Lora(block.rank, block.target_modules, dropout, block.target_parameters)
    return Trains(lora, tuple(model.freeze))


def stage_of(recipe: Recipe) -> int:
    return int(recipe.deepspeed.zero_optimization.get("stage", 1))


def slices_of(parallel: ParallelBlock) -> tuple[int, ...] | None:
    """Return the slices of each product that a recipe sets; None where they are `auto`."""
    asked = parallel.tensor_slices
    every = (asked,) * 4 if isinstance(asked, int) else asked
    return every if isinstance(every, tuple) else None
