"""ms-swift's arguments, in YAML or JSON, as a recipe."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from uspft.config.algorithms import AUTO
from uspft.convert import trainer
from uspft.convert.accelerate import sharding
from uspft.convert.conversion import Conversion, is_whole, short
from uspft.convert.routers import routers

DEFAULTS = {
    "per_device_train_batch_size": 1,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "gradient_checkpointing": True,
    "report_to": "tensorboard",
}
TUNERS = ("tuner_type", "train_type", "sft_type")
LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_dtype", "target_modules", "quant_bits")
OVERLONG = {"delete": "drop", "right": "truncate", "split": "split"}
LOSSES = {"default": "assistant", "last_round": "last", "all": "all"}
COLUMNS = {"query": "prompt", "response": "completion"}
"""ms-swift's fields of pairs, and ours."""
LEAST = 16
"""The least rows in a step when gradient accumulation is not given."""


def convert_swift(run: Conversion, ranks: int | None) -> int:
    """Convert ms-swift's arguments, as CONVERTERS says."""
    tuner = run.written(*TUNERS)
    full = tuner is not None and run.value(tuner) == "full"
    run.defaults["learning_rate"] = 1e-5 if full else 1e-4
    batch = _batch(run, ranks)
    trainer.updates(run)
    _type(run)
    _model(run)
    routers(run, "router_aux_loss_coef", "model", 0.0)
    _adapter(run, tuner, full=full)
    _rows(run)
    _data(run)
    trainer.checkpointing(run)
    sharding(run)
    trainer.saving(run)
    trainer.evaluating(run, like_saves=True)
    trainer.logs(run)
    return batch


def _type(run: Conversion) -> None:
    """Convert the type of the weights there, from which that of computing follows."""
    key, half = "torch_dtype", run.value("bf16") is True
    if not run.written(key) or run.value("fp16") is True:
        trainer.precision(run, default="bfloat16")
        run.told(f"here `model.dtype: {run.outcome.values.get('model.dtype')}`", key)
        return
    say = ""
    if run.value(key) == "bfloat16":
        say = "weights and their updates are float32 here, bfloat16 there"
    elif run.value(key) == "float32" and not half and run.value("fp16") is None:
        say = "computed so here, in float16 there unless fp16 is false"
    run.put("model.dtype", "bfloat16" if half else run.value(key), key, "bf16", "fp16", say=say)


def _batch(run: Conversion, ranks: int | None) -> int:
    """Convert the batch, and how many ranks share a row; without an accumulation a step has LEAST
    rows, as in ms-swift."""
    degree = run.whole("sequence_parallel_size", least=1)
    split = degree * run.whole("deepspeed_autotp_size", least=1)
    key = run.written("nproc_per_node", "ENV.NPROC_PER_NODE")
    world = None
    if key:
        found = run.value(key)
        found = int(found) if isinstance(found, str) and found.isdigit() else found
        if is_whole(found) and found > 0:
            world = found
            run.changed(key, f"here in the batch: {found} devices")
        else:
            run.refuse(key, f"is {short(found)}, no whole number", "write a whole number")
    micro = run.whole("per_device_train_batch_size", least=1)
    steps = max(1, math.ceil(LEAST / micro / (world or ranks or 1)))
    batch = trainer.global_batch(run, split, world, ranks, steps)
    key, block = "sequence_parallel_size", "parallel_config"
    if degree > 1:
        say = "heads as far as they divide there, and a ring; the numbers are the same"
        run.put(f"{block}.context_parallel", degree, key, say=say)
        run.put(f"{block}.context_parallel_algo", AUTO)
    else:
        run.idle("rows are whole: one device has all of a row", key)
    return batch


def _model(run: Conversion) -> None:
    if run.written("model"):
        run.put("model.name_or_path", str(run.value("model")), "model")
    trainer.model_named(run, "model")
    block, text = run.theirs.block("rope_scaling"), run.value("rope_scaling")
    if isinstance(text, str) and text.startswith("{"):
        block = _json(run, "rope_scaling")
    if block:
        trainer.scaled(run, block, "rope_scaling", *(f"rope_scaling.{key}" for key in block))
    elif text is not None:
        say = "with the factor that the rows need"
        run.put("model.rope_scaling", {"rope_type": text}, "rope_scaling", say=say)
    run.idle(trainer.KERNEL, "attn_impl")
    frozen = run.value("freeze_parameters")
    if frozen:
        names = frozen if isinstance(frozen, list) else [frozen]
        run.put("model.freeze", [f"^{re.escape(str(n))}" for n in names], "freeze_parameters")


