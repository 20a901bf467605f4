"""The arguments of transformers' Trainer as a recipe: what axolotl, LLaMA-Factory, ms-swift and TRL
have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from uspft.config.algorithms import CONTEXT
from uspft.convert.conversion import NOTHING, Conversion, is_whole, short

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch_fused",
    "warmup_ratio": 0.0,
    "max_grad_norm": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "gradient_checkpointing": False,
    "save_strategy": "steps",
    "save_steps": 500,
    "logging_steps": 500,
    "report_to": (),
}
"""The Trainer's defaults in transformers 5."""
SMALLER = ("8bit", "4bit", "fp8", "apex", "anyprecision")
"""Parts of the names of AdamW variants whose states are not float32."""
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_restarts",
    "polynomial": "polynomial",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
KERNEL = "`model.attention: auto` takes the fastest kernel that is exact"
MINUTES = 24 * 60
"""The longest time-out of collectives to write: tools often set months, which means for ever."""

BEHIND = "a line break that it writes behind an answer, as chatml's, trains there and not here"
"""The remark on templates of tools that train what stands behind the end of an answer."""
WHOLE = "there is no adapter: all weights train"
SHIPPED = ("chatml", "llama3", "gemma")
"""The templates of data/templates, by their names in axolotl and LLaMA-Factory."""


def global_batch(
    run: Conversion,
    split: int,
    world: int | None,
    ranks: int | None,
    accumulation: int | None = None,
) -> int:
    """Convert the batch, and return the rows per optimizer step by the tool's formula.

    split: how many devices share a row. world: the number of devices in the file. ranks: the number
    here, used where the file has none. accumulation: the default of its key; None: one.
    """
    micro_key, steps_key = run.key("per_device_train_batch_size"), "gradient_accumulation_steps"
    micro, steps = run.whole(micro_key), run.whole(steps_key, default=accumulation)
    devices, ours = world or ranks, "training.global_batch_size"
    given = run.given.get(ours)
    if devices is None:
        batch = given if is_whole(given) else micro * steps
        if ours not in run.given:
            what = "counts rows of one device, and the file does not say how many there are"
            run.refuse(micro_key, what, f"add --ranks N, or {ours}=N")
    else:
        replicas, left = divmod(devices, split)
        if left or not replicas:
            what = f"{split} devices share a row, which does not divide {devices}"
            run.refuse(micro_key, what, f"add --ranks {split * max(replicas, 1)}")
        batch = micro * steps * max(replicas, 1)
        if world and ranks and world != ranks:
            what = f"{world} devices there, {ranks} ranks here; the batch stays"
            run.changed(steps_key, what)
    run.put("training.micro_batch_size", micro, micro_key)
    count = f" {devices // split}" if devices and devices % split == 0 else ""
    why = f"{micro_key} {micro} × {steps_key} {steps} × replicas{count}"
    run.put(ours, batch, micro_key if batch == micro else steps_key, why=why)
    return batch


def context(run: Conversion, key: str, degree: int, megatron: str, *keys: str | None) -> None:
    """Write how many ranks share a row, and the algorithm with this name of Megatron's."""
    if degree > 1:
        row = next(row for row in CONTEXT.values() if row.megatron == megatron)
        run.put("parallel_config.context_parallel", degree, key)
        run.put("parallel_config.context_parallel_algo", row.name, *keys)
        return
    run.idle("rows are whole: one device has all of a row", key, *keys)


def updates(run: Conversion, warm_up: Callable[[Conversion], None] | None = None) -> None:
    """Convert the length of the run, its optimizer, and its schedule. warm_up: as in `schedule`."""
    length(run)
    optimizer(run)
    schedule(run, warm_up)


