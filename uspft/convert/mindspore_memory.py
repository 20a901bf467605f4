"""What a run of MindSpore Transformers shards, computes again and offloads."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from uspft.convert.conversion import Conversion, short
from uspft.convert.mindspore_layout import CONFIG, TheirDegrees

OPTIMIZER = "parallel.parallel_optimizer_config"
RECOMPUTE = "recompute_config"
ZERO = "deepspeed.zero_optimization"


def sharding(run: Conversion, degrees: TheirDegrees, micro_batches: int) -> None:
    """Write the ZeRO stage that shards what their optimizer parallelism does.

    Off is 0, which stages, divided experts and several micro-batches in bfloat16 cannot have, on is
    1, with accumulated gradients 2, and with weights gathered again in the backward 3.
    micro_batches: how many an update has here.
    """
    shards = "parallel.enable_parallel_optimizer"
    gradients = f"{OPTIMIZER}.gradient_accumulation_shard"
    again = f"{RECOMPUTE}.parallel_optimizer_comm_recompute"
    on, say = run.flag(shards), ""
    stage = (3 if run.flag(again) else 2 if run.flag(gradients) else 1) if on else 0
    whole = micro_batches == 1
    exact = run.given.get("model.dtype", run.outcome.values.get("model.dtype")) == "float32"
    spread = "parallel_config.expert_parallel" in run.outcome.values
    if stage == 0 and (degrees.stages > 1 or spread or not (whole or exact)):
        beside = "several micro-batches in bfloat16"
        beside = "stages" if degrees.stages > 1 else "divided experts" if spread else beside
        stage, say = 1, f"0 is not possible beside {beside}; the numbers are the same"
    run.put(f"{ZERO}.stage", stage, shards, gradients, again, say=say)
    if not run.written(shards):
        here = f"here `{ZERO}.stage: {stage}`"
        told = "is off where it is left out"
        run.changed(shards, ": ".join([told, "; ".join(filter(None, (here, say)))]))
    _least(run, stage)
    group = f"{OPTIMIZER}.optimizer_weight_shard_size"
    if run.written(group):
        if run.whole(group) in (-1, 0):
            run.ignored(group, "all ranks, as here")
        else:
            what = "left out: all ranks that hold the same weights are one group, the same numbers"
            run.changed(group, what)


def _least(run: Conversion, stage: int) -> None:
    """Write from which size on parameters are sharded: their KB are elements here."""
    key = f"{OPTIMIZER}.parallel_optimizer_threshold"
    if not run.written(key):
        return
    if stage != 3:
        run.ignored(key, f"ZeRO-{stage} splits everything evenly" if stage else "nothing is split")
        return
    legacy = run.flag("use_legacy", default=True)
    kind = f"{CONFIG}.param_init_type" if legacy else f"{CONFIG}.params_dtype"
    dtype = run.value(kind, "float16" if legacy else "float32")
    width = 4 if "32" in str(dtype) else 2
    say = f"KB of {dtype} as elements"
    elements = run.whole(key) * 1024 // width
    run.put(f"{ZERO}.stage3_param_persistence_threshold", elements, key, say=say)


def memory(run: Conversion, stages: int) -> None:
    """Write which layers are computed again, and what is offloaded."""
    full, some = f"{RECOMPUTE}.recompute", f"{RECOMPUTE}.select_recompute"
    whole, selected = _layers(run, full, stages), _layers(run, some, stages)
    if whole is None or selected is None:
        return
    layers = whole or selected
    if _is_flat(whole) and _is_flat(selected):
        layers = _most(whole, selected)
    run.put("memory.gradient_checkpointing", layers, full)
    keys = [key for key in run.theirs.values if f"{key}.".startswith(f"{some}.")]
    for key in keys:
        if whole is not False and whole != []:
            run.changed(key, "layers that are made again are made again whole")
        elif selected is False:
            run.changed(key, "false: no layer is made again")
    if whole is False and selected is not False:
        say = "the nearest there is: layers keep what attention gave, and make the rest again"
        run.put("memory.recompute", "nothing", *keys, say=say)
    swap = "swap_config.swap"
    if run.flag(swap) and layers:
        run.put("memory.offload_activations", "cpu", swap)
    elif run.flag(swap):
        run.changed(swap, "left out: only checkpointed layers are offloaded here")
    elif run.written(swap):
        run.put("memory.offload_activations", "none", swap)


def _layers(run: Conversion, key: str, stages: int) -> Any:
    """Return whether layers are computed again, or how many of each stage; None where that is an
    error there too.

    Patterns of operators stand for all layers that have them.
    """
    inside = {name: f"{key}.{name}" for name in run.theirs.block(key)}
    told = [run.value(name) for name in inside.values()] if inside else [run.value(key, False)]
    found: Any = False
    for value in told:
        if isinstance(value, list) and value and not isinstance(value[0], str):
            each = value if isinstance(value[0], list) else [value]
            rows = [row for row in each if isinstance(row, list)]
            where, most = next(iter(inside.values()), key), max(map(len, rows), default=0)
            if most > stages:
                what = f"has {most} entries for {stages} stages: an error there too"
                run.refuse(where, what, f"write {stages}")
                return None
            if len(rows) < len(each) or not all(_is_count(n) for row in rows for n in row):
                run.refuse(where, f"is {short(value)}", "write whole numbers")
                return None
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = bool(value)  # patterns
        if value is True or found is True:
            found = True
        elif _is_flat(value) and _is_flat(found):
            found = _most(found, value)
        else:
            found = value or found
    return found if isinstance(found, bool | list | int) else bool(found)


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(item, list) for item in value)


def _most(one: list[int], other: list[int]) -> list[int]:
    """Return the larger number of each stage."""
    return [max(pair) for pair in zip_longest(one, other, fillvalue=0)]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
