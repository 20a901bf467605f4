"""The keys of DeepSpeed's configuration that a recipe may hold; DeepSpeed is not imported.

Names, aliases and bounds are those of DeepSpeed 0.19.8; a test compares them with those of the
installed version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict, with_config
from typing_extensions import TypedDict

from uspft.config.messages import LARGEST
from uspft.config.problems import Fault, Finding, fault, join
from uspft.config.types import (
    EXPONENT,
    STRICT,
    Count,
    FilePath,
    Fraction,
    Natural,
    NotNegative,
    Open,
    Text,
    or_open,
)

_Size = Annotated[Natural, EXPONENT]
_SizeAbove0 = Annotated[Count, EXPONENT]
_Name = Annotated[Text, Field(title="a name")]
_Names = Annotated[tuple[_Name, ...], Strict(False), Field(title="a list of names")]
_Operation = Annotated[Text, Field(title="an operation")]
_Operations = Annotated[tuple[_Operation, ...], Strict(False), Field(title="a list of operations")]
_Number = Annotated[int, Field(ge=0, le=3)]
_Stage = Annotated[_Number, or_open(_Number)]


def _ignored_by_deepspeed(value: object) -> object:
    if value is None:
        return value
    raise fault("is deprecated, and DeepSpeed ignores it", "write offload_optimizer.pin_memory")


_Ignored = Annotated[Any, BeforeValidator(_ignored_by_deepspeed), Field(title="null")]


@with_config(STRICT)
class OffloadParam(TypedDict, total=False):
    device: Literal["none", "cpu", "nvme"]
    nvme_path: FilePath | None
    buffer_count: _Size
    buffer_size: _Size
    max_in_cpu: _Size
    pin_memory: bool


@with_config(STRICT)
class OffloadOptimizer(TypedDict, total=False):
    device: Literal["none", "cpu", "nvme"]
    nvme_path: FilePath | None
    buffer_count: _Size
    pin_memory: bool
    pipeline_read: bool
    pipeline_write: bool
    fast_init: bool
    ratio: Fraction
    super_offload: bool
    cpuadam_cores_perc: Fraction


@with_config(STRICT)
class ZenFlow(TypedDict, total=False):
    topk_ratio: Annotated[float, Field(gt=0, lt=1)]
    select_strategy: Literal["auto", "step", "epoch"]
    select_interval: Count | Literal["auto"]
    update_interval: Count | Literal["auto"]
    overlap_step: bool
    offload: bool
    auto_ratio: Fraction
    full_warm_up_rounds: Natural
    pt_reserved_cores_perc: Fraction


@with_config(STRICT)
class LeafModule(TypedDict, total=False):
    classes: _Names
    names: _Names
    name_suffixes: _Names


@with_config(STRICT)
class Aio(TypedDict, total=False):
    block_size: _SizeAbove0
    queue_depth: Count
    intra_op_parallelism: Count
    single_submit: bool
    overlap_events: bool
    use_gds: bool


@with_config(STRICT)
class CommsLogger(TypedDict, total=False):
    enabled: bool
    prof_all: bool
    prof_ops: _Operations
    verbose: bool
    debug: bool


@with_config(STRICT)
class FlopsProfiler(TypedDict, total=False):
    enabled: bool
    recompute_fwd_factor: NotNegative
    profile_step: Count
    module_depth: Annotated[int, Field(ge=-1, le=LARGEST)]
    top_modules: Count
    detailed: bool
    output_file: FilePath | None


REDUCE_BUCKET = 50_000_000
"""The reduce_bucket_size, in elements, of a recipe that says none. DeepSpeed's own default is ten
times as large: 2 GB in float32, of which stage 3 makes a second copy as it sums."""
PREFETCH_BUCKET, LIVE_PARAMETERS, REUSE_DISTANCE = 50_000_000, 1_000_000_000, 1_000_000_000
"""DeepSpeed's elements of stage3_prefetch_bucket_size, stage3_max_live_parameters and
stage3_max_reuse_distance."""


def live_parameters(zero: Mapping[str, Any]) -> int:
    """Return up to how many gathered elements ZeRO-3 fetches weights ahead."""
    return int(zero.get("stage3_max_live_parameters", LIVE_PARAMETERS))


def prefetch_bucket(zero: Mapping[str, Any]) -> int:
    """Return how many elements of weights ZeRO-3 fetches ahead together, and one parameter more."""
    return int(zero.get("stage3_prefetch_bucket_size", PREFETCH_BUCKET))


def reuse_distance(zero: Mapping[str, Any]) -> int:
    """Return how near, in elements of weights, the next use of a gathered weight must be for ZeRO-3
    to keep it."""
    return int(zero.get("stage3_max_reuse_distance", REUSE_DISTANCE))


# DeepSpeed reads both names; the recipe holds the documented one.
ALIASES = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold": "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential": "stage3_allgather_sequential",
}
# Deprecated by DeepSpeed: the key that took its place and what `true` is there.
DEPRECATED: dict[str, tuple[str, Any]] = {
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "stage3_gather_fp16_weights_on_model_save": (
        "stage3_gather_16bit_weights_on_model_save",
        True,
    ),
}

_INSIDE_A_HOST = "leave it out: beside stages ZeRO divides what a stage has over the ranks of that "
_INSIDE_A_HOST += "stage alone, and without them zero_hpz_partition_size keeps weights in a host"
REMOVED: dict[str, tuple[str, str]] = {
    "mics_shard_size": ("MiCS", _INSIDE_A_HOST),
    "mics_hierarchical_params_gather": ("MiCS", _INSIDE_A_HOST),
    "zeropp_loco_param": ("LoCo", "leave it out: zero_quantized_gradients stands without it"),
}
"""ZeRO's fields that DeepSpeed had: what each belonged to, and what to write instead."""


