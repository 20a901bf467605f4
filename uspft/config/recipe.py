"""The recipe as typed, frozen blocks, whose field names, types and defaults are a public contract.

A field's type says which values a recipe may write; the string below it says what the key means,
and appears in docs/keys.md and in editors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, model_validator, with_config
from typing_extensions import TypedDict

from uspft.config.algorithms import AUTO, CAUSAL, CONTEXT, OBJECTIVES, TENSOR, Splits
from uspft.config.deepspeed_fields import Aio, CommsLogger, FlopsProfiler, ZeroFields
from uspft.config.inputs import DataBlock, ModelBlock
from uspft.config.types import (
    STRICT,
    As,
    BelowOne,
    Count,
    CountOpenOrNone,
    CountOrOpen,
    CountOrShare,
    EachStage,
    Epochs,
    FilePath,
    Fraction,
    Free,
    Integer,
    Natural,
    NotNegative,
    OneOf,
    Positive,
    RecipeBlock,
    Text,
    Tokens,
    elsewhere,
    of_stages,
    without_default,
)


def _algorithms() -> dict[str, str]:
    """Return the names of sequence-parallel algorithms, synonyms included, each with the name that
    it stands for."""
    synonyms = {other: row.name for row in CONTEXT.values() for other in row.synonyms}
    return {**{name: name for name in CONTEXT}, **synonyms, AUTO: AUTO}


PLANNED = (
    "data_parallel",
    "model_parallel",
    "pipeline_stage",
    "context_parallel",
    "context_parallel_algo",
    "ulysses_degree_in_cp",
    "expert_parallel",
)
"""The keys that `parallel_config: auto` leaves to the planner, in addition to those that are `auto`
by default."""


_Mesh = Annotated[tuple[Count, Count], Strict(False), Field(title="[rows, cols]")]
_Slices = Annotated[
    tuple[Count, Count, Count, Count],
    Strict(False),
    Field(title="[qkv, out, gate_up, down]"),
]


class Degrees(RecipeBlock):
    """A layout says how many ways each thing is split, and by which algorithms."""

    data_parallel: Count | Literal["auto"] = "auto"
    """Number of replicas that take different rows; `auto` is processes ÷ the other degrees."""
    model_parallel: CountOrOpen = 1
    """Tensor parallel degree: ranks that split each weight matrix; `auto` asks the planner."""
    use_seq_parallel: bool = False
    """Whether tensor parallel ranks also split the activations between matrices by tokens."""
    context_parallel: CountOrOpen = 1
    """Number of ranks that share one row; `auto` asks the planner."""
    context_parallel_algo: Annotated[str, OneOf(_algorithms)] | None = None
    """How ranks share a row; required where several do; `auto` chooses, and the run says why."""
    ulysses_degree_in_cp: CountOpenOrNone = None
    """Ranks that split heads; the rest of context_parallel split tokens; null: as implied, or 1."""
    exchange_stages: Count | Literal["auto"] | None = "auto"
    """Steps in which keys are exchanged; `auto` and null take at least one for each other rank."""
    tensor_parallel_algo: Annotated[str, OneOf(lambda: {name: name for name in TENSOR})] = (
        "megatron"
    )
    """Algorithm with which tensor parallel ranks split a matrix."""
    tensor_mesh: _Mesh | Literal["auto"] | None = "auto"
    """Rows and columns of MeshSlice's mesh of ranks; `auto` and null let the tuner choose."""
    tensor_slices: Count | _Slices | Literal["auto"] | None = "auto"
    """Slices of each matrix product in MeshSlice; `auto` and null let the tuner choose."""
    pipeline_stage: CountOrOpen = 1
    """Number of pipeline stages, each on ranks of its own; `auto` asks the planner."""
    micro_batch_num: Count | Literal["auto"] = "auto"
    """Micro-batches in a step; the batch sizes imply it; `1` is allowed too without stages."""
    pp_interleave_num: Count = 1
    """Virtual stages per pipeline rank; more of them make the bubble smaller."""
    layers_per_stage: Annotated[EachStage, of_stages(Count)] | None = None
    """Number of layers in each stage; null balances the stages by their estimated time."""
    seq_split_num: Count = 1
    """Number of chunks of a row that pass through a pipeline one after another (seqpipe)."""
    fine_grain_interleave: Count = 1
    """Number of interleaved token groups in a layer, which hides tensor parallel communication."""

    @property
    def mesh_rows(self) -> int:
        """The rows of the mesh that matrices are split over; 1 without a mesh or before it is
        chosen.
        """
        return self.tensor_mesh[0] if isinstance(self.tensor_mesh, tuple) else 1

    @property
    def on_a_mesh(self) -> bool:
        """Whether matrices are split over both mesh dimensions, so that mesh rows split tokens."""
        blocks = TENSOR[self.tensor_parallel_algo].splits is Splits.BLOCKS
        return blocks and self.model_parallel > 1

    @property
    def mesh_is_open(self) -> bool:
        """Whether the number of mesh rows is still to be chosen."""
        return self.on_a_mesh and not isinstance(self.tensor_mesh, tuple)

    @property
    def row_ranks(self) -> int:
        """The number of ranks that share a row of tokens, mesh rows included."""
        return self.mesh_rows * self.context_parallel


