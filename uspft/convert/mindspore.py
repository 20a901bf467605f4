"""MindSpore Transformers' configuration as a recipe: layout, batch, length, optimizer, memory.

The global batch is counted by their formulas before anything is translated, and again after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uspft.config.algorithms import CONTEXT, Splits
from uspft.convert.conversion import Conversion
from uspft.convert.mindspore_data import data, model
from uspft.convert.outcome import Outcome
from uspft.convert.theirs import Theirs

CONFIG = "model.model_config"
THEIRS = {row.megatron: row for row in CONTEXT.values()} | {
    name: row for row in CONTEXT.values() for name in (row.name, *row.synonyms)
}
"""The algorithms by their names in both vocabularies."""
GATHER, RING, OLD = "all_gather", "p2p", {"hybird": "hybrid"}
"""Megatron's words for what their default is, without and with a ring; and an old spelling."""
SCHEDULES = {
    "ConstantWarmUpLR": "constant",
    "LinearWithWarmUpLR": "linear",
    "CosineWithWarmUpLR": "cosine",
    "CosineWithRestartsAndWarmUpLR": "cosine_restarts",
    "PolynomialWithWarmUpLR": "polynomial",
    "WarmUpStableDecayLR": "wsd",
}
ADAMW = ("AdamW", "FusedAdamW", "FP32StateAdamWeightDecay")


def convert_mindspore(theirs: Theirs, given: Mapping[str, Any], ranks: int | None) -> Outcome:
    """Return the recipe that a configuration becomes, and what became of each key.

    given: keys of ours that the command line writes. ranks: how many processes there are; None: as
    many as the product of their degrees.
    """
    run = Conversion(theirs, given)
    _checked(run)
    degrees = _degrees(run)
    batch = _global_batch(run, degrees)
    _layout(run, degrees, ranks)
    _context(run, degrees["context"])
    _stages(run, degrees["stages"])
    _zero(run, degrees["stages"])
    _batch(run, batch)
    _length(run)
    _optimizer(run)
    _schedule(run)
    _memory(run)
    model(run)
    data(run)
    _outputs(run)
    return run.ended(batch)


def _checked(run: Conversion) -> None:
    """Refuse what their own checks refuse."""
    mode = run.value("run_mode", "train")
    if mode not in ("train", "finetune"):
        run.refuse("run_mode", f"is {mode}", "only training is converted: write finetune")
    elif run.written("run_mode"):
        run.changed("run_mode", "a recipe trains")
    copies = run.whole(f"{CONFIG}.fine_grain_interleave")
    context = run.whole("parallel_config.context_parallel", "parallel_config.context_parallel_size")
    splits = run.flag("parallel_config.use_seq_parallel", "parallel_config.sequence_parallel")
    if copies > 1 and not splits and context == 1:
        what = f"is {copies} without use_seq_parallel or context_parallel: an error there too"
        run.refuse(f"{CONFIG}.fine_grain_interleave", what, "write 1")
    elif run.written(f"{CONFIG}.fine_grain_interleave"):
        run.changed(
            f"{CONFIG}.fine_grain_interleave",
            "left out: copies that hide transfers are not here yet; the numbers are the same",
        )
    if context > 1 and run.value(f"{CONFIG}.use_flash_attention") is False:
        what = "is false with context_parallel above 1: an error there too"
        run.refuse(f"{CONFIG}.use_flash_attention", what, "write true")


def _degrees(run: Conversion) -> dict[str, int]:
    """Return their degrees as they are in effect."""
    block = "parallel_config"
    mode = run.value("parallel.parallel_mode", 1)
    if run.flag("use_parallel", default=True) is False or mode in (0, "data_parallel"):
        return {"data": 0, "tensor": 1, "context": 1, "stages": 1}
    if mode in (2, "auto_parallel"):
        run.refuse("parallel.parallel_mode", "is automatic there", "write 1, or take plan's advice")
    names = {
        "data": ("data_parallel", "data_parallel_size"),
        "tensor": ("model_parallel", "tensor_model_parallel_size"),
        "context": ("context_parallel", "context_parallel_size"),
        "stages": ("pipeline_stage", "pipeline_model_parallel_size"),
    }
    return {
        axis: run.whole(*(f"{block}.{key}" for key in keys), least=1)
        for axis, keys in names.items()
    }


