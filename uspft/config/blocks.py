"""The recipe as typed, frozen blocks; field names, types and defaults are the public contract's.

A field's annotation says what code reads; its check says what a recipe may write.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from uspft.config.block import (
    Block,
    Count,
    CountAutoOrNone,
    CountOrAuto,
    CountOrNone,
    Flag,
    PathOrNone,
    TextOrNone,
    block,
)
from uspft.config.checks import choice, each, free, real, shown, table, text, tokens, whole
from uspft.config.deepspeed_fields import AIO, COMMS_LOGGER, FLOPS_PROFILER, zero_fields
from uspft.config.problems import fault
from uspft.config.rope import scaling
from uspft.config.trained import AdapterBlock, pattern

_is = PlainValidator  # a check takes the place of the type in validation
_NONE = (None,)

FORMATS = ("auto", "messages", "prompt_completion", "text", "tokenized")


class Source(Block):
    """One source of samples and its weight in the mixture; format None: the one of `data`."""

    path: Annotated[str, _is(text("a file, a folder, a glob or a hub id"))]
    name: TextOrNone = None
    split: TextOrNone = None
    format: Annotated[str | None, _is(choice(*FORMATS, also=_NONE))] = None
    weight: Annotated[float | None, _is(real(above=0, also=_NONE))] = None

    @property
    def title(self) -> str:
        """The path, with what else a hub data set is chosen by: org/name (en, test)."""
        chosen = ", ".join(part for part in (self.name, self.split) if part)
        return f"{self.path} ({chosen})" if chosen else self.path


_source_list = each(block(Source), "a list of sources")


def _sources(value: Any) -> tuple[Source, ...]:
    wanted = "a file, a folder, a glob, a hub id, or a list of {path: ...}"
    if isinstance(value, str):
        value = [{"path": text(wanted)(value)}]
    if not isinstance(value, list | tuple) or not value:
        got = "an empty list" if value == [] else shown(value)
        raise fault(f"expected {wanted}, got {got}", "write the path, or a list of {path: ...}")
    entries = [{"path": entry} if isinstance(entry, str) else entry for entry in value]
    sources: tuple[Source, ...] = _source_list(entries)
    return sources


def _sources_or_none(value: Any) -> tuple[Source, ...] | None:
    return None if value is None else _sources(value)


class ModelBlock(Block):
    """Which model, its compute type and its one-device attention kernel."""

    name_or_path: TextOrNone = None
    config: PathOrNone = None
    tokenizer: TextOrNone = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        _is(choice("float32", "bfloat16", "float16")),
    ] = "bfloat16"
    attention: Annotated[
        Literal["auto", "flash_attn_4", "flash_attn_3", "flash_attn_2", "torch"],
        _is(choice("auto", "flash_attn_4", "flash_attn_3", "flash_attn_2", "torch")),
    ] = "auto"
    rope_scaling: Annotated[dict[str, Any] | None, _is(scaling)] = None
    overrides: Annotated[dict[str, Any], _is(free())] = Field(default_factory=dict)
    adapter: Annotated[AdapterBlock | None, _is(block(AdapterBlock, also=_NONE))] = None
    freeze: Annotated[tuple[str, ...], _is(each(pattern, "a list of regular expressions"))] = ()
    trust_remote_code: Flag = False


class DataBlock(Block):
    """What is trained on, and how it becomes rows of `sequence_length` tokens."""

    train: Annotated[tuple[Source, ...], _is(_sources)]
    eval: Annotated[tuple[Source, ...] | None, _is(_sources_or_none)] = None
    format: Annotated[
        Literal["auto", "messages", "prompt_completion", "text", "tokenized"],
        _is(choice(*FORMATS)),
    ] = "auto"
    sequence_length: Annotated[int, _is(tokens(2))]
    packing: Annotated[Literal["none", "best_fit"], _is(choice("none", "best_fit"))] = "best_fit"
    overlong: Annotated[
        Literal["error", "truncate", "drop", "split"],
        _is(choice("error", "truncate", "drop", "split")),
    ] = "error"
    train_on: Annotated[
        Literal["assistant", "completion", "all"], _is(choice("assistant", "completion", "all"))
    ] = "assistant"
    chat_template: PathOrNone = None
    shuffle: Flag = True
    workers: Annotated[int, _is(whole(0))] = 2
    cache_dir: PathOrNone = None


Algorithm = Literal["ulysses_cp", "ring_cp", "hybrid_cp", "allgather_cp", "planned_cp", "auto"]


class Degrees(Block):
    """How many ways each thing is split, and by which algorithms."""

    data_parallel: CountOrAuto = "auto"
    model_parallel: Count = 1
    use_seq_parallel: Flag = False
    context_parallel: Count = 1
    context_parallel_algo: Annotated[
        Algorithm | None,
        _is(
            choice(
                *("ulysses_cp", "ring_cp", "hybrid_cp", "allgather_cp", "planned_cp", "auto"),
                also=_NONE,
                synonyms={"colossalai_cp": "allgather_cp"},
            )
        ),
    ] = None
    ulysses_degree_in_cp: CountOrNone = None
    exchange_stages: CountAutoOrNone = "auto"
    tensor_parallel_algo: Annotated[
        Literal["megatron", "meshslice"], _is(choice("megatron", "meshslice"))
    ] = "megatron"
    tensor_mesh: Annotated[
        tuple[int, int] | Literal["auto"] | None,
        _is(each(whole(1), "[rows, cols]", size=2, also=("auto", None))),
    ] = "auto"
    tensor_slices: CountAutoOrNone = "auto"
    pipeline_stage: Count = 1
    micro_batch_num: Count = 1
    pp_interleave_num: Count = 1
    seq_split_num: Count = 1
    fine_grain_interleave: Count = 1


class Strategy(Degrees):
    """The layout for rows up to `max_length` tokens; what it leaves out is 1."""

    max_length: Annotated[int, _is(tokens(1))]


class ParallelBlock(Degrees):
    """The layout, and with `strategies` the layouts that row lengths switch between."""

    strategies: Annotated[
        tuple[Strategy, ...] | Literal["auto"] | None,
        _is(each(block(Strategy), "a list of layouts", also=("auto", None))),
    ] = None


class DeepSpeedBlock(Block):
    """What goes to DeepSpeed as it is; everything else it is told follows from the recipe."""

    zero_optimization: Annotated[dict[str, Any], _is(zero_fields)] = Field(
        default_factory=lambda: {"stage": 1}
    )
    aio: Annotated[dict[str, Any] | None, _is(table(AIO, also=_NONE))] = None
    comms_logger: Annotated[dict[str, Any] | None, _is(table(COMMS_LOGGER, also=_NONE))] = None
    flops_profiler: Annotated[dict[str, Any] | None, _is(table(FLOPS_PROFILER, also=_NONE))] = None
    wall_clock_breakdown: Flag = False


class OptimizerBlock(Block):
    """AdamW, without weight decay on one-dimensional parameters."""

    type: Annotated[Literal["adamw"], _is(choice("adamw"))] = "adamw"
    learning_rate: Annotated[float, _is(real(above=0))] = 1e-5
    betas: Annotated[tuple[float, float], _is(each(real(0, below=1), "[beta1, beta2]", size=2))] = (
        0.9,
        0.95,
    )
    eps: Annotated[float, _is(real(above=0))] = 1e-8
    weight_decay: Annotated[float, _is(real(0))] = 0.1


class ScheduleBlock(Block):
    """Learning rate over steps; warm-up as a share of all steps or as their number, not both."""

    type: Annotated[
        Literal["constant", "linear", "cosine"], _is(choice("constant", "linear", "cosine"))
    ] = "cosine"
    warmup_ratio: Annotated[float | None, _is(real(0, 1, also=_NONE))] = 0.03
    warmup_steps: Annotated[int | None, _is(whole(0, also=_NONE))] = None
    min_learning_rate: Annotated[float, _is(real(0))] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _steps_replace_the_default_ratio(cls, given: Any) -> Any:
        steps_alone = isinstance(given, dict) and given.get("warmup_steps") is not None
        if steps_alone and "warmup_ratio" not in given:
            return {**given, "warmup_ratio": None}
        return given


class TrainingBlock(Block):
    """How long, and how many rows a step has."""

    steps: CountOrNone = None
    epochs: CountOrNone = None
    global_batch_size: Count
    micro_batch_size: Count = 1
    max_grad_norm: Annotated[float, _is(real(above=0))] = 1.0
    eval_every_steps: CountOrNone = None
    eval_micro_batch_size: CountOrNone = None
    debug: Flag = False


class MemoryBlock(Block):
    """What is recomputed, offloaded or tiled to fit."""

    gradient_checkpointing: Flag = True
    offload_activations: Annotated[Literal["none", "cpu"], _is(choice("none", "cpu"))] = "none"
    loss_tile_tokens: Annotated[
        int | Literal["auto", "none"], _is(tokens(1, also=("auto", "none")))
    ] = "auto"
    mlp_tile_tokens: Annotated[
        int | Literal["auto", "none"], _is(tokens(1, also=("auto", "none")))
    ] = "none"


class CheckpointBlock(Block):
    """When checkpoints are written, how many stay, and whether a run goes on from one."""

    every_steps: CountOrNone = 500
    keep_last: Count = 2
    resume: Annotated[str, _is(text("auto, never or the path of a checkpoint"))] = "auto"


class ExportBlock(Block):
    """What is written at the end."""

    huggingface: Flag = True


class LoggingBlock(Block):
    """Where the numbers of each step go."""

    every_steps: Count = 1
    tensorboard: Flag = False
    wandb: Annotated[dict[str, Any] | None, _is(free(also=_NONE))] = None
    report: Flag = True


class LaunchBlock(Block):
    """Processes per host and the device they use."""

    processes: CountOrAuto = "auto"
    device: Annotated[Literal["auto", "cuda", "cpu"], _is(choice("auto", "cuda", "cpu"))] = "auto"


class Recipe(Block):
    """A whole run; `base` is consumed by loading, `output_dir` filled from the file's name."""

    output_dir: PathOrNone = None
    seed: Annotated[int, _is(whole(0))] = 42
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
