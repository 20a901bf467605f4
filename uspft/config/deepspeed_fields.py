"""The keys of DeepSpeed's configuration that a recipe may hold; DeepSpeed is not imported.

Names, aliases and bounds are those of DeepSpeed 0.19.8; a test compares them with those of the
installed version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from uspft.config.messages import LARGEST
from uspft.config.problems import Fault, Finding, join
from uspft.config.types import (
    EXPONENT,
    Count,
    FilePath,
    Fraction,
    Natural,
    NotNegative,
    Open,
    Text,
    mapping_of,
    only,
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


_IGNORED = "is deprecated, and DeepSpeed ignores it"
_Ignored = Annotated[
    Any,
    BeforeValidator(only(None, _IGNORED, "write offload_optimizer.pin_memory")),
    Field(title="null"),
]


def _each(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_AWAY = {"device": Literal["none", "cpu", "nvme"], "nvme_path": FilePath | None}
OffloadParam = mapping_of(
    "OffloadParam",
    {**_AWAY, **_each(_Size, "buffer_count buffer_size max_in_cpu"), "pin_memory": bool},
)
OffloadOptimizer = mapping_of(
    "OffloadOptimizer",
    {
        **_AWAY,
        "buffer_count": _Size,
        **_each(bool, "pin_memory pipeline_read pipeline_write fast_init"),
        **{"ratio": Fraction, "super_offload": bool, "cpuadam_cores_perc": Fraction},
    },
)
ZenFlow = mapping_of(
    "ZenFlow",
    {
        "topk_ratio": Annotated[float, Field(gt=0, lt=1)],
        "select_strategy": Literal["auto", "step", "epoch"],
        **_each(Count | Literal["auto"], "select_interval update_interval"),
        **_each(bool, "overlap_step offload"),
        **{"auto_ratio": Fraction, "full_warm_up_rounds": Natural},
        "pt_reserved_cores_perc": Fraction,
    },
)
LeafModule = mapping_of("LeafModule", _each(_Names, "classes names name_suffixes"))
Aio = mapping_of(
    "Aio",
    {
        "block_size": _SizeAbove0,
        **_each(Count, "queue_depth intra_op_parallelism"),
        **_each(bool, "single_submit overlap_events use_gds"),
    },
)
CommsLogger = mapping_of(
    "CommsLogger",
    {
        **_each(bool, "enabled prof_all"),
        "prof_ops": _Operations,
        **_each(bool, "verbose debug"),
    },
)
FlopsProfiler = mapping_of(
    "FlopsProfiler",
    {
        **{"enabled": bool, "recompute_fwd_factor": NotNegative, "profile_step": Count},
        "module_depth": Annotated[int, Field(ge=-1, le=LARGEST)],
        **{"top_modules": Count, "detailed": bool, "output_file": FilePath | None},
    },
)


ELEMENTS = {
    "reduce_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
"""Default sizes in elements where a recipe gives none. They are DeepSpeed's, except
reduce_bucket_size: DeepSpeed's default is ten times larger, 2 GB in float32, and ZeRO-3 copies it
while it reduces."""


def elements(zero: Mapping[str, Any], key: str) -> int:
    """Return the number of elements that a recipe sets at a key of ZeRO, or its default."""
    return int(zero.get(key, ELEMENTS[key]))


# DeepSpeed accepts either name; a loaded recipe has the documented one.
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
# Keys deprecated by DeepSpeed: the key that replaces each, and its value for `true`.
DEPRECATED: dict[str, tuple[str, Any]] = {
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", True),
}

_INSIDE_A_HOST = "leave it out: with stages ZeRO divides what a stage has over the ranks of that "
_INSIDE_A_HOST += "stage alone, and without them zero_hpz_partition_size keeps weights in a host"
REMOVED: dict[str, tuple[str, str]] = {
    "mics_shard_size": ("MiCS", _INSIDE_A_HOST),
    "mics_hierarchical_params_gather": ("MiCS", _INSIDE_A_HOST),
    "zeropp_loco_param": ("LoCo", "leave it out: zero_quantized_gradients stands without it"),
}
"""ZeRO fields that DeepSpeed removed: the feature each belonged to, and what to write instead."""


_ZERO = {
    "stage": _Stage,
    **_each(bool, "contiguous_gradients reduce_scatter"),
    "reduce_bucket_size": _SizeAbove0,
    **_each(bool, "use_multi_rank_bucket_allreduce allgather_partitions"),
    "allgather_bucket_size": _Size,
    "overlap_comm": bool | None,
    **_each(bool, "compute_grad_norm load_from_fp32_weights elastic_checkpoint"),
    **{"offload_param": OffloadParam | None, "offload_optimizer": OffloadOptimizer | None},
    **{"zenflow": ZenFlow | None, "sub_group_size": _Size, "cpu_offload_param": bool | None},
    **{"cpu_offload_use_pin_memory": _Ignored, "cpu_offload": bool | None},
    **_each(_Size, "stage3_prefetch_bucket_size stage3_param_persistence_threshold"),
    **_each(_Size, "stage3_model_persistence_threshold stage3_max_live_parameters"),
    "stage3_max_reuse_distance": _Size,
    "stage3_gather_16bit_weights_on_model_save": bool,
    "stage3_module_granularity_threshold": _Size,
    **_each(bool, "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"),
    **_each(bool, "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters"),
    **_each(bool, "legacy_stage1 round_robin_gradients parameter_alignment"),
    "zero_hpz_partition_size": _Size,
    **_each(bool, "zero_quantized_weights zero_quantized_nontrainable_weights"),
    **_each(bool, "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint"),
    **_each(bool, "override_module_apply log_trace_cache_warnings enable_sanity_checks"),
    **{"save_muon_momentum_buffer_in_memory": bool, "leaf_module": LeafModule},
}
ZeroKeys = mapping_of("ZeroKeys", _ZERO | {key: _ZERO[name] for key, name in ALIASES.items()})
ZeroKeys.__doc__ = "The fields of ZeRO, the short names that DeepSpeed reads too among them."


_NOT_AVAILABLE = {
    "legacy_stage1": "DeepSpeed has no more what it asks for",
    "zenflow": "updates some weights by gradients of earlier steps: a step is not one process's",
    "stage3_module_granularity_threshold": "DeepSpeed may take the whole model for one module, "
    "whose embedding, layers and head are called one by one",
    "leaf_module": "DeepSpeed may take a module's gradients before they have come: they are lost",
}
"""ZeRO fields that DeepSpeed reads and uspft refuses, and why."""
GPU_ONLY = (
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
    "offload_optimizer.super_offload",
)
"""ZeRO fields whose kernels DeepSpeed has on GPUs alone."""
LOWEST_STAGES = {"offload_param": 3, "offload_optimizer": 1}
"""The lowest ZeRO stage at which DeepSpeed can offload parameters or optimizer state."""


def zero_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's ZeRO fields under their documented names, `stage` first and 1 by default.

    Raises Fault.
    """
    fields: dict[str, Any] = {"stage": 1}
    findings: list[Finding] = []
    for key, item in given.items():
        name = ALIASES.get(key, key)
        if key in DEPRECATED:
            if not item:
                continue
            name, item = DEPRECATED[key]
        if name != key and name in given:
            findings.append((key, f"says the same as `{name}`", f"keep `{name}`"))
            continue
        fields[name] = item
    findings += _combinations(fields)
    if findings:
        raise Fault(findings)
    return fields


