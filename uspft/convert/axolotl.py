"""axolotl's configuration as a recipe."""

from __future__ import annotations

from typing import Any

from uspft.convert import trainer
from uspft.convert.accelerate import sharding
from uspft.convert.conversion import NOTHING, Conversion, short

NAMES = {
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
}
"""axolotl's names for the Trainer's arguments."""
DEFAULTS = {
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1.0,
    "lr_scheduler_type": "cosine",
    "save_strategy": "epoch",
    "warmup_ratio": 0.03,
}
LORA = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear"),
    *("lora_target_parameters", "load_in_4bit", "load_in_8bit"),
)
KERNELS = (
    *("flash_attention", "attn_implementation", "xformers_attention", "flex_attention"),
    *("sdp_attention", "eager_attention", "sage_attention"),
)
OVERLONG = {"drop": "drop", "truncate": "truncate", "raise": "error"}
CHATS = ("chat_template", "chat_template.default", "sharegpt", "chatml.sharegpt")
PAIRS = ("alpaca_chat.load_qa", "alpaca_chat.load_concise", "gpteacher", "explainchoice")
MARKS = ("weight", "loss", "train", "training")
"""Our names for a turn's training mask."""


def convert_axolotl(run: Conversion, ranks: int | None) -> int:
    """Convert axolotl's configuration, as CONVERTERS says."""
    batch = _batch(run, ranks)
    trainer.updates(run, _warmup)
    _least(run)
    # axolotl's bf16 is auto by default
    off = run.value("bf16") is False or run.value("float32") is True
    half = run.value("bfloat16") or not off
    trainer.precision(run, default="bfloat16" if half else "float32")
    _model(run)
    _adapter(run)
    _rows(run)
    _data(run)
    trainer.checkpointing(run)
    if str(run.value("gradient_checkpointing")).startswith("offload"):
        run.put("memory.offload_activations", "cpu", "gradient_checkpointing")
    run.switch("tiled_mlp", "memory.mlp_tile_tokens", "auto")
    sharding(run)
    _outputs(run)
    return batch


