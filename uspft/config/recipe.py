"""The recipe as typed, frozen blocks; field names, types and defaults are the public contract's.

A field's annotation says what code reads; its check says what a recipe may write; the line below it
is its meaning, which docs/keys.md and editors show.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from uspft.config.allowed import Described, described
from uspft.config.checks import choice, each, free, real, table, text, tokens, whole
from uspft.config.deepspeed_fields import AIO, COMMS_LOGGER, FLOPS_PROFILER, ZERO, zero_fields
from uspft.config.degrees import ParallelBlock
from uspft.config.fields import (
    Count,
    CountOrAuto,
    CountOrNone,
    Flag,
    PathOrNone,
    RecipeBlock,
)
from uspft.config.inputs import DataBlock, ModelBlock, Source

__all__ = [
    "CheckpointBlock",
    "DataBlock",
    "DeepSpeedBlock",
    "ExportBlock",
    "LaunchBlock",
    "LoggingBlock",
    "MemoryBlock",
    "ModelBlock",
    "OptimizerBlock",
    "ParallelBlock",
    "Recipe",
    "ScheduleBlock",
    "Source",
    "TrainingBlock",
]

_is = PlainValidator
_NONE = (None,)
_zero = Described(zero_fields, "a mapping", described(table(ZERO)).schema)


class DeepSpeedBlock(RecipeBlock):
    """These keys go to DeepSpeed as they are; all else that it is told follows from the recipe."""

    zero_optimization: Annotated[dict[str, Any], _is(_zero)] = Field(
        default_factory=lambda: {"stage": 1}
    )
    """ZeRO: `stage` (0 to 3, left out: 1), offloading, and every other field that DeepSpeed has."""
    aio: Annotated[dict[str, Any] | None, _is(table(AIO, also=_NONE))] = None
    """Asynchronous reads and writes of NVMe offloading; null: as DeepSpeed has them."""
    comms_logger: Annotated[dict[str, Any] | None, _is(table(COMMS_LOGGER, also=_NONE))] = None
    """DeepSpeed's log of its own transfers; null: off."""
    flops_profiler: Annotated[dict[str, Any] | None, _is(table(FLOPS_PROFILER, also=_NONE))] = None
    """DeepSpeed's profile of a step by module; null: off."""
    wall_clock_breakdown: Flag = False
    """Whether DeepSpeed prints the seconds of forward, backward and update."""


class OptimizerBlock(RecipeBlock):
    """The optimizer is AdamW; it decays no one-dimensional parameter."""

    type: Annotated[Literal["adamw"], _is(choice("adamw"))] = "adamw"
    """The optimizer: AdamW."""
    learning_rate: Annotated[float, _is(real(above=0))] = 1e-5
    """Peak learning rate, reached after the warm-up."""
    betas: Annotated[tuple[float, float], _is(each(real(0, below=1), "[beta1, beta2]", size=2))] = (
        0.9,
        0.95,
    )
    """Decay of Adam's running means of the gradient and of its square, per step."""
    eps: Annotated[float, _is(real(above=0))] = 1e-8
    """What Adam adds to the root of the mean square."""
    weight_decay: Annotated[float, _is(real(0))] = 0.1
    """Decoupled weight decay; one-dimensional parameters have none."""


class ScheduleBlock(RecipeBlock):
    """The learning rate rises over a warm-up, a share or a number of steps, and then falls."""

    type: Annotated[
        Literal["constant", "linear", "cosine"], _is(choice("constant", "linear", "cosine"))
    ] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_ratio: Annotated[float | None, _is(real(0, 1, also=_NONE))] = 0.03
    """Warm-up as a share of all steps, rounded up; null where `warmup_steps` is given."""
    warmup_steps: Annotated[int | None, _is(whole(0, also=_NONE))] = None
    """Warm-up in steps, in place of `warmup_ratio`."""
    min_learning_rate: Annotated[float, _is(real(0))] = 0.0
    """Learning rate of the last step; at most `optimizer.learning_rate`."""

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_the_default_ratio(cls, given: Any) -> Any:
        steps_alone = isinstance(given, dict) and given.get("warmup_steps") is not None
        if steps_alone and "warmup_ratio" not in given:
            return {**given, "warmup_ratio": None}
        return given


