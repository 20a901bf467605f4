"""MindSpore Transformers' configuration as a recipe: the model, training, and what is sharded,
recomputed and offloaded.

The global batch is computed with MindSpore's formulas before the conversion, and compared with the
recipe's after it.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from uspft.convert.conversion import Conversion, in_place, is_whole, short
from uspft.convert.mindspore_data import LOADER, data, rows_of_blend
from uspft.convert.mindspore_layout import (
    CONFIG,
    TheirDegrees,
    degrees_of,
    layout,
    micro_batch,
    their_errors,
)
from uspft.convert.trainer import EVALUATIONS, interval


def convert_mindspore(run: Conversion, ranks: int | None) -> int:
    """Convert a MindSpore Transformers configuration, as CONVERTERS says."""
    degrees = degrees_of(run)
    their_errors(run, degrees)
    batch = run.whole("runner_config.batch_size") * degrees.data  # MindSpore's formula
    batch *= run.whole("micro_batch_interleave_num")
    steps = "runner_config.gradient_accumulation_steps"
    batch *= run.whole("parallel_config.micro_batch_num" if degrees.stages > 1 else steps)
    replicas = layout(run, degrees, batch, ranks)
    model(run)
    micro = micro_batch(run, batch, replicas)
    sharding(run, degrees, batch // (replicas * micro))
    _batch(run, batch, micro)
    _length(run, batch)
    _optimizer(run)
    _schedule(run)
    memory(run, degrees.stages)
    data(run)
    outputs(run)
    return batch


def _batch(run: Conversion, batch: int, micro: int) -> None:
    size, copies = "runner_config.batch_size", "micro_batch_interleave_num"
    say = "as the batch divides over these ranks" if micro != run.whole(size) else ""
    run.put("training.micro_batch_size", micro, size, say=say)
    why = "by batch_size, data_parallel and the number of micro-batches"
    run.put("training.global_batch_size", batch, why=why)
    count = "runner_config.gradient_accumulation_steps"
    run.told(f"here `training.global_batch_size: {batch}`", copies, count)
    name = "calculate_per_token_loss"
    tokens = (f"runner_wrapper.{name}", f"model.model_config.{name}")
    if not any(run.flag(key) for key in tokens if run.written(key)):
        what = "is off there, the mean over micro-batches; here the loss is per target token"
        run.changed(run.written(*tokens) or tokens[0], f"{what} of the whole batch")


# The model: its folder, or its dimensions.

DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
DIMENSIONS = {
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("hidden_size", 4096),
    "num_layers": ("num_hidden_layers", 32),
    "num_heads": ("num_attention_heads", 32),
    "rms_norm_eps": ("rms_norm_eps", 1e-5),
    "theta": ("rope_theta", 10000.0),
    "init_method_std": ("initializer_range", 0.01),
    "bos_token_id": ("bos_token_id", 1),
    "eos_token_id": ("eos_token_id", 2),
    "pad_token_id": ("pad_token_id", 0),
}
"""MindSpore's model dimensions: each one's name in Hugging Face's config, and MindSpore's
default."""
SHAPE = (
    *(*DIMENSIONS, "n_kv_heads", "intermediate_size", "multiple_of", "ffn_dim_multiplier"),
    *("max_position_embedding", "qkv_has_bias", "tie_word_embeddings"),
    "untie_embeddings_and_output_weights",
)
LLAMA = "LlamaForCausalLM"
SCALED = {"PI": "linear", "YARN": "yarn", "LLAMA3": "llama3", "DYNAMIC_NTK": "dynamic"}


def model(run: Conversion) -> None:
    """Convert the model: its folder, or its dimensions for random weights."""
    _dtype(run)
    folder = run.written("pretrained_model_dir", "load_checkpoint")
    theirs = run.value("load_ckpt_format", "safetensors") != "safetensors"
    if folder and theirs and "model.name_or_path" not in run.given:
        remedy = "add model.name_or_path=FOLDER of safetensors"
        run.refuse("load_ckpt_format", "is ckpt, MindSpore's own weights", remedy)
    names = ("pretrained_model_dir", "load_checkpoint", "load_ckpt_format")
    run.dropped("names nothing", *(key for key in names if run.value(key) is None))
    if "model.name_or_path" in run.given or "model.config" in run.given:
        _not_here(run, "the model is that of the command line")
    elif folder:
        run.put("model.name_or_path", str(run.value(folder)), folder)
        _not_here(run, f"the config.json of {run.value(folder)} rules")
        run.told("safetensors", "load_ckpt_format")
    elif run.theirs.has_block(CONFIG):
        _dimensions(run)
    else:
        run.refuse("pretrained_model_dir", "names no model", "add model.name_or_path=FOLDER")


def _dtype(run: Conversion) -> None:
    key = f"{CONFIG}.compute_dtype"
    theirs = str(run.value(key, "float16"))
    if run.settled("model.dtype", key):
        return
    if theirs in DTYPES:
        run.put("model.dtype", DTYPES[theirs], key)
    else:
        what = f"is {theirs}" if run.written(key) else "is float16 where it is left out"
        run.refuse(key, what, "add model.dtype=bfloat16, which has its range and needs no scaling")


def _not_here(run: Conversion, why: str) -> None:
    """Report why the model's dimensions are not converted."""
    names = (*SHAPE, "extend_method", "scaling_factor")
    run.dropped(why, *(f"{CONFIG}.{name}" for name in names))
    run.idle(why, "model.arch.type")