def _global_batch(run: Conversion, degrees: Mapping[str, int]) -> int:
    """Return the rows of one update, by their formulas."""
    unsaid = degrees["data"] == 0 and not run.given.get("parallel_config.data_parallel")
    if unsaid and run.flag("use_parallel", default=True):
        what = "0 counts devices, which the file does not say"
        run.refuse("parallel.parallel_mode", what, "add parallel_config.data_parallel=N")
    replicas = degrees["data"] or _given(run)
    micro = run.whole("runner_config.batch_size")
    copies = run.whole("micro_batch_interleave_num")
    if degrees["stages"] > 1:
        return micro * replicas * run.whole("parallel_config.micro_batch_num") * copies
    return micro * replicas * copies * run.whole("runner_config.gradient_accumulation_steps")


def _given(run: Conversion) -> int:
    """Return the data parallel degree of the command line, where the file has none."""
    found = run.given.get("parallel_config.data_parallel", 1)
    return found if isinstance(found, int) else 1


def _layout(run: Conversion, degrees: Mapping[str, int], ranks: int | None) -> None:
    """Write the degrees; with other ranks, data parallelism is what is left of them."""
    block = "parallel_config"
    tensor, context, stages = degrees["tensor"], degrees["context"], degrees["stages"]
    replicas = degrees["data"] or _given(run)
    keys = (f"{block}.data_parallel", f"{block}.data_parallel_size")
    if ranks is not None and ranks != replicas * tensor * context * stages:
        theirs = replicas * tensor * context * stages
        replicas, left = divmod(ranks, tensor * context * stages)
        key = run.written(*keys) or keys[0]
        if left or not replicas:
            what = f"the other degrees take {tensor * context * stages} ranks, not of {ranks}"
            run.refuse(key, what, f"write --ranks {tensor * context * stages * max(replicas, 1)}")
            return
        what = f"{theirs} devices there, {ranks} ranks here; the batch stays"
        run.put(f"{block}.data_parallel", replicas, *keys, say=what)
    elif degrees["data"] == 0:
        run.put(f"{block}.data_parallel", replicas, "parallel.parallel_mode", "use_parallel")
    if degrees["data"] == 0:
        return
    if run.written("parallel.parallel_mode"):
        run.changed("parallel.parallel_mode", "the degrees are those written")
    if run.written("use_parallel"):
        run.changed("use_parallel", "the degrees are those written")
    asked = run.written(f"{block}.use_seq_parallel", f"{block}.sequence_parallel")
    mesh = run.flag(f"{CONFIG}.use_3d_tensor_parallel")
    if asked and mesh:
        run.changed(asked, "left out: a mesh splits tokens between matrices by itself")
    elif asked and run.value(asked):
        if tensor > 1:
            run.put(f"{block}.use_seq_parallel", True, asked)
        else:
            run.changed(asked, "left out: there is no tensor degree for it to act with")
    elif asked:
        run.put(f"{block}.use_seq_parallel", False, asked)
    if mesh:
        sides = [run.whole(f"{CONFIG}.tp_x"), run.whole(f"{CONFIG}.tp_y")]
        run.put(f"{block}.tensor_parallel_algo", "meshslice", f"{CONFIG}.use_3d_tensor_parallel")
        run.put(f"{block}.tensor_mesh", sides, f"{CONFIG}.tp_x", f"{CONFIG}.tp_y")