def length(run: Conversion) -> None:
    """Convert the length of the run."""
    steps_key, epochs_key = "max_steps", run.key("num_train_epochs")
    steps = run.whole(steps_key, default=-1)
    if any(run.settled(f"training.{name}", steps_key, epochs_key) for name in ("steps", "epochs")):
        return
    if steps > 0:
        run.put("training.steps", steps, steps_key)
        run.told(f"{steps_key} wins, as there", epochs_key)
        return
    run.idle(f"is {steps}: the epochs say the length", steps_key)
    epochs = run.number(epochs_key)
    say = "a step may span two epochs here; there each epoch ends with a step of its own"
    value = int(epochs) if epochs.is_integer() else epochs
    run.put("training.epochs", value, epochs_key, say=say if epochs > 1 else "")


def optimizer(run: Conversion) -> None:
    """Convert AdamW's settings, and gradient clipping."""
    key = run.key("optim")
    kind = str(run.value(key, run.defaults[key])).lower()
    if "adamw" not in kind or kind == "adamw_mini":
        run.refuse(key, f"is {kind}, and AdamW is the only one here", "write adamw_torch")
    else:
        smaller = any(part in kind for part in SMALLER)
        states = "its states are float32 here, 8 bytes a parameter" if smaller else ""
        run.put("optimizer.type", "adamw", key, say=states)
    for name in ("learning_rate", "weight_decay"):
        run.put(f"optimizer.{name}", run.number(name), name)
    betas = ("adam_beta1", "adam_beta2")
    run.put("optimizer.betas", [run.number(name) for name in betas], *betas)
    run.put("optimizer.eps", run.number("adam_epsilon"), "adam_epsilon")
    norm = run.number("max_grad_norm")
    run.put("training.max_grad_norm", norm if norm > 0 else None, "max_grad_norm")


def schedule(run: Conversion, warm_up: Callable[[Conversion], None] | None = None) -> None:
    """Convert the learning rate schedule; the Trainer's starts at rate 0, one step before ours.

    warm_up: a function that converts the warm-up; None: as the Trainer counts it.
    """
    key = run.key("lr_scheduler_type")
    kind = str(run.value(key, run.defaults[key]))
    kind = kind.removeprefix("SchedulerType.").lower()
    if kind not in SCHEDULES:
        what = f"is {short(kind)}, which has no like here"
        run.refuse(key, what, f"write one of {', '.join(SCHEDULES)}")
        return
    run.put("lr_schedule.type", SCHEDULES[kind], key, say="our step i has the rate of theirs i + 1")
    _shape(run, kind)
    if kind == "constant":
        for name in ("warmup_ratio", "warmup_steps"):
            if run.value(name):
                run.changed(name, "constant has no warm-up there, and none here")
        run.put("lr_schedule.warmup_steps", 0)
        return
    (warm_up or warmup)(run)


def _shape(run: Conversion, kind: str) -> None:
    """Convert the scheduler's own arguments."""
    block = "lr_scheduler_kwargs"
    written = {key: f"{block}.{key}" for key in run.theirs.block(block)}
    peak = run.outcome.values["optimizer.learning_rate"]
    if kind == "polynomial":
        end = run.number(f"{block}.lr_end", default=1e-7)
        run.put("lr_schedule.min_learning_rate", end, f"{block}.lr_end")
        if "power" in written:
            power = run.number(written.pop("power"), default=1.0)
            run.put("lr_schedule.power", power, f"{block}.power")
        written.pop("lr_end", None)
    if kind == "cosine_with_restarts" and "num_cycles" in written:
        key = written.pop("num_cycles")
        run.put("lr_schedule.cycles", run.whole(key), key)
    if kind == "cosine_with_min_lr":
        share, least = f"{block}.min_lr_rate", f"{block}.min_lr"
        if run.written(share):
            run.put("lr_schedule.min_learning_rate", of_peak(peak, run, share), share)
        else:
            run.put("lr_schedule.min_learning_rate", run.number(least, default=0.0), least)
        written.pop("min_lr_rate", None), written.pop("min_lr", None)
    if kind == "warmup_stable_decay":
        _stable(run, block, peak, written)
    half = written.get("num_cycles")
    if half and kind in ("cosine", "cosine_with_min_lr") and run.value(half) == 0.5:
        run.ignored(written.pop("num_cycles"), "half a cycle: the cosine falls once, as here")
    for name, key in written.items():
        if run.value(key) is not None:
            run.wrong(key, "leave it out", f", and {kind} here has no {name}")