def _json(run: Conversion, key: str) -> dict[str, Any]:
    """Return the mapping in a JSON text; anything else is refused."""
    try:
        found = json.loads(str(run.value(key)))
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    run.wrong(key, "write a mapping", ", no mapping")
    return {}


def _adapter(run: Conversion, tuner: str | None, *, full: bool) -> None:
    if full:
        run.changed(str(tuner), "all weights train")
        run.dropped(trainer.WHOLE, *LORA)
        return
    if tuner and not run.choice(tuner, ("lora",), remedy="write full or lora"):
        return
    run.put("model.adapter.type", "lora", tuner)
    defaults = (("rank", 8), ("alpha", 32), ("dropout", 0.05))
    trainer.adapter_defaults(run, *((name, f"lora_{name}", one) for name, one in defaults))
    trainer.adapter(run, "target_modules", default="all-linear")
    run.told("left out: weights are not quantised", "quant_bits")


def _rows(run: Conversion) -> None:
    """Convert packing, what happens to samples longer than a row, and which tokens train."""
    if run.written("packing_length"):
        run.put("data.sequence_length", run.whole("packing_length"), "packing_length", "max_length")
    elif not run.written("max_length") and "data.sequence_length" not in run.given:
        what = "is missing, and is the model's longest there"
        run.refuse("max_length", what, "add data.sequence_length=N")
    trainer.packing(run, run.flag("packing"), "packing", "padding_free")
    key = "truncation_strategy"
    if cut := run.choice(key, OVERLONG, "delete", why=", and samples are cut at their end here"):
        run.put("data.overlong", OVERLONG[cut], key)
    why = ", and a token trains or does not here"
    if loss := run.choice("loss_scale", LOSSES, "default", why=why):
        run.put("data.train_on", LOSSES[loss], "loss_scale")
    shuffles = ("dataset_shuffle", "train_dataloader_shuffle")
    if run.written(*shuffles):
        run.put("data.shuffle", all(run.flag(k, default=True) for k in shuffles), *shuffles)
    run.put("data.on_bad_sample", "error" if run.flag("strict") else "skip", "strict")
    trainer.chat_template(run, run.written("template"), None)
    if run.flag("use_chat_template", default=True):
        run.changed("template", trainer.BEHIND)


def _data(run: Conversion) -> None:
    """Convert the data."""
    for ours, key in (("data.train", "dataset"), ("data.eval", "val_dataset")):
        if not run.written(key) or run.value(key) == []:
            continue
        names = run.value(key)
        names = names if isinstance(names, list) else str(names).split()
        found = [_source(run, str(name)) for name in names]
        run.put(ours, found, key, say="the Hugging Face hub's, where they are ids")
    if "data.train" not in {*run.outcome.values, *run.given}:
        run.refuse("dataset", "is missing", "add data.train=FILE")
    key, sources = "interleave_prob", run.outcome.values.get("data.train")
    if run.written(key) and isinstance(sources, list):
        told = run.value(key)
        shares = told if isinstance(told, list) else [told]
        good = all(isinstance(one, int | float) and not isinstance(one, bool) for one in shares)
        if good and len(shares) == len(sources):
            trainer.weighted(run, sources, shares, key)
        else:
            run.refuse(key, f"is {short(shares)}", f"write {len(sources)} numbers")
    fields = run.theirs.block("columns")
    if isinstance(run.value("columns"), str):
        fields = _json(run, "columns")
    if fields:
        named = {COLUMNS.get(str(ours), str(ours)): theirs for theirs, ours in fields.items()}
        run.put("data.fields", named, "columns", *(f"columns.{name}" for name in fields))
    trainer.held_out(run, "split_dataset_ratio", whole=False)


def _source(run: Conversion, text: str) -> dict[str, Any]:
    """Return the source for PATH:SUBSET#NUMBER."""
    path, _, number = text.partition("#")
    name = ""
    if run.theirs.place(path) is None and ":" in path:
        path, _, name = path.rpartition(":")
    path = path.removeprefix("HF::").removeprefix("MS::")
    source: dict[str, Any] = {"path": path}
    if name:
        source["name"] = name
    if run.flag("use_chat_template", default=True):
        source["format"] = "messages"
    if number.isdigit() and int(number):
        source["max_samples"] = int(number)
    return source