def _context(run: Conversion, context: int) -> None:
    """Write the algorithm of context parallelism."""
    block = "parallel_config"
    key = run.written(f"{block}.context_parallel_algo", f"{block}.cp_comm_type")
    ring = f"{CONFIG}.use_ring_attention"
    if context == 1:
        for idle in (key, f"{block}.ulysses_degree_in_cp", ring):
            if idle and run.written(idle):
                run.ignored(idle, "context_parallel is 1: rows are whole")
        return
    word = str(run.value(key)) if key else GATHER
    for old, new in OLD.items():
        word = word.replace(old, new)
    if word not in THEIRS:
        known = ", ".join(name for name in THEIRS if name != "–")
        remedy = f"one algorithm is for all layers: write one of {known}"
        run.refuse(str(key), f"is {run.value(str(key))}", remedy)
        return
    row = THEIRS[word]
    if row.megatron == GATHER and run.flag(ring):
        row = THEIRS[RING]
    both = row.splits is Splits.BOTH
    say = "between groups a ring, the same numbers" if both and not run.flag(ring) else ""
    keys = (key, ring) if key else (ring,)
    run.put(f"{block}.context_parallel_algo", row.name, *keys, say=say)
    degree = f"{block}.ulysses_degree_in_cp"
    if both:
        run.put(degree, run.whole(degree), degree)
    elif run.written(degree):
        run.ignored(degree, "it acts where heads and tokens are split")


def _stages(run: Conversion, stages: int) -> None:
    """Write how layers are split over stages, and in which order they work."""
    block = "parallel_config"
    virtual = (f"{CONFIG}.pp_interleave_num", f"{block}.virtual_pipeline_model_parallel_size")
    scheduler = "parallel.pipeline_config.pipeline_scheduler"
    interleave = "parallel.pipeline_config.pipeline_interleave"
    chunks = f"{block}.seq_split_num"
    idle = (*virtual, scheduler, interleave, chunks, f"{CONFIG}.offset", f"{block}.micro_batch_num")
    if stages == 1:
        for key in (*idle, f"{CONFIG}.layers_per_stage"):
            if run.written(key):
                run.ignored(key, "pipeline_stage is 1: there are no stages")
        return
    if run.written(chunks):
        what = "left out: sequence chunks are not here yet; whole rows, the same numbers"
        run.changed(chunks, what)
    if run.written(scheduler):
        theirs = run.value(scheduler)
        ours = "gpipe" if theirs == "gpipe" else "auto"
        run.put(f"{block}.pipeline_scheduler", ours, scheduler)
    if named := run.written(*virtual):
        run.put(f"{block}.pp_interleave_num", run.whole(named), named, interleave)
    elif run.written(interleave):
        run.changed(interleave, "it acts with pp_interleave_num above 1")
    offset = run.value(f"{CONFIG}.offset")
    if offset is not None and any(_all(offset)):
        run.put(f"{block}.offset", offset, f"{CONFIG}.offset")
    elif offset is not None:
        run.changed(f"{CONFIG}.offset", "zeros: layers are dealt to stages by their cost")
    if (layers := run.value(f"{CONFIG}.layers_per_stage")) is not None:
        run.put(f"{block}.layers_per_stage", layers, f"{CONFIG}.layers_per_stage")
    run.changed(f"{block}.micro_batch_num", "it counts into training.global_batch_size")


def _all(value: Any) -> list[Any]:
    """Return the numbers of nested lists."""
    return [one for item in value for one in _all(item)] if isinstance(value, list) else [value]


def _zero(run: Conversion, stages: int) -> None:
    """Write the ZeRO stage that shards what their optimizer parallelism shards."""
    block, shards = "parallel.parallel_optimizer_config", "parallel.enable_parallel_optimizer"
    gradients = f"{block}.gradient_accumulation_shard"
    again = "recompute_config.parallel_optimizer_comm_recompute"
    stage, say = (1, "") if run.flag(shards) else (0, "")
    if stage and run.flag(gradients):
        stage = 2
    if stage and run.flag(again):
        stage = 3
    if stage == 0:
        stage, say = 1, "optimizer states are split over ranks, the same numbers"
    zero = "deepspeed.zero_optimization.stage"
    run.put(zero, stage, shards, gradients, again, say=say)
    least = f"{block}.parallel_optimizer_threshold"
    if run.written(least):
        if stage == 3:
            elements = run.whole(least) * 1024 // 4
            ours = "deepspeed.zero_optimization.stage3_param_persistence_threshold"
            run.put(ours, elements, least, say="KB of float32 as elements")
        else:
            run.ignored(least, f"ZeRO-{stage} splits everything evenly")
    group = f"{block}.optimizer_weight_shard_size"
    if run.written(group):
        if run.whole(group) in (-1, 0):
            run.ignored(group, "all ranks, as here")
        else:
            what = "left out: all ranks that hold the same weights are one group, the same numbers"
            run.changed(group, what)