def of_peak(peak: float, run: Conversion, key: str) -> float:
    """Return the share of the peak rate that a key gives, rounded to 12 digits."""
    return float(f"{peak * run.number(key, default=0.0):.12g}")


def _stable(run: Conversion, block: str, peak: float, written: dict[str, str]) -> None:
    """Convert a rate that is constant and then falls linearly."""
    for name, default in (("decay_type", "cosine"), ("warmup_type", "linear")):
        key = written.pop(name, f"{block}.{name}")
        if run.choice(key, ("linear",), default, why=", and the rate moves along a line here"):
            run.idle("the rate moves along a line", key)
    share = f"{block}.min_lr_ratio"
    run.put("lr_schedule.min_learning_rate", of_peak(peak, run, share), share)
    if run.value(share):
        run.changed(share, "the warm-up begins at rate 0 here, at the least rate there")
    total = run.outcome.values.get("training.steps") or run.given.get("training.steps")
    falls, stays = written.pop("num_decay_steps", None), written.get("num_stable_steps")
    if falls and isinstance(total, int) and not stays:
        share_of_all = round(run.whole(falls) / total, 6)
        run.put("lr_schedule.decay_ratio", share_of_all, falls)
    else:
        what = "counts steps, and here the fall is a share of all steps"
        remedy = "add lr_schedule.decay_ratio=0.1 and training.steps=N"
        if not run.settled("lr_schedule.decay_ratio", falls):
            run.refuse(falls or f"{block}.num_decay_steps", what, remedy)
    written.pop("min_lr_ratio", None)


def warmup(run: Conversion) -> None:
    """Convert the warm-up: steps if given, else a share of all steps, rounded up as here."""
    steps = run.number("warmup_steps", default=0.0)
    if steps >= 1:
        run.put("lr_schedule.warmup_steps", int(steps), "warmup_steps")
        run.told("warmup_steps wins, as there", "warmup_ratio")
        return
    share = steps or run.number("warmup_ratio")
    run.put("lr_schedule.warmup_ratio", share, "warmup_ratio", "warmup_steps")


def precision(run: Conversion, half: str = "bf16", default: str = "float32") -> None:
    """Convert the compute dtype. default: if no argument sets it."""
    if "model.dtype" in run.given:
        return
    asks = run.value(half)
    if run.value("fp16") is True or run.value("float16") is True:
        key = "fp16" if run.value("fp16") is True else "float16"
        remedy = "add model.dtype=bfloat16, which has its range and needs no scaling"
        run.refuse(key, "asks for float16", remedy)
    elif asks in (True, "auto", "full"):
        run.put("model.dtype", "bfloat16", half, say="master weights and Adam are float32")
    else:
        run.put("model.dtype", "float32" if asks is False else default, half)
    for key in ("fp16", "float16"):
        if run.value(key) is False:
            run.ignored(key, NOTHING)


def checkpointing(run: Conversion, *keys: str) -> None:
    """Convert activation checkpointing."""
    names = ("gradient_checkpointing", *keys)
    asks = any(run.value(name) for name in names)
    asks = asks if run.written(*names) else run.defaults[names[0]]
    run.put("memory.gradient_checkpointing", asks, *names)
    if run.value("activation_offloading") and asks:
        run.put("memory.offload_activations", "cpu", "activation_offloading")
    elif run.value("activation_offloading"):
        what = "left out: only layers that are computed again are offloaded here"
        run.changed("activation_offloading", what)
    else:
        run.idle(NOTHING, "activation_offloading")


