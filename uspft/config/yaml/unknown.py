"""The keys that each mapping of a recipe may hold, and what an unknown one was meant to be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from uspft.config.checks import closest
from uspft.config.deepspeed_fields import (
    AIO,
    COMMS_LOGGER,
    FLOPS_PROFILER,
    LEAF_MODULE,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    ZENFLOW,
    ZERO,
)
from uspft.config.problems import Finding, join
from uspft.config.recipe import Recipe


def _nested(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yield the blocks that a field may hold, and whether they stand in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    for part in get_args(annotation):
        for kind, listed in _nested(part):
            yield kind, listed or getattr(annotation, "__origin__", None) is tuple


def _fields(kind: type[BaseModel], at: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield at, tuple(kind.model_fields)
    for name, field in kind.model_fields.items():
        for nested, listed in _nested(field.annotation):
            yield from _fields(nested, join(at, name) + ("[]" if listed else ""))


_ZERO = "deepspeed.zero_optimization"
# The path of a mapping ("" is the top, [] any item of a list) → the keys it may hold.
KEYS: dict[str, tuple[str, ...]] = {
    **dict(_fields(Recipe, "")),
    "deepspeed.aio": tuple(AIO),
    "deepspeed.comms_logger": tuple(COMMS_LOGGER),
    "deepspeed.flops_profiler": tuple(FLOPS_PROFILER),
    _ZERO: tuple(ZERO),
    f"{_ZERO}.offload_param": tuple(OFFLOAD_PARAM),
    f"{_ZERO}.offload_optimizer": tuple(OFFLOAD_OPTIMIZER),
    f"{_ZERO}.zenflow": tuple(ZENFLOW),
    f"{_ZERO}.leaf_module": tuple(LEAF_MODULE),
}

# DeepSpeed's own keys that follow from the recipe → the key that rules them.
DERIVED = {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "fp16": "model.dtype",
    "bf16": "model.dtype",
    "bfloat16": "model.dtype",
    "amp": "model.dtype",
    "torch_autocast": "model.dtype",
    "data_types": "model.dtype",
    "communication_data_type": "memory.gradient_reduction",
    "seq_parallel_communication_data_type": "model.dtype",
    "optimizer": "optimizer",
    "scheduler": "lr_schedule",
    "gradient_clipping": "training.max_grad_norm",
    "prescale_gradients": "parallel_config",
    "gradient_predivide_factor": "parallel_config",
    "gradient_allreduce_op": "parallel_config",
    "sequence_parallel_size": "parallel_config.context_parallel",
    "tensor_parallel": "parallel_config.model_parallel",
    "pipeline": "parallel_config.pipeline_stage",
    "activation_checkpointing": "memory.gradient_checkpointing",
    "checkpoint": "checkpoint",
    "load_universal_checkpoint": "checkpoint.resume",
    "steps_per_print": "logging.every_steps",
    "tensorboard": "logging.tensorboard",
    "wandb": "logging.wandb",
    "csv_monitor": "logging",
    "comet": "logging",
    "zero_force_ds_cpu_optimizer": "optimizer",
    "zero_allow_untested_optimizer": "optimizer",
}

# Our key → its names in other tools, and wrong ones that difflib cannot place.
_THEIRS = {
    "model.name_or_path": "model_name_or_path pretrained_model_name_or_path base_model model_id",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "model.dtype": "torch_dtype precision bf16 fp16 params_dtype compute_dtype",
    "model.attention": "attn_implementation flash_attention flash_attn attn_impl",
    "model.adapter": "lora peft peft_config",
    "model.adapter.rank": "model.adapter.r lora_r lora_rank",
    "model.adapter.alpha": "lora_alpha",
    "model.adapter.dropout": "lora_dropout",
    "model.adapter.target_modules": "lora_target lora_target_modules",
    "data.train": "dataset datasets dataset_name train_file train_data data.path",
    "data.eval": "eval_dataset validation_file val_data",
    "data.sequence_length": "max_seq_length max_seq_len max_length seq_length seq_len "
    "sequence_len cutoff_len block_size model_max_length",
    "data.packing": "sample_packing neat_packing",
    "data.workers": "num_workers dataloader_num_workers",
    "parallel_config.model_parallel": "tp tp_size tensor_parallel tensor_parallel_size "
    "tensor_model_parallel_size",
    "parallel_config.context_parallel": "sp_size cp_size sequence_parallel sequence_parallel_size "
    "sequence_parallel_degree context_parallel_size ulysses_sequence_parallel_size",
    "parallel_config.pipeline_stage": "pp_size pipeline_parallel_size pipeline_model_parallel_size",
    "parallel_config.ulysses_degree_in_cp": "ulysses_degree ulysses_size",
    "deepspeed.zero_optimization.stage": "zero_stage zero",
    "optimizer.learning_rate": "lr max_lr peak_lr",
    "optimizer.eps": "adam_epsilon epsilon",
    "lr_schedule.type": "lr_scheduler lr_scheduler_type scheduler",
    "lr_schedule.min_learning_rate": "min_lr lr_end",
    "lr_schedule.warmup_steps": "num_warmup_steps",
    "training.steps": "max_steps train_steps num_steps total_steps",
    "training.epochs": "num_train_epochs num_epochs n_epochs",
    "training.global_batch_size": "train_batch_size batch_size gradient_accumulation_steps",
    "training.micro_batch_size": "per_device_train_batch_size micro_batch "
    "train_micro_batch_size_per_gpu",
    "training.max_grad_norm": "gradient_clipping clip_grad grad_clip",
    "training.eval_every_steps": "eval_steps eval_interval",
    "training.eval_micro_batch_size": "per_device_eval_batch_size eval_batch_size",
    "memory.gradient_checkpointing": "activation_checkpointing",
    "checkpoint.every_steps": "save_steps save_interval",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint load_checkpoint",
    "logging.every_steps": "logging_steps log_every log_interval",
    "launch.processes": "nproc_per_node num_gpus num_processes",
}
OURS = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}

_GENERIC = ("type", "path", "name", "device", "enabled")  # say nothing about where they belong


def unknown_keys(raw: Any, at: str = "") -> tuple[Any, list[Finding], set[str]]:
    """Return the tree without unknown keys, a finding for each, and the known keys they mean."""
    pattern = re.sub(r"\[\d+\]", "[]", at)
    findings: list[Finding] = []
    meant: set[str] = set()
    if isinstance(raw, list):
        parts = [unknown_keys(item, f"{at}[{index}]") for index, item in enumerate(raw)]
        for _, more, names in parts:
            findings += more
            meant |= names
        return [item for item, _, _ in parts], findings, meant
    if not isinstance(raw, dict) or pattern not in KEYS:
        return raw, findings, meant
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        path = join(at, key)
        if key in KEYS[pattern]:
            kept[key], more, names = unknown_keys(value, path)
            findings += more
            meant |= names
            continue
        remedy, names = _meant(key, at, pattern)
        meant |= names
        if pattern == "deepspeed" and key in DERIVED:
            remedy = f"leave it out: `{DERIVED[key]}` rules it"
            findings.append((path, f"uspft derives `{key}`", remedy))
        else:
            findings.append((path, f"unknown key `{key}`", remedy))
    return kept, findings, meant


def _meant(key: str, at: str, pattern: str) -> tuple[str, set[str]]:
    """Return what to write instead of an unknown key, and the keys that it stands for."""
    siblings = KEYS[pattern]
    ours = OURS.get(join(pattern, key)) or OURS.get(key)
    if ours is not None:
        return f"here it is `{ours}`", {ours}
    homes = [] if key in _GENERIC else _homes(key)
    near = closest(key, siblings)
    if homes and not (near and near.lower() == key.lower()):
        return f"it belongs to {' or '.join(f'`{home}`' for home in homes)}", set(homes)
    if near is not None:
        return f"did you mean `{near}`?", {join(at, near)}
    everywhere = sorted({name for names in KEYS.values() for name in names} - set(_GENERIC))
    far = closest(key, everywhere, 0.8)
    homes = _homes(far) if far else []
    if homes:
        return f"did you mean {' or '.join(f'`{home}`' for home in homes)}?", set(homes)
    return f"known here: {', '.join(siblings)}", set()


def _homes(key: str) -> list[str]:
    """Return the paths at which a key of this name exists, except those in lists."""
    return [join(at, key) for at, names in KEYS.items() if key in names and "[]" not in at]