def _batch(run: Conversion, batch: int) -> None:
    keys = ["runner_config.batch_size", "micro_batch_interleave_num"]
    run.put("training.micro_batch_size", run.whole(keys[0]), keys[0])
    run.put("training.global_batch_size", batch)
    for key in (*keys[1:], "runner_config.gradient_accumulation_steps"):
        if run.written(key):
            run.changed(key, f"here `training.global_batch_size: {batch}`")
    said = "by batch_size, data_parallel and the number of micro-batches"
    run.outcome.comments["training.global_batch_size"] = said


def _length(run: Conversion) -> None:
    """Write how long the run is."""
    total, epochs = run.whole("lr_schedule.total_steps", default=-1), "runner_config.epochs"
    if total > 0:
        say = "the run ends with its schedule"
        run.put("training.steps", total, "lr_schedule.total_steps", epochs, say=say)
    else:
        run.put("training.epochs", run.whole(epochs), epochs)
        if run.written("lr_schedule.total_steps"):
            run.changed("lr_schedule.total_steps", "-1: the epochs say the length, as there")
    stop = "runner_config.stop_step"
    if run.whole(stop, default=0) > 0:
        run.put("training.stop_step", run.whole(stop), stop)
    elif run.written(stop):
        run.changed(stop, "0: the run takes all its steps")
    if run.flag("train_dataset.drop_remainder", default=True):
        key = "train_dataset.drop_remainder"
        if run.written(key):
            run.changed(key, "the last step of the last epoch is shorter here, not dropped")


def _optimizer(run: Conversion) -> None:
    kind = run.value("optimizer.type", "AdamW")
    if kind not in ADAMW:
        run.refuse("optimizer.type", f"is {kind}", f"write one of {', '.join(ADAMW)}")
    else:
        run.put("optimizer.type", "adamw", "optimizer.type")
    rates = ("lr_schedule.learning_rate", "optimizer.learning_rate")
    run.put("optimizer.learning_rate", run.number(*rates, default=5e-5), *rates)
    run.put("optimizer.betas", run.value("optimizer.betas", [0.9, 0.999]))
    run.put("optimizer.eps", run.number("optimizer.eps", default=1e-8))
    run.put("optimizer.weight_decay", run.number("optimizer.weight_decay", default=0.0))
    clip, most = "runner_wrapper.use_clip_grad", "runner_wrapper.max_grad_norm"
    clips = run.flag(clip, default=not run.theirs.has_block("runner_wrapper"))
    norm = run.number(most, default=1.0) if clips else None
    say = "" if run.written(clip) else "a wrapper that does not ask for clipping has none"
    run.put("training.max_grad_norm", norm, clip, most, say="" if clips else say)


