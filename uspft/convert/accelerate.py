"""accelerate's configuration, alone or with a Trainer's arguments (degrees, devices, precision);
and the sharding settings of accelerate, DeepSpeed or FSDP with any tool's arguments."""

from __future__ import annotations

import re
from typing import Any

from uspft.config.deepspeed_fields import Aio, ZeroKeys
from uspft.convert.conversion import NOTHING, Conversion, is_whole, short
from uspft.convert.theirs import with_file
from uspft.convert.trainer import context, device

AT = "accelerate"
ZERO = f"{AT}.deepspeed_config"
BLOCKS = ("parallelism_config", f"{AT}.parallelism_config")
PREFIX = "parallelism_config_"
PRECISIONS = {"bf16": "bfloat16", "no": "float32", "False": "float32"}  # YAML reads no as false
MISSING = {
    "model.name_or_path": "FOLDER",
    "data.train": "FILE",
    "data.sequence_length": "N",
    "training.steps": "N",
}
"""The keys that a recipe needs and accelerate's file does not have, with example values."""


def convert_accelerate(run: Conversion, ranks: int | None) -> int:
    """Convert accelerate's configuration alone, as CONVERTERS says; the command line sets what a
    training script's arguments would."""
    where = f"{AT}.num_processes"
    for key, example in MISSING.items():
        others = {"model.config"} if key.startswith("model") else {"training.epochs"}
        if key not in run.given and not (others & set(run.given) and key[:5] in ("model", "train")):
            what = f"is the configuration of devices alone: `{key}` stands in the script's"
            remedy = f"add {key}={example}, or name the arguments' file before it"
            run.refuse(where, f"{what} arguments", remedy)
    micro, batch = (run.given.get(f"training.{name}_batch_size") for name in ("micro", "global"))
    micro, batch = micro if is_whole(micro) else 1, batch if is_whole(batch) else 0
    count = run.whole(f"{ZERO}.gradient_accumulation_steps", f"{AT}.gradient_accumulation_steps")
    devices = world(run) or ranks
    if not batch and devices:
        batch = micro * count * max(devices // split(run), 1)
    if not batch:
        run.refuse(where, "is missing", "add --ranks N, or training.global_batch_size=N")
    why = "rows × accumulation × replicas"
    run.put("training.global_batch_size", batch, f"{ZERO}.gradient_accumulation_steps", why=why)
    layout(run)
    precision(run)
    devices_sharding(run)
    return batch


def degree(run: Conversion, name: str) -> int:
    """Return a degree, from the arguments or from accelerate's file."""
    return run.whole(*_keys(name), least=1)


def _keys(name: str) -> tuple[str, ...]:
    return tuple(f"{block}.{start}{name}" for block in BLOCKS for start in ("", PREFIX))


def split(run: Conversion) -> int:
    """Return how many devices share a row."""
    return degree(run, "cp_size") * degree(run, "sp_size") * degree(run, "tp_size")


def world(run: Conversion) -> int | None:
    """Return the number of devices in the file: processes, or the product of degrees."""
    key = f"{AT}.num_processes"
    if run.written(key):
        return run.whole(key, least=1)
    if run.written(*_keys("dp_shard_size")):
        return split(run) * degree(run, "dp_shard_size") * degree(run, "dp_replicate_size")
    return None


def layout(run: Conversion) -> None:
    """Convert the degrees."""
    key = run.written(*_keys("tp_size"))
    if degree(run, "tp_size") > 1:
        run.put("parallel_config.model_parallel", degree(run, "tp_size"), key)
    else:
        run.idle("matrices are whole", key)
    gathers = run.written(*_keys("cp_comm_strategy"))
    ways = {"allgather": "all_gather", "alltoall": "p2p"}
    word = run.choice(gathers or "", ways, "allgather")
    if not word:
        return
    rows, heads = degree(run, "cp_size"), degree(run, "sp_size")
    if key := run.written(*_keys("cp_size")):
        context(run, key, rows, ways[word], gathers)
    key = run.written(*_keys("sp_size"))
    if key and rows == 1:
        context(run, key, heads, "a2a")
    elif key and heads > 1:
        run.refuse(key, "is set together with cp_size: an error there too", "write one of them")
    else:
        run.idle("heads are whole", key)
    what = "here `parallel_config.data_parallel: auto`: what the ranks leave"
    run.told(what, run.written(*_keys("dp_shard_size")), run.written(*_keys("dp_replicate_size")))
    key = f"{AT}.num_processes"
    run.told("counts in the batch; how many ranks there are here is the launcher's", key)


def precision(run: Conversion) -> None:
    """Convert accelerate's compute dtype."""
    key = f"{AT}.mixed_precision"
    if not run.written(key) or "model.dtype" in run.given:
        return
    remedy = "add model.dtype=bfloat16, which needs no scaling"
    found = run.choice(key, PRECISIONS, remedy=remedy)
    if found == "bf16" or (found and "model.dtype" not in run.outcome.values):
        run.put("model.dtype", PRECISIONS[found], key)
    elif found:
        run.ignored(key, "the arguments say the type")


def devices_sharding(run: Conversion) -> None:
    """Convert the sharding settings of accelerate's file or of the arguments."""
    stage = run.written(f"{ZERO}.zero_stage")
    if stage:
        _accelerates_zero(run)
    elif run.written(f"{ZERO}.deepspeed_config_file"):
        sharding(run, f"{ZERO}.deepspeed_config_file", f"{AT}.fsdp_config")
    elif run.theirs.has_block(f"{AT}.fsdp_config"):
        sharding(run, "deepspeed", f"{AT}.fsdp_config")
    else:
        sharding(run)
    key = f"{AT}.distributed_type"
    run.idle("every run is DeepSpeed's; what is sharded is ZeRO's stage", key)
    device(run, f"{AT}.use_cpu")


def _accelerates_zero(run: Conversion) -> None:
    """Convert accelerate's own ZeRO settings."""
    for name in ("optimizer", "param"):
        key, file = f"{ZERO}.offload_{name}_device", f"{ZERO}.offload_{name}_nvme_path"
        where = run.value(key, "none")
        if where != "none":
            found: dict[str, Any] = {"device": where}
            if run.written(file):
                found["nvme_path"] = run.value(file)
            run.put(f"{ZERO_BLOCK}.offload_{name}", found, key, file)
        else:
            run.idle("nothing is offloaded", key, file)
    clip = f"{ZERO}.gradient_clipping"
    if run.value(clip, "auto") != "auto":
        run.put("training.max_grad_norm", run.number(clip, default=1.0) or None, clip)
    else:
        run.idle("auto: the arguments rule", clip)
    count = run.written(f"{ZERO}.gradient_accumulation_steps")
    theirs = run.written("gradient_accumulation_steps")
    if count and run.value(count) == "auto":
        run.ignored(count, "auto: the arguments rule")
    elif count and run.theirs.tool.name != AT:
        wanted = run.whole("gradient_accumulation_steps")
        if run.value(count) not in (wanted, 1) or (theirs and run.value(count) != wanted):
            run.wrong(count, "write auto", f", and the arguments say {wanted}: an error there too")
        else:
            run.ignored(count, "the arguments rule")


# Sharding by DeepSpeed or FSDP, with any tool's arguments.

ZERO_BLOCK = "deepspeed.zero_optimization"
AUTO = "auto"
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
"""DeepSpeed's schedules that have an equivalent here."""


def sharding(run: Conversion, key: str = "deepspeed", fsdp: str = "fsdp_config") -> None:
    """Convert the sharding settings of DeepSpeed or FSDP.

    key: the tool's key with DeepSpeed's configuration, or the path of its file. fsdp: the tool's
    block for FSDP.
    """
    if isinstance(run.value(key), str):
        _file(run, key)
    with_file(run.theirs, fsdp, fsdp)
    if run.theirs.has_block("deepspeed") and not run.written("deepspeed"):
        _zero(run)
        _beside(run)
    elif run.theirs.has_block(fsdp) or run.value("fsdp"):
        _fully(run, fsdp)


def _file(run: Conversion, key: str) -> None:
    """Read the file that a key names; the name of a configuration shipped with the tool gives the
    ZeRO stage."""
    name = str(run.value(key))
    if with_file(run.theirs, key, "deepspeed"):
        return
    stage = re.search(r"(?:zero|z)_?([0-3])", name.lower().replace("-", "_"))
    if "deepspeed.zero_optimization.stage" in run.given:
        run.changed(key, "the stage of the command line is used instead")
    elif stage and not name.endswith(".json"):
        run.put(f"{ZERO_BLOCK}.stage", int(stage[1]), key)
        if "offload" in name:  # as in the names of shipped configurations
            _offload(run, int(stage[1]), key)
    else:
        hint = stage[1] if stage else "3"
        remedy = f"put it there, or add deepspeed.zero_optimization.stage={hint}"
        run.wrong(key, remedy, ", which is not found here")


def _offload(run: Conversion, stage: int, *keys: str) -> None:
    """Write CPU offloading of what the ZeRO stage shards: optimizer states and, at stage 3,
    parameters."""
    if stage:
        run.put(f"{ZERO_BLOCK}.offload_optimizer", {"device": "cpu"}, *keys)
    if stage == 3:
        run.put(f"{ZERO_BLOCK}.offload_param", {"device": "cpu"}, *keys)


def _zero(run: Conversion) -> None:
    """Copy `zero_optimization` and `aio`, without values that are `auto`."""
    for block, known in ((ZERO_BLOCK, ZeroKeys), ("deepspeed.aio", Aio)):
        for path, value in run.theirs.block(block).items():
            key, name = f"{block}.{path}", path.partition(".")[0]
            if value == AUTO:
                run.ignored(key, "auto: DeepSpeed's own figure stands")
            elif name in known.__annotations__:
                run.outcome.values[key] = value
                run.outcome.sources[key] = run.theirs.values[key].where, key
                run.taken(key)
            else:
                run.changed(key, "left out: DeepSpeed here has no such setting")
    if f"{ZERO_BLOCK}.stage" not in run.outcome.values:
        run.put(f"{ZERO_BLOCK}.stage", 0)


def _beside(run: Conversion) -> None:
    """Refuse values of DeepSpeed's file that contradict the arguments, as the tool does."""
    ours = run.outcome.values
    micro, batch = (ours.get(f"training.{name}_batch_size") for name in ("micro", "global"))
    for key, wanted in (
        ("train_micro_batch_size_per_gpu", micro),
        ("train_batch_size", batch),
    ):
        found = run.value(f"deepspeed.{key}")
        if found not in (None, AUTO, wanted) and wanted is not None:
            what = f", and the arguments make it {wanted}: an error there too"
            run.wrong(f"deepspeed.{key}", "write auto", what)
    clip = run.value("deepspeed.gradient_clipping")
    if clip is None:
        run.put("training.max_grad_norm", None, why="their DeepSpeed configuration clips none")
    elif clip != AUTO:
        key = "deepspeed.gradient_clipping"
        run.put("training.max_grad_norm", run.number(key, default=1.0) or None, key)
    kind = run.value("deepspeed.optimizer.type")
    if kind is not None and str(kind).lower() not in ("adamw", "adam"):
        run.wrong("deepspeed.optimizer.type", "write AdamW", ", and AdamW is the only one here")
    _scheduler(run)
    for key, found in run.theirs.block("deepspeed").items():
        path = f"deepspeed.{key}"
        if run.spoken(path):
            continue
        if key.startswith(("optimizer.params", "scheduler.params")) and found != AUTO:
            what = f"is {short(found)}, and the arguments say it too"
            run.changed(path, f"left out: {what}")
        elif found == AUTO:
            run.ignored(path, "auto: the arguments rule")


def _scheduler(run: Conversion) -> None:
    """Convert the scheduler of DeepSpeed's file, which replaces that of the arguments."""
    at, ours = "deepspeed.scheduler", run.outcome.values
    if not run.written(f"{at}.type"):
        return
    why, remedy = ", which has no like here", "leave it out: the arguments' rules"
    kind = run.choice(f"{at}.type", SCHEDULES, why=why, remedy=remedy)
    if not kind:
        return
    curve, why = f"{at}.params.warmup_type", ", and a warm-up is a line here"
    remedy = "write linear, or leave the scheduler to the arguments"
    if run.choice(curve, ("linear",), "log", why=why, remedy=remedy):
        run.idle("a warm-up is a line", curve)
    run.put("lr_schedule.type", SCHEDULES[kind], f"{at}.type")
    for name in ("min_learning_rate", "cycles", "power", "decay_ratio"):
        ours.pop(f"lr_schedule.{name}", None)
    steps, start = f"{at}.params.warmup_num_steps", f"{at}.params.warmup_min_lr"
    if run.value(steps) not in (None, AUTO):
        ours.pop("lr_schedule.warmup_ratio", None)
        run.put("lr_schedule.warmup_steps", run.whole(steps, default=0), steps)
    if run.value(start) not in (None, AUTO, 0, 0.0):
        run.put("lr_schedule.warmup_initial", run.number(start, default=0.0), start)


def _fully(run: Conversion, at: str) -> None:
    """Write the ZeRO stage that shards the same as FSDP."""
    block = run.theirs.block(at)
    found: dict[str, Any] = {key.removeprefix("fsdp_"): value for key, value in block.items()}
    words = run.value("fsdp", "")
    said = " ".join(map(str, words)) if isinstance(words, list) else str(words)
    strategy = str(found.get("sharding_strategy", "")).upper()
    again = found.get("reshard_after_forward")
    stage = 3
    if again is False or "SHARD_GRAD_OP" in (strategy, str(again).upper()):
        stage = 2
    elif strategy == "NO_SHARD" or "shard_grad_op" in said:
        stage = 2 if "shard_grad_op" in said else 1
    keys = [f"{at}.{key}" for key in block] + ["fsdp"]
    names = ("sharding_strategy", "reshard_after_forward")
    run.put(f"{ZERO_BLOCK}.stage", stage, *(k for k in keys if k.endswith((*names, "fsdp"))))
    if found.get("offload_params") is True or "offload" in said:
        _offload(run, stage, *(key for key in keys if key.endswith(("offload_params", "fsdp"))))
    if found.get("activation_checkpointing") is True:
        those = [key for key in keys if key.endswith("activation_checkpointing")]
        run.put("memory.gradient_checkpointing", True, *those)
    for key in keys:
        if key.endswith(("offload_params", "activation_checkpointing")) and not run.value(key):
            run.ignored(key, NOTHING)