class Strategy(Degrees):
    """One of several layouts; omitted degrees are 1, and `data_parallel` takes the other ranks."""

    max_length: Tokens
    """Number of tokens in the longest row that uses this layout."""


class ParallelBlock(Degrees):
    """The block says how ranks split a run, in MindSpore Transformers' names; or `auto` chooses."""

    strategies: (
        Annotated[tuple[Strategy, ...], Strict(False), Field(title="a list of layouts")]
        | Literal["auto"]
        | None
    ) = None
    """Layouts for rows of different lengths within one step; `auto` chooses; null: one layout."""
    switching: Literal["auto", "in_place", "move"] | None = "auto"
    """Switching of tensor degrees: `in_place` uses parts of local shards; `move` sends weights."""
    expert_parallel: CountOrOpen = 1
    """Neighbouring data × context ranks among which a layer's experts are divided, or `auto`."""
    pipeline_scheduler: Literal["auto", "gpipe", "1f1b", "seqpipe"] | None = "auto"
    """Pipeline schedule; `auto` is seqpipe where `seq_split_num` is above 1, else 1f1b."""
    sequence_chunks: Literal["time", "tokens"] = "time"
    """Whether chunks of a row take equal time, as the planner estimates, or have equal tokens."""
    pipeline_interleave: bool | Literal["auto"] | None = "auto"
    """Whether stages are interleaved; `auto` follows `pp_interleave_num`, which says how many."""
    offset: Integer | Annotated[EachStage, of_stages(Integer)] | None = None
    """Layers of each stage above the even share, as in MindSpore; null: `layers_per_stage`."""


class DeepSpeedBlock(RecipeBlock):
    """These keys go to DeepSpeed unchanged; its other settings follow from the other blocks."""

    zero_optimization: Annotated[dict[str, Any], As(ZeroFields)] = Field(
        default_factory=lambda: {"stage": 1}
    )
    """DeepSpeed's ZeRO settings: `stage` (0 to 3, `auto`, by default 1), offloading and others."""
    aio: Annotated[dict[str, Any] | None, As(Aio | None)] = None
    """Settings of asynchronous reads and writes in NVMe offloading; null takes DeepSpeed's."""
    comms_logger: Annotated[dict[str, Any] | None, As(CommsLogger | None)] = None
    """Settings of DeepSpeed's log of its own communication; null turns it off."""
    flops_profiler: Annotated[dict[str, Any] | None, As(FlopsProfiler | None)] = None
    """Settings of DeepSpeed's profiler of a step, module by module; null turns it off."""
    wall_clock_breakdown: bool = False
    """Whether DeepSpeed prints how many seconds forward, backward and update take."""


class OptimizerBlock(RecipeBlock):
    """The optimizer is AdamW; it decays no one-dimensional parameter."""

    type: Literal["adamw"] = "adamw"
    """The optimizer; AdamW is the only one."""
    learning_rate: Positive = 1e-5
    """Peak learning rate, reached after the warm-up."""
    betas: Annotated[tuple[BelowOne, BelowOne], Strict(False), Field(title="[beta1, beta2]")] = (
        0.9,
        0.95,
    )
    """Decay factors per step of Adam's running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Number that Adam adds to the root of the mean square before it divides by it."""
    weight_decay: NotNegative = 0.1
    """Coefficient of decoupled weight decay; one-dimensional parameters are not decayed."""