def _schedule(run: Conversion) -> None:
    """Write the learning rate's schedule; theirs begins at rate 0, a step before ours."""
    block = "lr_schedule"
    kind = run.word(f"{block}.type", default="CosineWithWarmUpLR")
    if kind not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        run.refuse(f"{block}.type", f"is {kind}, which has no like here", f"write one of {known}")
        return
    ours = SCHEDULES[kind]
    run.put(f"{block}.type", ours, f"{block}.type", say="our step i has the rate of theirs i + 1")
    total = run.outcome.values.get("training.steps")
    ratio, steps = run.written(f"{block}.warmup_ratio"), run.written(f"{block}.warmup_steps")
    share = run.number(f"{block}.warmup_ratio", default=0.0)
    if ratio is not None and total is not None:
        run.put(f"{block}.warmup_steps", int(total * share), f"{block}.warmup_ratio")
    elif ratio is not None:
        say = "rounded up here, down there"
        run.put(f"{block}.warmup_ratio", share, f"{block}.warmup_ratio", say=say)
    else:
        run.put(f"{block}.warmup_steps", run.whole(f"{block}.warmup_steps", default=0))
    if ratio is not None and steps is not None:
        run.changed(f"{block}.warmup_steps", "warmup_ratio wins, as there")
    run.put(f"{block}.min_learning_rate", run.number(f"{block}.lr_end", default=0.0))
    if run.value(f"{block}.warmup_lr_init"):
        run.put(f"{block}.warmup_initial", run.number(f"{block}.warmup_lr_init", default=0.0))
    cycles = run.value(f"{block}.num_cycles")
    if cycles is not None and ours == "cosine_restarts":
        run.put(f"{block}.cycles", run.whole(f"{block}.num_cycles"), f"{block}.num_cycles")
    elif cycles is not None and not (ours == "cosine" and cycles == 0.5):
        what = f"is {cycles}, and {kind} here falls once"
        run.refuse(f"{block}.num_cycles", what, "leave it out, or write 0.5 under a cosine")
    elif cycles is not None:
        run.changed(f"{block}.num_cycles", "half a cycle: the cosine falls once, as here")
    for key, only in (("power", "polynomial"), ("decay_ratio", "wsd")):
        if run.written(f"{block}.{key}") and ours != only:
            run.ignored(f"{block}.{key}", f"it acts under {only} alone")


def _memory(run: Conversion) -> None:
    """Write which layers are computed again, and what is offloaded."""
    block = "recompute_config"
    full, some = run.value(f"{block}.recompute", False), run.value(f"{block}.select_recompute")
    stages = run.outcome.values.get("parallel_config.pipeline_stage") or run.whole(
        "parallel_config.pipeline_stage", "parallel_config.pipeline_model_parallel_size"
    )
    for key, found in ((f"{block}.recompute", full), (f"{block}.select_recompute", some)):
        counts = isinstance(found, list) and found and not isinstance(found[0], list | str)
        if counts and len(found) > stages:
            what = f"has {len(found)} entries for {stages} stages: an error there too"
            run.refuse(key, what, f"write {stages}")
            return
    layers: Any = full if isinstance(full, bool | list) else bool(full)
    if layers:
        run.put("memory.gradient_checkpointing", layers, f"{block}.recompute")
        if some:
            run.changed(f"{block}.select_recompute", "whole layers are made again already")
    elif some:
        layers = some if isinstance(some, list) and all(_is_count(n) for n in _all(some)) else True
        run.put("memory.gradient_checkpointing", layers, f"{block}.recompute")
        say = "layers keep what attention gave, and make the rest again"
        run.put("memory.recompute", "nothing", f"{block}.select_recompute", say=say)
    else:
        run.put("memory.gradient_checkpointing", False, f"{block}.recompute")
        if some is not None:
            run.changed(f"{block}.select_recompute", "false: no layer is made again")
    swap = "swap_config.swap"
    if run.flag(swap) and layers:
        run.put("memory.offload_activations", "cpu", swap)
    elif run.flag(swap):
        run.changed(swap, "left out: only checkpointed layers are offloaded here")
    elif run.written(swap):
        run.put("memory.offload_activations", "none", swap)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _outputs(run: Conversion) -> None:
    """Write where the run goes on from, and what it logs."""
    resume = run.value("resume_training", False)
    if isinstance(resume, str):
        what = f"is {resume}, a checkpoint of MindSpore's"
        run.refuse("resume_training", what, "write true, or name weights in load_checkpoint")
    elif run.written("resume_training"):
        ours = "auto" if resume else "never"
        run.put("checkpoint.resume", ours, "resume_training")
    if run.flag("do_eval"):
        if "data.eval" in run.given or "data.eval_fraction" in run.given:
            every = run.whole("eval_step_interval", default=100)
            run.put("training.eval_every_steps", every, "do_eval", "eval_step_interval")
        else:
            what = "is true, and their evaluation data is not read"
            run.refuse("do_eval", what, "add data.eval=FILE, or write false")
    elif run.written("do_eval"):
        run.changed("do_eval", "false: nothing is evaluated")
    board = next((key for key in run.theirs.values if key.startswith("tensorboard.")), None)
    if board:
        run.put("logging.tensorboard", True, board)