def _batch(run: Conversion, ranks: int | None) -> int:
    """Convert the batch and context parallelism.

    The context-parallel algorithm follows from the name of axolotl's ring function, and the number
    of devices from its data parallel degrees, if they are given.
    """
    names = ("context_parallel_size", "sequence_parallel_degree")
    rows = run.whole(*names, least=1)
    split = rows * run.whole("tensor_parallel_size", least=1)
    degrees = ("dp_shard_size", "dp_replicate_size")
    world = None
    if run.written(*degrees):
        world = split
        for key in degrees:
            world *= run.whole(key, least=1)
    total, steps = run.written("batch_size"), None
    if total:
        micro = run.whole("micro_batch_size", least=1)
        steps = max(run.whole(total, least=1) // micro, 1)
    batch = trainer.global_batch(run, split, world, ranks, steps)
    run.told("here `parallel_config.data_parallel: auto`: what the ranks leave", *degrees)
    if total:
        run.changed(total, f"here `training.global_batch_size: {batch}`")
    func = str(run.value("ring_attn_func", ""))
    gathers = func == "varlen_llama3" or (not func and run.value("sample_packing") is True)
    way = "all_gather" if gathers else "p2p"
    trainer.context(run, run.written(*names) or names[0], rows, way, "ring_attn_func")
    return batch


def _warmup(run: Conversion) -> None:
    """Convert the warm-up, which axolotl counts its own way: a share is rounded down, and one step
    counts as two."""
    steps, share, block = "warmup_steps", "warmup_ratio", "lr_schedule"
    total = run.outcome.values.get("training.steps")
    if run.written(steps):
        count = run.whole(steps, least=0)
        run.put(f"{block}.warmup_steps", 2 if count == 1 else count, steps)
        run.told(f"{steps} wins, as there", share)
    elif isinstance(total, int):
        count = int(run.number(share) * total)
        count = count if run.written(share) else min(count, 100)
        run.put(f"{block}.warmup_steps", 2 if count == 1 else count, share)
    else:
        say = "rounded up here, down there"
        run.put(f"{block}.warmup_ratio", run.number(share), share, say=say)


def _least(run: Conversion) -> None:
    """Convert the final rate of a cosine schedule."""
    key = "cosine_min_lr_ratio"
    if not run.written(key):
        return
    values = run.outcome.values
    if values.get("lr_schedule.type") != "cosine":
        run.ignored(key, "it acts under cosine alone")
        return
    least = trainer.of_peak(values["optimizer.learning_rate"], run, key)
    run.put("lr_schedule.min_learning_rate", least, key)


def _model(run: Conversion) -> None:
    trainer.model_named(run, "base_model")
    run.told(f"here `model.dtype: {run.outcome.values.get('model.dtype')}`", "bfloat16", "float32")
    block = "overrides_of_model_config"
    scaling = run.theirs.block("rope_scaling") or run.theirs.block(f"{block}.rope_scaling")
    if scaling:
        start = "rope_scaling" if run.theirs.has_block("rope_scaling") else f"{block}.rope_scaling"
        trainer.scaled(run, scaling, *(f"{start}.{key}" for key in scaling))
    fields = run.theirs.block(block)
    fields = {key: value for key, value in fields.items() if not key.startswith("rope_scaling")}
    if fields:
        run.put("model.overrides", fields, *(f"{block}.{key}" for key in fields))
    run.idle(trainer.KERNEL, *KERNELS)


def _adapter(run: Conversion) -> None:
    if run.value("adapter") is None:
        run.dropped("is null: all weights train", "adapter")
        run.dropped(trainer.WHOLE, *LORA)
        return
    kind = run.choice("adapter", ("lora", "qlora"), remedy="write lora")
    if not kind:
        return
    whole = "weights are not quantised: LoRA beside whole weights" if kind == "qlora" else ""
    run.put("model.adapter.type", "lora", "adapter", say=whole)
    trainer.whole_weights(run)
    trainer.adapter_defaults(run, ("rank", "lora_r", 8), ("alpha", "lora_alpha", 8))
    if run.flag("lora_target_linear"):
        run.put("model.adapter.target_modules", None, "lora_target_linear", "lora_target_modules")
    else:
        trainer.named_adapter(run, "lora_target_modules", "lora_target_linear: true")
    if run.value("lora_target_linear") is False:
        run.ignored("lora_target_linear", NOTHING)


def _rows(run: Conversion) -> None:
    """Convert packing, and what happens to samples longer than a row."""
    if not run.written("sequence_len"):
        run.put("data.sequence_length", 512, why="sequence_len, 512 where it is left out")
    trainer.packing(run, run.flag("sample_packing"), "sample_packing")
    key = "excess_length_strategy"
    if theirs := run.choice(key, OVERLONG, "drop"):
        run.put("data.overlong", OVERLONG[theirs], key)
    inputs = run.flag("train_on_inputs")
    say = "of chats with what the template writes around turns, which does not train there"
    trained = "all" if inputs else "assistant"
    run.put("data.train_on", trained, "train_on_inputs", say=say if inputs else "")
    _order(run)
    trainer.chat_template(run, run.written("chat_template"), run.written("chat_template_jinja"))


def _order(run: Conversion) -> None:
    """Convert the order of the samples: the sampler draws one unless curriculum_sampling forbids
    it, and merged sets are shuffled beside it."""
    sampled, merged = "curriculum_sampling", "shuffle_merged_datasets"
    several = len(run.theirs.items("datasets")) > 1
    if run.flag(sampled) and not (several and run.flag(merged, default=True)):
        run.put("data.shuffle", False, sampled, merged)
    else:
        run.told("an order is drawn from seed, here anew each epoch", sampled, merged)


def _data(run: Conversion) -> None:
    """Convert the data: one source for each data set, or for each of its files."""
    for ours, lists in (
        ("data.train", ("datasets", "pretraining_dataset")),
        ("data.eval", ("test_datasets",)),
    ):
        items = [item for name in lists for item in run.theirs.items(name)]
        inside = [f"{item}.{key}" for item in items for key in run.theirs.block(item)]
        if not run.settled(ours, *inside):
            sources = [source for item in items for source in _source(run, item)]
            if sources:
                run.outcome.values[ours] = sources
        for name in lists:
            if run.written(name):
                run.refuse(name, "is no list of mappings", "write a list of {path: …, type: …}")
        if ours == "data.train" and not items and ours not in run.given:
            run.refuse("datasets", "names no samples that are read", "add data.train=FILE")
    trainer.held_out(run, "val_set_size")


def _source(run: Conversion, item: str) -> list[dict[str, Any]]:
    """Return the sources for one data set."""
    kind = run.value(f"{item}.type") or ("completion" if item.startswith("pretraining") else None)
    form = _form(run, item, kind)
    if form is None:
        return []
    source: dict[str, Any] = {"format": form}
    if fields := _fields(run, item, form, str(kind)):
        source["fields"] = fields
    return trainer.listed(run, item, source)


def _form(run: Conversion, item: str, kind: Any) -> str | None:
    """Return the format of a data set, or None where it is refused."""
    key = f"{item}.type"
    if not isinstance(kind, str | None) or run.theirs.block(key):
        return None  # a custom type, which the table refuses
    name = (kind or "input_ids").partition(":")[0]
    if name in CHATS or name.startswith("sharegpt"):
        what = "here `format: messages`"
        if not run.written("eot_tokens"):
            what += "; the token that ends an answer trains, there only if it is the EOS"
        run.changed(key, what)
        return "messages"
    if name == "alpaca":
        say = "its sentences, an answer right behind the last word, a line below it there"
        run.put("data.prompt_template", "alpaca", key, say=say)
        return "prompt_completion"
    if name in PAIRS:
        what = "instruction and answer, an empty line apart, no sentences around them"
        run.changed(key, f"here `format: prompt_completion`: {what}")
        return "prompt_completion"
    if name in ("completion", "pretrain"):
        run.told("here `format: text`", key)
        say = "longer texts are split into rows, as there"
        run.put("data.overlong", "split", "excess_length_strategy", say=say)
        if any(run.value(f"{other}.type", kind) != kind for other in run.theirs.items("datasets")):
            what = "longer samples of the others are split too, dropped there"
            run.changed(key, f"here `data.overlong: split`: {what}")
        return "text"
    if kind is None:
        run.changed(key, "here `format: tokenized`")
        return "tokenized"
    remedy = "add data.train=FILE of messages, or prompt and completion"
    run.wrong(key, remedy, ", whose prompts are not made here")
    return None


def _fields(run: Conversion, item: str, form: str, kind: str) -> dict[str, Any]:
    """Return data.fields for a data set."""
    found: dict[str, Any] = {}
    of_turns = form == "messages"
    shares = of_turns and kind.startswith(("sharegpt", "chatml.sharegpt"))
    for ours, *names in (
        ("messages", "field_messages"),
        ("tools", "field_tools"),
        ("system", "field_system"),
        ("text", "field", "text_column"),
        ("role", "message_property_mappings.role", "message_field_role"),
        ("content", "message_property_mappings.content", "message_field_content"),
    ):
        key = run.written(*(f"{item}.{name}" for name in names))
        if key is None:
            continue
        value = run.value(key)
        run.changed(key, f"here in `data.train`: fields: {{{ours}: {short(value)}}}")
        if value != ours:
            found[ours] = value
    if shares:
        found.setdefault("messages", "conversations")
    mark = f"{item}.message_field_training"
    if run.value(mark, MARKS[0]) not in MARKS:
        run.wrong(mark, f"call it {', '.join(MARKS[:-1])} or {MARKS[-1]} in the records")
    else:
        run.idle("a turn's own mark is read", mark)
    trained = f"{item}.roles_to_train"
    if run.value(trained, ["gpt"]) not in (["assistant"], ["gpt"]):
        remedy = "write [assistant], or train_on_inputs: true"
        run.wrong(trained, remedy, ", and only answers train")
    else:
        run.idle("answers train", trained)
    roles = {}
    for target, sources in run.theirs.block(f"{item}.roles").items():
        for name in sources if isinstance(sources, list) else [sources]:
            if name != target:
                roles[str(name)] = target
        run.changed(f"{item}.roles.{target}", "here in `data.train`: fields: {roles: …}")
    if roles:
        found["roles"] = roles
    trainer.chat_template(run, run.written(f"{item}.chat_template"), None)
    trainer.chat_template(run, None, run.written(f"{item}.chat_template_jinja"))
    return found


def _outputs(run: Conversion) -> None:
    """Convert checkpoints, evaluations and logging."""
    trainer.saving(run, steps_win=True)
    if not run.written("save_total_limit"):
        run.put("checkpoint.keep_last", 4, why="save_total_limit, 4 where it is left out")
    trainer.evaluating(run)
    for key, start in (
        ("saves_per_epoch", trainer.SAVES),
        ("evals_per_epoch", trainer.EVALUATIONS),
    ):
        times = run.number(key, default=0.0)
        if start == trainer.EVALUATIONS and not trainer.evaluates(run):
            run.idle("there is nothing to evaluate on", key)
        elif times > 0:
            trainer.interval(run, f"{start}_epochs", 1 if times == 1 else 1 / times, key)
        else:
            run.idle(NOTHING, key)
    resume = "auto_resume_from_checkpoints"
    if run.written(resume):
        run.put("checkpoint.resume", "auto" if run.value(resume) is True else "never", resume)
    trainer.logs(run)
    for name, parts in (
        ("wandb", ("project", "name", "entity", "run_id", "mode")),
        ("mlflow", ("tracking_uri", "experiment_name", "run_name")),
    ):
        keys = {part: f"{name}_{part}" for part in parts if run.written(f"{name}_{part}")}
        asked = run.value(f"use_{name}", "project" in keys or "tracking_uri" in keys)
        if asked:
            called = {"run_id": "id", "experiment_name": "experiment", "run_name": "name"}
            found = {called.get(part, part): run.value(key) for part, key in keys.items()}
            run.put(f"logging.{name}", found, f"use_{name}", *keys.values())
            continue
        run.idle(f"{name} is not asked for", f"use_{name}", *keys.values())
    if run.written("plugins"):
        names = run.value("plugins")
        for name in names if isinstance(names, list) else [names]:
            kernels = any(part in str(name) for part in ("liger", "cut_cross_entropy"))
            what = "changes no number" if kernels else "not taken: nothing like it is known here"
            say = run.ignored if kernels else run.changed
            say("plugins", f"{short(name)}: {what}")