class ScheduleBlock(RecipeBlock):
    """The learning rate rises over a warm-up, a share or a number of steps, then stays or falls."""

    type: Literal["constant", "linear", "cosine", "cosine_restarts", "polynomial", "wsd"] = "cosine"
    """Shape of the learning rate after the warm-up; `wsd` stays at the peak, then falls."""
    warmup_ratio: Fraction | None = 0.03
    """Length of the warm-up as a share of all steps, rounded up; null with `warmup_steps`."""
    warmup_steps: Natural | None = None
    """Length of the warm-up in steps, in place of `warmup_ratio`."""
    min_learning_rate: NotNegative = 0.0
    """Learning rate of the last step; at most `optimizer.learning_rate`."""
    warmup_initial: NotNegative = 0.0
    """Learning rate from which the warm-up rises; at most `optimizer.learning_rate`."""
    cycles: Count | None = None
    """`cosine_restarts` only: how often the rate falls from the peak; null: once."""
    power: Positive | None = None
    """`polynomial` only: the power of the share of steps left; null: 1.0, a line."""
    decay_ratio: Fraction | None = None
    """`wsd` only: share of all steps, rounded up, in which the rate falls; null: 0.1."""

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_the_default_ratio(cls, given: Any) -> Any:
        return without_default(given, "warmup_ratio", "warmup_steps")


class TrainingBlock(RecipeBlock):
    """The block says how long a run is, how many rows a step has, and when the run evaluates."""

    steps: Count | None = None
    """Number of optimizer steps in the run; required unless `training.epochs` is given."""
    epochs: Epochs | None = None
    """Number of passes over the data, in place of `training.steps`; 1.5 ends in mid-epoch."""
    global_batch_size: Count
    """Number of rows in one optimizer step, over all ranks and micro-batches."""
    micro_batch_size: CountOrOpen = 1
    """Number of rows in one forward pass of a replica; `auto` asks the planner."""
    stop_step: Count | None = None
    """Step after which to stop; the schedule still spans all steps; null: after the last."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are clipped to this global norm; null does not clip."""
    max_bad_steps: Natural = 0
    """Most consecutive bad steps to skip: a loss or norm that is not finite, or too large."""
    max_norm_spike: Annotated[float, Field(gt=1)] | None = None
    """A step is bad if its gradient norm is above this × the median of the last 100; null: off."""
    objective: Annotated[str, OneOf(lambda: {name: name for name in OBJECTIVES})] = CAUSAL.name
    """What a step minimises; only `causal`, the cross-entropy of each next token, exists."""
    eval_every_steps: CountOrShare | None = None
    """Steps between evaluations, below 1 a share of all; the last step always has one."""
    eval_every_epochs: Epochs | None = None
    """Epochs between evaluations, in place of `eval_every_steps`; 0.5 is twice an epoch."""
    patience: Count | None = None
    """Evaluations without a lower loss after which the run ends; null: it takes all its steps."""
    eval_micro_batch_size: Count | None = None
    """The `micro_batch_size` of evaluations; null takes that of training."""
    debug: bool = False
    """Whether ranks check in every step that they share the same rows, not only in the first 3."""


