"""accelerate's configuration, alone or beside a Trainer's arguments: degrees, sharding, devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uspft.convert.conversion import NOTHING, Conversion, Outcome, short
from uspft.convert.sharding import ZERO_BLOCK, sharding
from uspft.convert.theirs import Theirs
from uspft.convert.trainer import context

AT = "accelerate"
ZERO = f"{AT}.deepspeed_config"
BLOCKS = ("parallelism_config", f"{AT}.parallelism_config")
PREFIX = "parallelism_config_"
PRECISIONS = {"bf16": "bfloat16", "no": "float32"}
MISSING = {
    "model.name_or_path": "FOLDER",
    "data.train": "FILE",
    "data.sequence_length": "N",
    "training.steps": "N",
}
"""What a recipe needs and accelerate's file does not have."""


def convert_accelerate(theirs: Theirs, given: Mapping[str, Any], ranks: int | None) -> Outcome:
    """Return the recipe that a configuration becomes under the keys of the command line, which
    stand for the script's arguments.

    given: those keys. ranks: how many devices there are here.
    """
    run = Conversion(theirs, given)
    where = f"{AT}.num_processes"
    for key, example in MISSING.items():
        others = {"model.config"} if key.startswith("model") else {"training.epochs"}
        if key not in given and not (others & set(given) and key[:5] in ("model", "train")):
            what = (
                f"is the configuration of devices alone: `{key}` stands in the script's arguments"
            )
            run.refuse(where, what, f"add {key}={example}, or name the arguments' file before it")
    micro = _whole(given, "training.micro_batch_size", 1)
    batch = _whole(given, "training.global_batch_size", 0)
    count = run.whole(f"{ZERO}.gradient_accumulation_steps", f"{AT}.gradient_accumulation_steps")
    devices = world(run) or ranks
    if not batch and devices:
        batch = micro * count * max(devices // split(run), 1)
    if not batch:
        run.refuse(where, "is missing", "add --ranks N, or training.global_batch_size=N")
    run.put("training.global_batch_size", batch, f"{ZERO}.gradient_accumulation_steps")
    run.outcome.comments["training.global_batch_size"] = "rows × accumulation × replicas"
    layout(run)
    precision(run)
    devices_sharding(run)
    return run.ended(batch)


def _whole(given: Mapping[str, Any], key: str, default: int) -> int:
    found = given.get(key, default)
    return found if isinstance(found, int) and not isinstance(found, bool) else default


def degree(run: Conversion, name: str) -> int:
    """Return a degree, from the arguments or from accelerate's file."""
    return run.whole(*_keys(name), least=1)


def _keys(name: str) -> tuple[str, ...]:
    return tuple(f"{block}.{start}{name}" for block in BLOCKS for start in ("", PREFIX))


def split(run: Conversion) -> int:
    """Return how many devices share a row."""
    return degree(run, "cp_size") * degree(run, "sp_size") * degree(run, "tp_size")


def world(run: Conversion) -> int | None:
    """Return how many devices the file says there are: processes, or the product of degrees."""
    key = f"{AT}.num_processes"
    if run.written(key):
        return run.whole(key, least=1)
    if run.written(*_keys("dp_shard_size")):
        return split(run) * degree(run, "dp_shard_size") * degree(run, "dp_replicate_size")
    return None


def layout(run: Conversion) -> None:
    """Write the degrees."""
    key = run.written(*_keys("tp_size"))
    if key and degree(run, "tp_size") > 1:
        run.put("parallel_config.model_parallel", degree(run, "tp_size"), key)
    elif key:
        run.ignored(key, "matrices are whole")
    gathers = run.written(*_keys("cp_comm_strategy"))
    word = run.word(*_keys("cp_comm_strategy"), default="allgather")
    ways = {"allgather": "all_gather", "alltoall": "p2p"}
    if word not in ways:
        run.refuse(str(gathers), f"is {short(word)}", "write allgather or alltoall")
        return
    rows, heads = degree(run, "cp_size"), degree(run, "sp_size")
    for name, count, way in (("cp_size", rows, ways[word]), ("sp_size", heads, "a2a")):
        key = run.written(*_keys(name))
        other = rows > 1 and name == "sp_size"
        if key and other and heads > 1:
            what = "stands beside cp_size: an error there too"
            run.refuse(key, what, "write one of them")
        elif key and not (other and heads == 1):
            context(run, key, count, way, *([gathers] if gathers and name == "cp_size" else []))
        elif key:
            run.ignored(key, "heads are whole")
    for name in ("dp_shard_size", "dp_replicate_size"):
        if key := run.written(*_keys(name)):
            run.changed(key, "here `parallel_config.data_parallel: auto`: what the ranks leave")
    key = f"{AT}.num_processes"
    run.told("counts in the batch; how many ranks there are here is the launcher's", key)


def precision(run: Conversion) -> None:
    """Write the compute type that accelerate says."""
    key = f"{AT}.mixed_precision"
    if not run.written(key) or "model.dtype" in run.given:
        return
    found = "no" if run.value(key) is False else run.word(key)
    if found in PRECISIONS:
        if found != "no" or "model.dtype" not in run.outcome.values:
            run.put("model.dtype", PRECISIONS[found], key)
        else:
            run.ignored(key, "the arguments say the type")
    else:
        remedy = "add model.dtype=bfloat16, which needs no scaling"
        run.refuse(key, f"is {short(found)}", remedy)


def devices_sharding(run: Conversion) -> None:
    """Write what is sharded, from accelerate's file or the arguments' own."""
    stage = run.written(f"{ZERO}.zero_stage")
    if stage:
        _zero(run)
    elif run.written(f"{ZERO}.deepspeed_config_file"):
        sharding(run, f"{ZERO}.deepspeed_config_file", f"{AT}.fsdp_config")
    elif run.theirs.has_block(f"{AT}.fsdp_config"):
        sharding(run, "deepspeed", f"{AT}.fsdp_config")
    else:
        sharding(run)
    key = f"{AT}.distributed_type"
    run.idle("every run is DeepSpeed's; what is sharded is ZeRO's stage", key)
    cpu = f"{AT}.use_cpu"
    if run.written(cpu) and run.flag(cpu):
        run.put("launch.device", "cpu", cpu)
    elif run.written(cpu):
        run.ignored(cpu, NOTHING)


def _zero(run: Conversion) -> None:
    """Write accelerate's own settings of ZeRO."""
    for name in ("optimizer", "param"):
        key, file = f"{ZERO}.offload_{name}_device", f"{ZERO}.offload_{name}_nvme_path"
        device = run.value(key, "none")
        if device != "none":
            found: dict[str, Any] = {"device": device}
            if run.written(file):
                found["nvme_path"] = run.value(file)
            run.put(f"{ZERO_BLOCK}.offload_{name}", found, key, file)
        else:
            run.idle("nothing is offloaded", key, file)
    clip = f"{ZERO}.gradient_clipping"
    if run.written(clip) and run.value(clip) != "auto":
        run.put("training.max_grad_norm", run.number(clip, default=1.0) or None, clip)
    elif run.written(clip):
        run.ignored(clip, "auto: the arguments rule")
    count = run.written(f"{ZERO}.gradient_accumulation_steps")
    theirs = run.written("gradient_accumulation_steps")
    if count and run.value(count) == "auto":
        run.ignored(count, "auto: the arguments rule")
    elif count and run.theirs.tool.name != AT:
        wanted = run.whole("gradient_accumulation_steps")
        if run.value(count) not in (wanted, 1) or (theirs and run.value(count) != wanted):
            what = (
                f"is {short(run.value(count))}, and the arguments say {wanted}: an error there too"
            )
            run.refuse(count, what, "write auto")
        else:
            run.ignored(count, "the arguments rule")
