"""A DeepSpeed or FSDP configuration beside another tool's arguments, as ZeRO's settings."""

from __future__ import annotations

import re
from typing import Any

from uspft.config.deepspeed_fields import Aio, ZeroKeys
from uspft.convert.conversion import NOTHING, Conversion, short
from uspft.convert.theirs import with_file

ZERO_BLOCK = "deepspeed.zero_optimization"
AUTO = "auto"
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear"}
"""DeepSpeed's schedules that have their like here."""


def sharding(run: Conversion, key: str = "deepspeed", fsdp: str = "fsdp_config") -> None:
    """Write ZeRO's settings, from DeepSpeed's configuration or FSDP's.

    key: theirs that names DeepSpeed's file or holds its contents. fsdp: the block of FSDP's.
    """
    if isinstance(run.value(key), str):
        _file(run, key)
    with_file(run.theirs, fsdp, fsdp)
    if run.theirs.has_block("deepspeed") and not run.written("deepspeed"):
        _zero(run)
        _beside(run)
    elif run.theirs.has_block(fsdp) or run.written("fsdp"):
        _fully(run, fsdp)


def _file(run: Conversion, key: str) -> None:
    """Read the file that a key names, or take the stage of a shipped one by its name."""
    name = str(run.value(key))
    if with_file(run.theirs, key, "deepspeed"):
        return
    stage = re.search(r"(?:zero|z)_?([0-3])", name.lower().replace("-", "_"))
    if "deepspeed.zero_optimization.stage" in run.given:
        run.changed(key, "the stage of the command line stands in its place")
    elif stage and not name.endswith(".json"):
        _shipped(run, key, int(stage[1]), "offload" in name)
    else:
        what = f"is {short(name)}, which is not found here"
        hint = stage[1] if stage else "3"
        remedy = f"put it there, or add deepspeed.zero_optimization.stage={hint}"
        run.refuse(key, what, remedy)


def _shipped(run: Conversion, key: str, stage: int, offload: bool) -> None:
    """Write the settings of a configuration that their tool ships under a name."""
    run.put(f"{ZERO_BLOCK}.stage", stage, key)
    if offload and stage:
        run.put(f"{ZERO_BLOCK}.offload_optimizer", {"device": "cpu"}, key)
    if offload and stage == 3:
        run.put(f"{ZERO_BLOCK}.offload_param", {"device": "cpu"}, key)


def _zero(run: Conversion) -> None:
    """Take `zero_optimization` and `aio` as they stand, without values that are auto there."""
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
        run.outcome.values[f"{ZERO_BLOCK}.stage"] = 0


def _beside(run: Conversion) -> None:
    """Refuse what contradicts the arguments in DeepSpeed's file, as their tool does."""
    ours = run.outcome.values
    micro, batch = (ours.get(f"training.{name}_batch_size") for name in ("micro", "global"))
    for key, wanted in (
        ("train_micro_batch_size_per_gpu", micro),
        ("train_batch_size", batch),
    ):
        found = run.value(f"deepspeed.{key}")
        if found not in (None, AUTO, wanted) and wanted is not None:
            what = f"is {short(found)}, and the arguments make it {wanted}: an error there too"
            run.refuse(f"deepspeed.{key}", what, "write auto")
    clip = run.value("deepspeed.gradient_clipping")
    if clip is None:
        ours["training.max_grad_norm"] = None
        run.outcome.comments["training.max_grad_norm"] = "their DeepSpeed configuration clips none"
    elif clip != AUTO:
        run.put(
            "training.max_grad_norm",
            run.number("deepspeed.gradient_clipping", default=1.0) or None,
            "deepspeed.gradient_clipping",
        )
    kind = run.value("deepspeed.optimizer.type")
    if kind is not None and str(kind).lower() not in ("adamw", "adam"):
        what = f"is {short(kind)}, and AdamW is the only one here"
        run.refuse("deepspeed.optimizer.type", what, "write AdamW")
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
    """Write DeepSpeed's own schedule, which stands in place of the arguments'."""
    at, ours = "deepspeed.scheduler", run.outcome.values
    kind = run.word(f"{at}.type")
    if not run.written(f"{at}.type"):
        return
    if kind not in SCHEDULES:
        what = f"is {short(kind)}, which has no like here"
        run.refuse(f"{at}.type", what, "leave it out: the arguments' rules")
        return
    curve = f"{at}.params.warmup_type"
    if run.word(curve, default="log") != "linear":
        what = f"is {run.word(curve, default='log')}, and a warm-up is a line here"
        run.refuse(curve, what, "write linear, or leave the scheduler to the arguments")
    elif run.written(curve):
        run.ignored(curve, "a warm-up is a line")
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
    """Write the stage that shards what FSDP shards."""
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
        those = [key for key in keys if key.endswith(("offload_params", "fsdp"))]
        run.put(f"{ZERO_BLOCK}.offload_optimizer", {"device": "cpu"}, *those)
        if stage == 3:
            run.put(f"{ZERO_BLOCK}.offload_param", {"device": "cpu"}, *those)
    if found.get("activation_checkpointing") is True:
        those = [key for key in keys if key.endswith("activation_checkpointing")]
        run.put("memory.gradient_checkpointing", True, *those)
    for key in keys:
        if key.endswith(("offload_params", "activation_checkpointing")) and not run.value(key):
            run.ignored(key, NOTHING)
