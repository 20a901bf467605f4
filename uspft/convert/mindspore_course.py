"""The course of a run of MindSpore Transformers: its length, optimizer, schedule and outputs."""

from __future__ import annotations

from uspft.convert.conversion import Conversion
from uspft.convert.mindspore_data import LOADER, rows_of_blend

SCHEDULES = {
    "ConstantWarmUpLR": "constant",
    "LinearWithWarmUpLR": "linear",
    "CosineWithWarmUpLR": "cosine",
    "CosineWithRestartsAndWarmUpLR": "cosine_restarts",
    "PolynomialWithWarmUpLR": "polynomial",
    "WarmUpStableDecayLR": "wsd",
}
ADAMW = ("AdamW", "FusedAdamW", "FP32StateAdamWeightDecay")


def course(run: Conversion, batch: int) -> None:
    """Write how long the run is, and by what it learns. batch: the rows of an update."""
    _length(run, batch)
    _optimizer(run)
    _schedule(run)


def _length(run: Conversion, batch: int) -> None:
    """Write how long the run is. batch: the rows of one update."""
    total, epochs = run.whole("lr_schedule.total_steps", default=-1), "runner_config.epochs"
    rows = rows_of_blend(run)
    if given := {"training.steps", "training.epochs"} & set(run.given):
        for key in (epochs, "lr_schedule.total_steps", f"{LOADER}.sizes"):
            if run.written(key) and not run.spoken(key):
                run.changed(key, f"`{min(given)}` of the command line stands in its place")
    elif total > 0:
        say = "the run ends with its schedule"
        run.put("training.steps", total, "lr_schedule.total_steps", epochs, say=say)
        if rows is not None:
            run.changed(f"{LOADER}.sizes", "total_steps says the length")
    elif rows is not None:
        steps = max(1, run.whole(epochs) * (rows // batch)) if batch > 0 else 1
        say = f"{rows} rows an epoch in steps of {batch}"
        run.put("training.steps", steps, f"{LOADER}.sizes", epochs, say=say)
        if run.written("lr_schedule.total_steps"):
            run.changed("lr_schedule.total_steps", "-1: the rows say the length, as there")
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