def outputs(run: Conversion) -> None:
    """Convert checkpoints, evaluations and logging."""
    saving(run)
    evaluating(run)
    logs(run)


def saving(run: Conversion, *, steps_win: bool = False) -> None:
    """Convert when checkpoints are saved, and which one is resumed.

    steps_win: whether a number of steps counts whatever the strategy is.
    """
    strategy, every = "save_strategy", "save_steps"
    kind = run.value(strategy, run.defaults[strategy])
    if steps_win and run.value(every):
        kind = "steps"
    if kind == "steps":
        _steps(run, SAVES, every, run.defaults[every])
        run.idle("checkpoints come every so many steps", strategy)
    elif kind == "epoch":
        interval(run, f"{SAVES}_epochs", 1, strategy)
    elif kind in ("no", False, "best"):
        interval(run, f"{SAVES}_steps", None, strategy)
        if kind == "best":
            run.put("checkpoint.keep_best", True, strategy)
    else:
        run.refuse(strategy, f"is {short(kind)}", "write steps, epoch, best or no")
    if kind != "steps":
        run.told(f"{strategy} is {short(kind)}", every)
    limit = "save_total_limit"
    if not run.written(limit) or run.value(limit) in (0, -1):
        run.put("checkpoint.keep_last", None, limit, why=f"{limit}: all are kept where it is null")
    resume = run.value("resume_from_checkpoint")
    if resume is True or resume == "auto":
        run.put("checkpoint.resume", "auto", "resume_from_checkpoint")
    elif resume not in (None, False):
        remedy = "write null, and name the weights to start from as the model"
        run.wrong("resume_from_checkpoint", remedy, ", a checkpoint of theirs")
    elif resume is False:
        run.ignored("resume_from_checkpoint", NOTHING)


MEAN = "an evaluation's loss is the mean over its tokens here, over its batches there"
SAVES, EVALUATIONS = "checkpoint.every", "training.eval_every"
"""The starts of our keys for intervals, which end in `_steps` or `_epochs`."""


def interval(run: Conversion, ours: str, value: float | None, *keys: str | None) -> None:
    """Write the interval of checkpoints or evaluations, unless the command line sets one, in place
    of any that was written before."""
    start = ours.rpartition("_")[0]
    both = f"{start}_steps", f"{start}_epochs"
    if not any(run.settled(one, *keys) for one in both):
        for one in both:
            run.outcome.values.pop(one, None)
        run.put(ours, value, *keys)


def _steps(run: Conversion, start: str, key: str, default: Any) -> None:
    """Convert an interval in steps, or below 1 in shares of all steps."""
    found = run.number(key, default=float(default or 0))
    if found > 0:
        interval(run, f"{start}_steps", int(found) if found >= 1 else found, key)
    elif run.written(key):
        strategy = "save_strategy" if start == SAVES else "eval_strategy"
        run.wrong(key, f"write a number above 0, or {strategy}: no")


def evaluates(run: Conversion) -> bool:
    """Tell whether there are samples to evaluate on."""
    return bool({"data.eval", "data.eval_fraction"} & {*run.outcome.values, *run.given})


def evaluating(run: Conversion, *, like_saves: bool = False) -> None:
    """Convert when evaluations run, if there are samples for them.

    like_saves: whether the tool evaluates whenever it saves where no other interval is set.
    """
    strategy, every = run.written("eval_strategy", "evaluation_strategy"), "eval_steps"
    beside = "save_steps" if like_saves else "logging_steps"
    if strategy is None and like_saves:
        strategy = "save_strategy"
    kind = run.value(strategy, run.defaults.get(strategy)) if strategy else None
    if not evaluates(run):
        keys = (strategy, every, run.key("per_device_eval_batch_size"))
        run.idle("there is nothing to evaluate on", *keys)
        return
    if kind == "epoch":
        interval(run, f"{EVALUATIONS}_epochs", 1, strategy)
        run.told(MEAN, strategy)
    elif kind in ("no", False):
        run.told("left out: the end of a run evaluates anyway", strategy)
    else:
        _steps(run, EVALUATIONS, every, run.number(beside) if kind == "steps" else 0)
        run.told(f"evaluations come every so many steps; {MEAN}", strategy)
        return
    run.told(f"{strategy} is {short(kind)}", every)