def _dimensions(run: Conversion) -> None:
    """Convert the dimensions to model.config, under Hugging Face's names."""
    why, remedy = (
        ", of which only dimensions are written",
        "add model.name_or_path=FOLDER of such a model",
    )
    if not run.choice("model.arch.type", (LLAMA,), LLAMA, why=why, remedy=remedy):
        return
    kind = "qwen2" if run.flag(f"{CONFIG}.qkv_has_bias") else "llama"
    found: dict[str, Any] = {"model_type": kind}
    for theirs, (ours, default) in DIMENSIONS.items():
        found[ours] = run.value(f"{CONFIG}.{theirs}", default)
    heads = found["num_attention_heads"]
    found["num_key_value_heads"] = run.value(f"{CONFIG}.n_kv_heads", heads)
    inner, times = f"{CONFIG}.intermediate_size", f"{CONFIG}.ffn_dim_multiplier"
    found["intermediate_size"] = intermediate_size(
        run.whole(f"{CONFIG}.hidden_size", default=4096),
        run.whole(inner) if run.written(inner) else None,
        max(1, run.whole(f"{CONFIG}.multiple_of", default=256)),
        run.number(times, default=1.0) if run.written(times) else None,
    )
    length = run.value(f"{CONFIG}.seq_length", 2048)
    found["max_position_embeddings"] = run.value(f"{CONFIG}.max_position_embedding", length)
    tied = run.flag(f"{CONFIG}.tie_word_embeddings")
    untied = run.value(f"{CONFIG}.untie_embeddings_and_output_weights")
    found["tie_word_embeddings"] = tied if untied is None else not untied
    run.put("model.config", found)
    for name in SHAPE:
        key = f"{CONFIG}.{name}"
        if key in run.theirs.values:
            run.changed(key, f"here in `model.config`, a {kind} with random weights")
    run.told(f"here `model.config.model_type: {kind}`", "model.arch.type")
    _positions(run)