ZeroFields: Any = Annotated[ZeroKeys, AfterValidator(zero_fields)]


def stages_for(fields: Mapping[str, Any]) -> Sequence[int]:
    """Return the ZeRO stages that DeepSpeed accepts with the recipe's other ZeRO fields."""
    away = [low for key, low in LOWEST_STAGES.items() if _away(fields, key) != "none"]
    return range(max([*away, 0]), 4)


def _away(fields: Mapping[str, Any], key: str, of: str = "device", default: Any = "none") -> Any:
    """Return one setting of an offload block, by default its device, or `default` where absent."""
    return (fields.get(key) or {}).get(of, default)


def _combinations(fields: dict[str, Any]) -> Iterator[Finding]:
    """Yield findings on combinations that DeepSpeed refuses, or silently changes, at engine
    start."""
    stage = fields["stage"]
    possible = stages_for(fields) if isinstance(stage, Open) else (stage,)
    for key, lowest in LOWEST_STAGES.items():
        device = _away(fields, key)
        if device != "none" and max(possible) < lowest:
            remedy = f"write stage: {lowest}{'' if lowest == 3 else ' or more'}, or leave it out"
            yield key, f"needs ZeRO stage {lowest}, and the stage is {stage}", remedy
        elif device == "nvme" and not fields[key].get("nvme_path"):
            what, remedy = "is missing, and device is nvme", "write a folder on the NVMe disk"
            yield join(key, "nvme_path"), what, remedy
    if (ratio := _away(fields, "offload_optimizer", "ratio", 1.0)) < 1:
        what = (
            f"is {ratio:g}, and below 1 needs DeepSpeed's own Adam, which a compiler has to build"
        )
        yield "offload_optimizer.ratio", what, "write 1.0, or leave it out"
    for key, why in _NOT_AVAILABLE.items():
        if fields.get(key):
            yield key, f"is set, and {why}", "leave it out"
    if fields.get("compute_grad_norm") is False:
        what = "is false, but gradients are clipped by their norm and the norm is logged"
        yield "compute_grad_norm", what, "leave it out"