def logs(run: Conversion) -> None:
    """Convert the trackers, the time-out of collectives, and the device."""
    asked = run.value("report_to", run.defaults["report_to"])
    names = [str(one).lower() for one in (asked if isinstance(asked, list | tuple) else [asked])]
    known = {"tensorboard": True, "wandb": {}, "mlflow": {}}
    for name in names:
        if name in known:
            run.put(f"logging.{name}", known[name], "report_to")
        elif name not in ("none", "no"):
            what = f"{short(name)} is left out: metrics.jsonl has every number"
            run.changed("report_to", what)
    if run.written("report_to") and set(names) <= {"none", "no"}:
        run.ignored("report_to", "metrics.jsonl has every number")
    if run.written("run_name") and "logging.wandb" in run.outcome.values:
        run.put("logging.wandb", {"name": run.value("run_name")}, "run_name")
    elif run.written("run_name"):
        run.ignored("run_name", "the run is called by its `output_dir`")
    if run.written("ddp_timeout"):
        minutes = min(run.number("ddp_timeout", default=1800.0) / 60, MINUTES)
        run.put("launch.timeout_minutes", max(minutes, 1.0), "ddp_timeout", say="in minutes")
    device(run, "use_cpu", "no_cuda")


def device(run: Conversion, *keys: str) -> None:
    """Write device: cpu where the first of these keys that is set asks for it."""
    if run.flag(*keys):
        run.put("launch.device", "cpu", run.written(*keys))
    else:
        run.idle(NOTHING, run.written(*keys))


def held_out(run: Conversion, key: str, *, whole: bool = True, beside: bool = False) -> None:
    """Convert the share of the samples that is evaluated on.

    whole: whether a number from 1 on counts samples, which is refused. beside: whether the tool
    allows it together with evaluation data, instead of ignoring it.
    """
    ours = "data.eval_fraction"
    share = run.number(key, default=0.0)
    if whole and share >= 1 and ours not in run.given:
        run.refuse(key, f"is {short(share)} samples", f"add {ours}=0.01, a share")
    elif share > 0 and (beside or "data.eval" not in run.outcome.values):
        run.put(ours, share, key)
    else:
        run.idle("nothing is kept apart", key)


def weighted(
    run: Conversion, sources: list[dict[str, Any]], weights: list[Any], *keys: str
) -> None:
    """Convert how often each source is taken. keys: the tool's keys for it."""
    for source, weight in zip(sources, weights, strict=True):
        source["weight"] = weight
    run.told("here each source's weight: shares of tokens here, of samples there", *keys)


def scaled(run: Conversion, block: Mapping[str, Any], *keys: str) -> None:
    """Convert the scaling of positions in a block."""
    found = {("rope_type" if key == "type" else key): value for key, value in block.items()}
    run.put("model.rope_scaling", found, *keys)