@with_config(STRICT)
class ZeroKeys(TypedDict, total=False):
    """The fields of ZeRO, the short names that DeepSpeed reads too among them."""

    stage: _Stage
    contiguous_gradients: bool
    reduce_scatter: bool
    reduce_bucket_size: _SizeAbove0
    use_multi_rank_bucket_allreduce: bool
    allgather_partitions: bool
    allgather_bucket_size: _Size
    overlap_comm: bool | None
    compute_grad_norm: bool
    load_from_fp32_weights: bool
    elastic_checkpoint: bool
    offload_param: OffloadParam | None
    offload_optimizer: OffloadOptimizer | None
    zenflow: ZenFlow | None
    sub_group_size: _Size
    cpu_offload_param: bool | None
    cpu_offload_use_pin_memory: _Ignored
    cpu_offload: bool | None
    stage3_prefetch_bucket_size: _Size
    stage3_param_persistence_threshold: _Size
    stage3_model_persistence_threshold: _Size
    stage3_max_live_parameters: _Size
    stage3_max_reuse_distance: _Size
    stage3_gather_16bit_weights_on_model_save: bool
    stage3_module_granularity_threshold: _Size
    stage3_use_all_reduce_for_fetch_params: bool
    stage3_allgather_sequential: bool
    stage3_gather_fp16_weights_on_model_save: bool
    ignore_unused_parameters: bool
    legacy_stage1: bool
    round_robin_gradients: bool
    parameter_alignment: bool
    zero_hpz_partition_size: _Size
    zero_quantized_weights: bool
    zero_quantized_nontrainable_weights: bool
    zero_quantized_gradients: bool
    memory_efficient_linear: bool
    pipeline_loading_checkpoint: bool
    override_module_apply: bool
    log_trace_cache_warnings: bool
    enable_sanity_checks: bool
    save_muon_momentum_buffer_in_memory: bool
    leaf_module: LeafModule
    prefetch_bucket_size: _Size
    param_persistence_threshold: _Size
    model_persistence_threshold: _Size
    max_live_parameters: _Size
    max_reuse_distance: _Size
    gather_16bit_weights_on_model_save: bool
    module_granularity_threshold: _Size
    use_all_reduce_for_fetch_params: bool
    allgather_sequential: bool


LOWEST_STAGES = {"offload_param": 3, "offload_optimizer": 1}
"""The lowest stage of ZeRO at which DeepSpeed moves each away."""


def zero_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's ZeRO fields under their documented names, `stage` first and 1 by default.

    Raises Fault.
    """
    fields: dict[str, Any] = {"stage": 1}
    findings: list[Finding] = []
    for key, item in given.items():
        name = ALIASES.get(key, key)
        if key in DEPRECATED:
            name, when_true = DEPRECATED[key]
            if not item:
                continue
            item = when_true
        if name != key and name in given:
            findings.append((key, f"says the same as `{name}`", f"keep `{name}`"))
            continue
        fields[name] = item
    findings += _combinations(fields)
    if findings:
        raise Fault(findings)
    return fields


ZeroFields = Annotated[ZeroKeys, AfterValidator(zero_fields)]


def stages_for(fields: Mapping[str, Any]) -> Sequence[int]:
    """Return the stages at which DeepSpeed takes a recipe's other fields of ZeRO."""
    away = [
        lowest
        for key, lowest in LOWEST_STAGES.items()
        if (fields.get(key) or {}).get("device", "none") != "none"
    ]
    shared = (fields.get("offload_optimizer") or {}).get("ratio", 1.0) < 1
    return range(max([*away, 3 * shared, 0]), 4)


def _combinations(fields: dict[str, Any]) -> list[Finding]:
    """Return findings on what DeepSpeed refuses, or silently changes, when the engine starts."""
    stage = fields["stage"]
    possible = stages_for(fields) if isinstance(stage, Open) else (stage,)
    findings: list[Finding] = []
    for key, lowest in LOWEST_STAGES.items():
        device = (fields.get(key) or {}).get("device", "none")
        if device != "none" and max(possible) < lowest:
            remedy = f"write stage: {lowest}{'' if lowest == 3 else ' or more'}, or leave it out"
            findings.append((key, f"needs ZeRO stage {lowest}, and the stage is {stage}", remedy))
        elif device == "nvme" and not fields[key].get("nvme_path"):
            key = join(key, "nvme_path")
            findings.append(
                (key, "is missing, and device is nvme", "write a folder on the NVMe disk")
            )
    if (fields.get("offload_optimizer") or {}).get("ratio", 1.0) < 1 and 3 not in possible:
        key = "offload_optimizer.ratio"
        findings.append((key, "below 1 needs ZeRO stage 3", "write stage: 3, or ratio: 1.0"))
    if fields.get("compute_grad_norm") is False:
        what = "is false, but gradients are clipped by their norm and the norm is logged"
        findings.append(("compute_grad_norm", what, "leave it out"))
    return findings
