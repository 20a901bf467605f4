"""What decides the memory of a rank beside the model, the layout and the row's length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from uspft.config.algorithms import WHOLE, AlgorithmRow, row_of
from uspft.config.deepspeed_fields import (
    ELEMENTS,
    elements,
)
from uspft.pipeline.schedules import PLAIN as PLAIN_SCHEDULE
from uspft.pipeline.schedules import Schedule
from uspft.pipeline.stages import Each, schedule_of
from uspft.planner.trained import Lora

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.config.inputs import ModelBlock
    from uspft.layout import Layout

RECOMPUTES = ("nothing", "exchange", "attention")
"""What of attention may be made again, the least work first."""


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
    bucket: int = ELEMENTS["reduce_bucket_size"]
    """The elements of DeepSpeed's reduce_bucket_size; under overlap_comm there are two_buckets."""
    live: int = ELEMENTS["stage3_max_live_parameters"]
    """The gathered elements up to which ZeRO-3 fetches weights ahead."""
    prefetch: int = ELEMENTS["stage3_prefetch_bucket_size"]
    """The elements that ZeRO-3 fetches ahead together."""
    reuse: int = ELEMENTS["stage3_max_reuse_distance"]
    """The elements of weights within which ZeRO-3 keeps those that come again."""
    two_buckets: bool = False
    offload_optimizer: bool = False
    offload_weights: bool = False
    saves_beside: bool = False
    """Whether a checkpoint waits on the host while it is written."""
    gradient_reduction: str = "float32"
    """The type in which gradients cross ranks."""
    checkpointing: bool = True
    flash: bool = False
    """Whether attention's kernel is a GPU's, which allocates more than it returns."""
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
        bucket=elements(zero, "reduce_bucket_size"),
        live=elements(zero, "stage3_max_live_parameters"),
        prefetch=elements(zero, "stage3_prefetch_bucket_size"),
        reuse=elements(zero, "stage3_max_reuse_distance"),
        two_buckets=bool(zero.get("overlap_comm")),
        offload_optimizer=away("offload_optimizer"),
        offload_weights=away("offload_param"),
        saves_beside=recipe.checkpoint.overlap,
        gradient_reduction=memory.gradient_reduction,
        checkpointing=bool(memory.gradient_checkpointing),
        flash=recipe.launch.device == "cuda",
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