class TrainingBlock(RecipeBlock):
    """The block says how long a run is, how many rows a step has, and when the run evaluates."""

    steps: CountOrNone = None
    """Optimizer steps of the run; required unless `training.epochs` is given."""
    epochs: CountOrNone = None
    """Passes over the data, in place of `training.steps`."""
    global_batch_size: Count
    """Rows in one optimizer step, over all ranks and micro-batches."""
    micro_batch_size: Count = 1
    """Rows that the ranks of one data-parallel replica take through one forward."""
    max_grad_norm: Annotated[float, _is(real(above=0))] = 1.0
    """Norm that gradients are clipped to, over all parameters."""
    eval_every_steps: CountOrNone = None
    """Steps between evaluations; one follows the last step too; null: only there."""
    eval_micro_batch_size: CountOrNone = None
    """As `micro_batch_size`, in evaluations; null takes `micro_batch_size`."""
    debug: Flag = False
    """Whether ranks compare the rows they share in every step, not in the first three alone."""


class MemoryBlock(RecipeBlock):
    """The block says what is computed again, offloaded or done in tiles, so that a run fits."""

    gradient_checkpointing: Flag = True
    """Whether layers are computed again in the backward, so that activations need not be kept."""
    offload_activations: Annotated[Literal["none", "cpu"], _is(choice("none", "cpu"))] = "none"
    """Where checkpointed activations wait for the backward: on the device (`none`) or the host."""
    loss_tile_tokens: Annotated[
        int | Literal["auto", "none"], _is(tokens(1, also=("auto", "none")))
    ] = "auto"
    """Tokens whose logits are in memory at a time; `auto`: 512 MiB of them; `none`: all tokens."""
    mlp_tile_tokens: Annotated[
        int | Literal["auto", "none"], _is(tokens(1, also=("auto", "none")))
    ] = "none"
    """Tokens that an MLP takes at a time; `none`: all tokens."""


class CheckpointBlock(RecipeBlock):
    """The block says when checkpoints are written, which stay, and which one a run goes on from."""

    every_steps: CountOrNone = 500
    """Steps between checkpoints; the last step has one too; null: only where a run is stopped."""
    keep_last: Count = 2
    """Newest checkpoints that stay; older ones are deleted."""
    resume: Annotated[str, _is(text("auto, never or the path of a checkpoint"))] = "auto"
    """Checkpoint to go on from: a path, or `auto`, the newest whole one; `never` starts anew."""


class ExportBlock(RecipeBlock):
    """The block says what is written at the end."""

    huggingface: Flag = True
    """Whether the trained model is written to `hf` in `output_dir`."""


class LoggingBlock(RecipeBlock):
    """The block says where the numbers of each step go."""

    every_steps: Count = 1
    """Steps between two lines of metrics.jsonl; the last step has one too."""
    tensorboard: Flag = False
    """Whether TensorBoard's event files are written."""
    wandb: Annotated[dict[str, Any] | None, _is(free(also=_NONE))] = None
    """Arguments of wandb.init; null: off."""
    report: Flag = True
    """Whether the run ends with report.html, a page of its numbers."""


class LaunchBlock(RecipeBlock):
    """The block says how many processes a host starts, and the device that they use."""

    processes: CountOrAuto = "auto"
    """Processes on each host; `auto`: its GPUs; on CPU, the product of the degrees ÷ hosts."""
    device: Annotated[Literal["auto", "cuda", "cpu"], _is(choice("auto", "cuda", "cpu"))] = "auto"
    """Where ranks compute; `auto` takes cuda where this host has a GPU."""
    hardware: Annotated[str, _is(text("auto, a name in configs/hardware or a file"))] = "auto"
    """Figures that `plan` and every `auto` take; `auto`: by the GPU's name, else shipped ones."""


class Recipe(RecipeBlock):
    """A recipe is a whole run: these keys, and the blocks below.

    Loading consumes `base` and fills `output_dir` from the file's name.
    """

    output_dir: PathOrNone = None
    """Folder of everything the run writes; null takes outputs/<the recipe's file name>."""
    seed: Annotated[int, _is(whole(0))] = 42
    """What every random draw follows from: weights, the order of samples, dropout."""
    model: ModelBlock
    data: DataBlock
    parallel_config: ParallelBlock = ParallelBlock()
    deepspeed: DeepSpeedBlock = DeepSpeedBlock()
    optimizer: OptimizerBlock = OptimizerBlock()
    lr_schedule: ScheduleBlock = ScheduleBlock()
    training: TrainingBlock
    memory: MemoryBlock = MemoryBlock()
    checkpoint: CheckpointBlock = CheckpointBlock()
    export: ExportBlock = ExportBlock()
    logging: LoggingBlock = LoggingBlock()
    launch: LaunchBlock = LaunchBlock()