class MemoryBlock(RecipeBlock):
    """The block says what is recomputed, offloaded or done in tiles to save memory."""

    gradient_checkpointing: bool | Count | Annotated[EachStage, of_stages(Natural)] = True
    """Layers that are recomputed in the backward: all, none, or the first n of each stage."""
    recompute: Literal["attention", "exchange", "nothing", "auto"] = "auto"
    """What of attention is recomputed: all, the `exchange` of heads, `nothing`; `auto`: as fits."""
    attention_heads: Count | Literal["all", "auto"] = "all"
    """Query heads per KV head (or per key head of a state) at a time, all, or `auto`: as fits."""
    offload_activations: Literal["none", "cpu"] = "none"
    """Where the saved inputs of checkpointed layers are stored: on the device (`none`) or host."""
    gradient_reduction: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are reduced; micro-batches are accumulated in float32."""
    loss_tile_tokens: Tokens | Literal["auto", "none"] = "auto"
    """Tokens whose logits are computed at a time; `auto` fills 512 MiB, `none` takes all."""
    mlp_tile_tokens: Tokens | Literal["auto", "none"] = "none"
    """Tokens that MLPs, experts and norms process at a time; `none` takes all tokens."""

    @property
    def heads_at_once(self) -> int | None:
        """Return how many query heads of each KV head attention computes at a time; None: all, or
        not chosen yet.
        """
        return self.attention_heads if isinstance(self.attention_heads, int) else None


class CheckpointBlock(RecipeBlock):
    """The block says when checkpoints are saved, how many are kept, and which one to resume."""

    every_steps: CountOrShare | None = 500
    """Steps between checkpoints, below 1 a share of all; the last has one; null: if stopped."""
    every_epochs: Epochs | None = None
    """Epochs between checkpoints, in place of `every_steps`; 0.5 is twice an epoch."""
    keep_last: Count | None = 2
    """Number of newest checkpoints to keep; older ones are deleted; null keeps all."""
    keep_best: bool = False
    """Whether to keep the checkpoint of lowest evaluation loss too, and export it as `hf`."""
    overlap: bool = False
    """Whether a checkpoint is copied to host memory and written while training continues."""
    resume: Annotated[Text, Field(title="auto, never or the path of a checkpoint")] = "auto"
    """Checkpoint to resume: a path, or `auto` for the newest complete one; `never` starts anew."""

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_the_default_steps(cls, given: Any) -> Any:
        return without_default(given, "every_steps", "every_epochs")

    @property
    def saves(self) -> bool:
        """Return whether a run saves at intervals and at its end, and not only where it is
        stopped."""
        return self.every_steps is not None or self.every_epochs is not None


class ExportBlock(RecipeBlock):
    """The block says what is written at the end of a run."""

    huggingface: bool = True
    """Whether the trained model is written to the folder `hf` in `output_dir`."""


@with_config(STRICT)
class Wandb(TypedDict, total=False):
    """Arguments of wandb.init, except those that uspft sets to resume and describe a run."""

    project: Text
    entity: Text
    name: Text
    group: Text
    job_type: Text
    notes: Text
    id: Text
    tags: Annotated[tuple[Text, ...], Strict(False), Field(title="a list of strings")]
    mode: Literal["online", "offline", "shared"]
    dir: Annotated[Text, Field(title="a folder")]
    save_code: bool
    settings: Free


@with_config(STRICT)
class MlFlow(TypedDict, total=False):
    """Arguments of accelerate's MLflow tracker, and where the run is stored."""

    experiment_name: Text
    run_name: Text
    description: Text
    tracking_uri: Text
    tags: Free


class LoggingBlock(RecipeBlock):
    """The block says where the numbers of each step go."""

    every_steps: Count = 1
    """Number of steps between two lines of metrics.jsonl; the last step has one too."""
    tensorboard: bool = False
    """Whether TensorBoard's files are written, to `events` in `output_dir`."""
    wandb: Annotated[dict[str, Any] | None, As(Wandb | None)] = None
    """Arguments of wandb.init, `{}` for none; null turns Weights & Biases off."""
    mlflow: Annotated[dict[str, Any] | None, As(MlFlow | None)] = None
    """Settings of an MLflow run, `{}` for one in `output_dir`; null turns MLflow off."""
    report: bool = True
    """Whether the run ends with `report.html`, a page of measured and predicted numbers."""


_DEVICES = elsewhere(
    {
        "gpu": "GPUs are cuda here",
        **dict.fromkeys(
            ("tpu", "npu", "xpu", "mps", "hpu", "rocm", "hip", "ascend"),
            "ranks compute on NVIDIA GPUs and on CPUs alone",
        ),
    }
)


class LaunchBlock(RecipeBlock):
    """The block says how many processes a host starts, and which device they use."""

    processes: Count | Literal["auto"] = "auto"
    """Processes on each host; `auto` is its GPUs or, on CPU, the product of the degrees ÷ hosts."""
    device: Annotated[Literal["auto", "cuda", "cpu"], _DEVICES] = "auto"
    """Device of the ranks; `auto` takes cuda where this host has a GPU."""
    timeout_minutes: Positive = 10.0
    """Minutes until a waiting collective fails; three times as long in the first step."""
    restarts: Natural = 0
    """Times that a run restarts by itself after a signal, a lost host or a time-out."""
    min_hosts: Count | None = None
    """Hosts that must remain for a restart; null: all of them."""
    hardware: Annotated[Text, Field(title="auto, a name in configs/hardware or a file")] = "auto"
    """Hardware figures for `plan` and every `auto`; `auto`: by the GPU's name, else a default."""


class Recipe(RecipeBlock):
    """A recipe describes a whole run: it has these keys, and the blocks below.

    Loading merges the fragments of the key `base`, and sets a null `output_dir` by the file's name.
    """

    output_dir: FilePath | None = None
    """Folder for everything that the run writes; null takes outputs/<the recipe's file name>."""
    seed: Natural = 42
    """Seed of every random draw: of new weights, of the order of samples, and of dropout."""
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