def listed(run: Conversion, item: str, more: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a source for each file that an item of the tool's data names; none if it names none.

    more: keys of each source besides its path and the item's name and split.
    """
    here, at_path, at_files = "here in `data.train`:", f"{item}.path", f"{item}.data_files"
    path, files = run.value(at_path), run.value(at_files)
    for name in ("name", "split"):
        if told := run.value(f"{item}.{name}"):
            more = {**more, name: str(told)}
            run.changed(f"{item}.{name}", f"{here} {name}")
    names = files if isinstance(files, list) else [files or path]
    if run.written(at_files) and path:
        local = run.theirs.place(str(path)) or path in ("json", "csv", "parquet")
        what = "its files, from where the command runs" if local else "files of that data set"
        run.changed(at_path, f"{here} {what}")
        if not local:
            names = [path]
            remedy = "download them, and add data.train=FILE"
            run.refuse(at_files, "names files of a data set on the hub", remedy)
    elif path:
        run.changed(at_path, f"{here} path")
    if not all(isinstance(name, str) and name for name in names):
        run.refuse(at_path, "names no samples", "write a path, or add data.train=FILE")
        return []
    run.told(f"{here} path", at_files)
    return [{"path": name, **more} for name in names]


def adapter(run: Conversion, targets: str, *, default: Any = None) -> None:
    """Convert the projections that LoRA adapts; a word for all linear ones becomes null.

    targets: the tool's key. default: its default.
    """
    found = run.value(targets, default)
    if isinstance(found, str):
        found = [part.strip() for part in found.split(",") if part.strip()]
    everything = found in (["all"], ["all-linear"], ["all_linear"])
    run.put("model.adapter.target_modules", None if everything else found, targets)


def adapter_defaults(run: Conversion, *rows: tuple[str, str, float]) -> None:
    """Write the tool's defaults for omitted keys of an adapter. rows: our key, the tool's key, and
    its default."""
    for name, key, default in rows:
        if not run.written(key):
            run.outcome.values[f"model.adapter.{name}"] = default


def named_adapter(run: Conversion, targets: str, every: str) -> None:
    """Convert the projections that LoRA adapts, which the tool requires. every: the word for all of
    them."""
    if run.written(targets):
        adapter(run, targets)
    elif "model.adapter.target_modules" not in run.given:
        what = "is missing, and which projections are adapted there depends on the model"
        run.refuse(targets, what, f"add model.adapter.target_modules=[q_proj, v_proj], or {every}")


def whole_weights(run: Conversion) -> None:
    """Report that weights are not quantised."""
    for key in ("load_in_4bit", "load_in_8bit"):
        if run.value(key):
            run.changed(key, "left out: weights are not quantised")
        else:
            run.idle(NOTHING, key)


def model_named(run: Conversion, key: str) -> None:
    """Refuse a configuration without a model, unless the command line names one."""
    if not run.written(key) and not {"model.name_or_path", "model.config"} & set(run.given):
        run.refuse(key, "is missing", "add model.name_or_path=FOLDER")


def packing(run: Conversion, packs: bool, *keys: str, more: str = "") -> None:
    """Convert packing. more: a further remark."""
    say = f"documents of a row never see one another{more}" if packs else "each sample is a row"
    run.put("data.packing", "best_fit" if packs else "none", *keys, say=say)


def order(run: Conversion) -> None:
    """Convert the order of the samples."""
    key = "train_sampling_strategy"
    if run.value(key) == "sequential":
        run.put("data.shuffle", False, key)
    else:
        run.idle("an order is drawn from seed", key)


def chat_template(run: Conversion, name_key: str | None, file_key: str | None) -> None:
    """Convert the chat template, given by name or as a Jinja file; the tokenizer's own is null."""
    ours = "data.chat_template"
    if file_key:
        text = str(run.value(file_key))
        if "{" in text or "\n" in text:
            what = "is a template itself, and a recipe names a file"
            run.refuse(file_key, what, "save it, and add data.chat_template=FILE")
        else:
            run.put(ours, text, file_key)
        if name_key:
            run.ignored(name_key, "the file says it")
        return
    if name_key is None or run.settled(ours, name_key):
        return
    name = str(run.value(name_key))
    if name.startswith("tokenizer_default"):
        run.put(ours, None, name_key, say="the tokenizer's own")
    elif name in SHIPPED:
        below = Path("data", "templates", f"{name}.jinja")
        # an absolute path where the template is not below the working directory
        whole = Path(__file__).parents[2] / below
        run.put(ours, str(below if below.exists() or not whole.exists() else whole), name_key)
    else:
        what = f"the text of {short(name)} is not here; null is the tokenizer's own"
        run.changed(name_key, f"left out: {what}")