def intermediate_size(
    hidden: int, written: int | None, multiple: int, multiplier: float | None
) -> int:
    """Return the MLP's intermediate size by LLaMA's formula, unless it is given.

    It is 4 · hidden · 2/3, times the multiplier, rounded up to a multiple.
    """
    if written is not None:
        return written
    size = 4 * hidden
    if multiplier is not None:
        size = int((multiplier + 0.01) * size)
    size = int(2 * size / 3)
    return multiple * ((size + multiple - 1) // multiple)


def _positions(run: Conversion) -> None:
    method, factor = f"{CONFIG}.extend_method", f"{CONFIG}.scaling_factor"
    inner = {key.rpartition(".")[2]: key for key in run.theirs.values if key.startswith(factor)}
    if not run.written(method):
        run.dropped("positions are not scaled", method, *inner.values())
        return
    theirs = run.choice(method, SCALED)
    if not theirs:
        return
    scaling: dict[str, Any] = {"rope_type": SCALED[theirs]}
    if run.written(factor):
        scaling["factor"] = run.number(factor, default=1.0)
    for name, key in inner.items():
        if key != factor:
            scaling["factor" if name == "scaling_factor" else name] = run.value(key)
    run.put("model.rope_scaling", scaling, method, *inner.values())


# Training: length, optimizer, schedule and outputs.

SCHEDULES = {
    "ConstantWarmUpLR": "constant",
    "LinearWithWarmUpLR": "linear",
    "CosineWithWarmUpLR": "cosine",
    "CosineWithRestartsAndWarmUpLR": "cosine_restarts",
    "PolynomialWithWarmUpLR": "polynomial",
    "WarmUpStableDecayLR": "wsd",
}
ADAMW = ("AdamW", "FusedAdamW", "FP32StateAdamWeightDecay")


def _length(run: Conversion, batch: int) -> None:
    """Convert the length of the run. batch: the rows per optimizer step."""
    total, epochs = run.whole("lr_schedule.total_steps", default=-1), "runner_config.epochs"
    rows = rows_of_blend(run)
    if given := {"training.steps", "training.epochs"} & set(run.given):
        for key in (epochs, "lr_schedule.total_steps", f"{LOADER}.sizes"):
            if run.written(key) and not run.spoken(key):
                run.changed(key, in_place(min(given)))
    elif total > 0:
        say = "the run ends with its schedule"
        run.put("training.steps", total, "lr_schedule.total_steps", epochs, say=say)
        if rows is not None:
            run.changed(f"{LOADER}.sizes", "total_steps says the length")
    elif rows is not None:
        steps = max(1, run.whole(epochs) * (rows // batch)) if batch > 0 else 1
        say = f"{rows} rows an epoch in steps of {batch}"
        run.put("training.steps", steps, f"{LOADER}.sizes", epochs, say=say)
        run.told("-1: the rows say the length, as there", "lr_schedule.total_steps")
    else:
        run.put("training.epochs", run.whole(epochs), epochs)
        run.told("-1: the epochs say the length, as there", "lr_schedule.total_steps")
    stop = "runner_config.stop_step"
    if run.whole(stop, default=0) > 0:
        run.put("training.stop_step", run.whole(stop), stop)
    else:
        run.told("0: the run takes all its steps", stop)
    if run.flag("train_dataset.drop_remainder", default=True):
        key = "train_dataset.drop_remainder"
        run.told("the last step of the last epoch is shorter here, not dropped", key)


def _optimizer(run: Conversion) -> None:
    if run.choice("optimizer.type", ADAMW, "AdamW"):
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
    """Convert the learning rate schedule; MindSpore's starts at rate 0, one step before ours."""
    block = "lr_schedule"
    why = ", which has no like here"
    kind = run.choice(f"{block}.type", SCHEDULES, "CosineWithWarmUpLR", why=why)
    if not kind:
        return
    ours = SCHEDULES[kind]
    run.put(f"{block}.type", ours, f"{block}.type", say="our step i has the rate of theirs i + 1")
    total = run.given.get("training.steps", run.outcome.values.get("training.steps"))
    ratio, steps = run.written(f"{block}.warmup_ratio"), run.written(f"{block}.warmup_steps")
    share = run.number(f"{block}.warmup_ratio", default=0.0)
    if ratio is not None and isinstance(total, int):
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


def outputs(run: Conversion) -> None:
    """Convert the checkpoint to resume, and logging."""
    resume = run.value("resume_training", False)
    if isinstance(resume, str):
        what = f"is {resume}, a checkpoint of MindSpore's"
        run.refuse("resume_training", what, "write true, or name weights in load_checkpoint")
    elif run.written("resume_training"):
        run.put("checkpoint.resume", "auto" if resume else "never", "resume_training")
    if run.flag("do_eval"):
        if "data.eval" in run.given or "data.eval_fraction" in run.given:
            every = run.whole("eval_step_interval", default=100)
            interval(run, f"{EVALUATIONS}_steps", every, "do_eval", "eval_step_interval")
        else:
            what = "is true, and their evaluation data is not read"
            run.refuse("do_eval", what, "add data.eval=FILE, or write false")
    else:
        run.told("false: nothing is evaluated", "do_eval")
    board = next((key for key in run.theirs.values if key.startswith("tensorboard.")), None)
    if board:
        run.put("logging.tensorboard", True, board)


# Sharding, recomputation and offloading.

OPTIMIZER = "parallel.parallel_optimizer_config"
RECOMPUTE = "recompute_config"
ZERO = "deepspeed.zero_optimization"


def sharding(run: Conversion, degrees: TheirDegrees, micro_batches: int) -> None:
    """Write the ZeRO stage that shards the same as MindSpore's optimizer parallelism.

    Without it the stage is 0, or 1 where stages, expert parallelism or several micro-batches in
    bfloat16 do not support 0; with it 1, with sharded gradient accumulation 2, and with weights
    gathered again in the backward 3. micro_batches: per optimizer step of the recipe.
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
        stage, say = 1, f"0 is not possible with {beside}; the numbers are the same"
    run.put(f"{ZERO}.stage", stage, shards, gradients, again, say=say)
    if not run.written(shards):
        here = f"is off where it is left out: here `{ZERO}.stage: {stage}`"
        run.changed(shards, f"{here}; {say}" if say else here)
    _least(run, stage)
    group = f"{OPTIMIZER}.optimizer_weight_shard_size"
    if run.whole(group) in (-1, 0):
        run.idle("all ranks, as here", group)
    else:
        what = "left out: all ranks that hold the same weights are one group, the same numbers"
        run.told(what, group)


def _least(run: Conversion, stage: int) -> None:
    """Convert the size from which parameters are sharded: MindSpore's is in KB, ours in
    elements."""
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
    """Convert which layers are recomputed, and what is offloaded."""
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
    """Return whether layers are recomputed, or how many of each stage; None where MindSpore refuses
    the value too.

    Patterns of operators count as all layers that have them.
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
            if len(rows) < len(each) or not all(
                is_whole(n) and n >= 0 for row in rows for n in row
            ):
                run.refuse(where, f"is {short(value)}", "write whole numbers")
                return None
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = bool(value)  # patterns of operators
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
    """Return the elementwise maximum over stages."""
    return [max(pair) for pair in zip_longest(one, other, fillvalue=0)]
