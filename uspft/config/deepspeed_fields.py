"""The keys of DeepSpeed's configuration that a recipe may hold; DeepSpeed is not imported.

Names, aliases and bounds are those of DeepSpeed 0.19.8; a test compares them with those of the
installed version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from uspft.config.checks import (
    Check,
    Open,
    choice,
    each,
    flag,
    path,
    real,
    table,
    text,
    whole,
    whole_or_open,
)
from uspft.config.problems import Fault, Finding, fault, join

_COUNT = whole(0, exponent=True)  # DeepSpeed's own examples write 5e8
_SHARE = real(0, 1)
_NAMES = each(text("a name"), "a list of names")

OFFLOAD_PARAM: dict[str, Check] = {
    "device": choice("none", "cpu", "nvme"),
    "nvme_path": path(also=(None,)),
    "buffer_count": _COUNT,
    "buffer_size": _COUNT,
    "max_in_cpu": _COUNT,
    "pin_memory": flag(),
}
OFFLOAD_OPTIMIZER: dict[str, Check] = {
    "device": choice("none", "cpu", "nvme"),
    "nvme_path": path(also=(None,)),
    "buffer_count": _COUNT,
    "pin_memory": flag(),
    "pipeline_read": flag(),
    "pipeline_write": flag(),
    "fast_init": flag(),
    "ratio": _SHARE,
    "super_offload": flag(),
    "cpuadam_cores_perc": _SHARE,
}
ZENFLOW: dict[str, Check] = {
    "topk_ratio": real(above=0, below=1),
    "select_strategy": choice("auto", "step", "epoch"),
    "select_interval": whole(1, also=("auto",)),
    "update_interval": whole(1, also=("auto",)),
    "overlap_step": flag(),
    "offload": flag(),
    "auto_ratio": _SHARE,
    "full_warm_up_rounds": whole(0),
    "pt_reserved_cores_perc": _SHARE,
}
LEAF_MODULE: dict[str, Check] = {"classes": _NAMES, "names": _NAMES, "name_suffixes": _NAMES}
AIO: dict[str, Check] = {
    "block_size": whole(1, exponent=True),
    "queue_depth": whole(1),
    "intra_op_parallelism": whole(1),
    "single_submit": flag(),
    "overlap_events": flag(),
    "use_gds": flag(),
}
COMMS_LOGGER: dict[str, Check] = {
    "enabled": flag(),
    "prof_all": flag(),
    "prof_ops": each(text("an operation"), "a list of operations"),
    "verbose": flag(),
    "debug": flag(),
}
FLOPS_PROFILER: dict[str, Check] = {
    "enabled": flag(),
    "recompute_fwd_factor": real(0),
    "profile_step": whole(1),
    "module_depth": whole(-1),
    "top_modules": whole(1),
    "detailed": flag(),
    "output_file": path(also=(None,)),
}

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


def _ignored_by_deepspeed(value: object) -> object:
    if value is None:
        return value
    raise fault("is deprecated, and DeepSpeed ignores it", "write offload_optimizer.pin_memory")


_ZERO: dict[str, Check] = {
    "stage": whole_or_open(0, 3),
    "contiguous_gradients": flag(),
    "reduce_scatter": flag(),
    "reduce_bucket_size": whole(1, exponent=True),
    "use_multi_rank_bucket_allreduce": flag(),
    "allgather_partitions": flag(),
    "allgather_bucket_size": _COUNT,
    "overlap_comm": flag(also=(None,)),
    "compute_grad_norm": flag(),
    "load_from_fp32_weights": flag(),
    "elastic_checkpoint": flag(),
    "offload_param": table(OFFLOAD_PARAM, also=(None,)),
    "offload_optimizer": table(OFFLOAD_OPTIMIZER, also=(None,)),
    "zenflow": table(ZENFLOW, also=(None,)),
    "sub_group_size": _COUNT,
    "cpu_offload_param": flag(also=(None,)),
    "cpu_offload_use_pin_memory": _ignored_by_deepspeed,
    "cpu_offload": flag(also=(None,)),
    "stage3_prefetch_bucket_size": _COUNT,
    "stage3_param_persistence_threshold": _COUNT,
    "stage3_model_persistence_threshold": _COUNT,
    "stage3_max_live_parameters": _COUNT,
    "stage3_max_reuse_distance": _COUNT,
    "stage3_gather_16bit_weights_on_model_save": flag(),
    "stage3_module_granularity_threshold": _COUNT,
    "stage3_use_all_reduce_for_fetch_params": flag(),
    "stage3_allgather_sequential": flag(),
    "stage3_gather_fp16_weights_on_model_save": flag(),
    "ignore_unused_parameters": flag(),
    "legacy_stage1": flag(),
    "round_robin_gradients": flag(),
    "parameter_alignment": flag(),
    "zero_hpz_partition_size": _COUNT,
    "zero_quantized_weights": flag(),
    "zero_quantized_nontrainable_weights": flag(),
    "zero_quantized_gradients": flag(),
    "memory_efficient_linear": flag(),
    "pipeline_loading_checkpoint": flag(),
    "override_module_apply": flag(),
    "log_trace_cache_warnings": flag(),
    "enable_sanity_checks": flag(),
    "save_muon_momentum_buffer_in_memory": flag(),
    "leaf_module": table(LEAF_MODULE),
}
ZERO: dict[str, Check] = {**_ZERO, **{short: _ZERO[name] for short, name in ALIASES.items()}}

LOWEST_STAGES = {"offload_param": 3, "offload_optimizer": 1}
"""The lowest stage of ZeRO at which DeepSpeed moves each away."""

_zero_table = table(ZERO)


def zero_fields(value: Any) -> dict[str, Any]:
    """Return DeepSpeed's ZeRO fields under their documented names, `stage` first and 1 by default.

    Raises Fault.
    """
    given: dict[str, Any] = _zero_table(value)
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


def stages_for(fields: Mapping[str, Any]) -> Sequence[int]:
    """Return the stages of ZeRO that a recipe's other fields of it can have."""
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
