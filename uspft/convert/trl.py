"""TRL's supervised fine-tuning, and a Trainer's arguments alone, as a recipe."""

from __future__ import annotations

from typing import Any

from uspft.config.other_tools import table_of
from uspft.convert import trainer
from uspft.convert.accelerate import devices_sharding, layout, split, world
from uspft.convert.accelerate import precision as devices_precision
from uspft.convert.conversion import Conversion
from uspft.convert.routers import routers

LORA = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
    *("load_in_4bit", "load_in_8bit"),
)
OVERLONG = {"bfd": "truncate", "bfd_split": "split", "bfd-requeue": "split", "wrapped": "split"}
OF_SFT = {"learning_rate": 2e-5, "gradient_checkpointing": True, "logging_steps": 10}
"""TRL's defaults in supervised fine-tuning where they differ from the Trainer's."""
OF_MODEL = ("model_name_or_path", "trust_remote_code", "attn_implementation")
"""Keys that scripts without TRL often have too."""


def convert_trl(run: Conversion, ranks: int | None) -> int:
    """Convert TRL's arguments, as CONVERTERS says."""
    own = {path.partition(".")[0] for path in table_of("trl").own} - {*OF_MODEL, "env"}
    sft = any(key.partition(".")[0].partition("[")[0] in own for key in run.theirs.values)
    run.defaults |= OF_SFT if sft else {}
    batch = trainer.global_batch(run, split(run), world(run), ranks)
    layout(run)
    trainer.updates(run)
    trainer.precision(run, default="bfloat16" if sft else "float32")
    devices_precision(run)
    _model(run)
    if sft:
        routers(run, "router_aux_loss_coef", "model_name_or_path")
    _adapter(run)
    _rows(run, sft=sft)
    _data(run)
    trainer.checkpointing(run, "activation_checkpointing")
    devices_sharding(run)
    trainer.outputs(run)
    return batch


def _model(run: Conversion) -> None:
    trainer.model_named(run, "model_name_or_path")
    dtype = f"here `model.dtype: {run.outcome.values.get('model.dtype')}`"
    for start in ("", "model_init_kwargs."):
        what = f"{dtype}; weights and their updates are float32"
        run.told(what, f"{start}dtype", f"{start}torch_dtype")
        run.idle(trainer.KERNEL, f"{start}attn_implementation")
    run.idle("code from the hub is not run; families here need none", "trust_remote_code")
    key = "chat_template_path"
    if run.written(key) and str(run.value(key)).endswith((".jinja", ".jinja2")):
        run.put("data.chat_template", str(run.value(key)), key)
    elif run.written(key):
        run.wrong(key, "add data.chat_template=FILE.jinja", ", a tokenizer's folder")


def _adapter(run: Conversion) -> None:
    if not run.flag("use_peft"):
        run.idle("all weights train", "use_peft")
        run.dropped(trainer.WHOLE, *LORA)
        return
    run.put("model.adapter.type", "lora", "use_peft")
    half = ("alpha", "lora_alpha", 32), ("dropout", "lora_dropout", 0.05)
    trainer.adapter_defaults(run, ("rank", "lora_r", 16), *half)
    trainer.named_adapter(run, "lora_target_modules", "write all-linear")
    trainer.whole_weights(run)


def _rows(run: Conversion, *, sft: bool) -> None:
    """Convert packing, what happens to samples longer than a row, and which tokens train."""
    lengths = ("max_length", "max_seq_length")
    cut = next((key for key in lengths if key in run.theirs.values), None)
    if not run.written(*lengths) and "data.sequence_length" not in run.given:
        if cut or not sft:
            what = "is null, and rows have a length here" if cut else "is missing"
            run.refuse(cut or lengths[0], what, "add data.sequence_length=N")
        else:
            run.put("data.sequence_length", 1024, why="max_length, 1024 where it is left out")
    trainer.order(run)
    packs = run.flag("packing")
    trainer.packing(run, packs, "packing", "padding_free")
    strategy = run.choice("packing_strategy", OVERLONG, "bfd")
    if strategy and packs:
        say = "documents are packed whole here, in pieces there" if strategy == "wrapped" else ""
        run.put("data.overlong", OVERLONG[strategy], "packing_strategy", say=say)
    elif strategy:
        run.put("data.overlong", "truncate")
        run.idle("it has an effect only with packing", "packing_strategy")
    answers, halves = run.written("assistant_only_loss"), run.written("completion_only_loss")
    if answers and run.flag(answers):
        run.put("data.train_on", "assistant", answers, halves)
    elif halves:
        trained = "completion" if run.flag(halves) else "all"
        say = "tokenised apart from its prompt, of turns the answer up to its end; see the page"
        run.put("data.train_on", trained, halves, answers, say=say)
    else:
        run.put("data.train_on", "all")
        what = (
            "here `data.train_on: all`: there all turns of a conversation train, and of prompt and "
            "completion the completion: write data.train_on=completion for those"
        )
        run.changed("assistant_only_loss", what)


def _data(run: Conversion) -> None:
    """Convert the data."""
    items = run.theirs.items("datasets")
    inside = [key for key in run.theirs.values if key.startswith("datasets[")]
    if run.settled("data.train", "dataset_name", "dataset_config", *inside):
        pass
    elif run.written("dataset_name"):
        source = _named(run, "dataset_train_split", "train")
        run.put("data.train", [source], "dataset_name", "dataset_config", "dataset_train_split")
    elif items:
        sources = [source for item in items for source in trainer.listed(run, item, {})]
        if sources:
            run.outcome.values["data.train"] = sources
    else:
        run.refuse("dataset_name", "is missing", "add data.train=FILE")
    asks = run.value("eval_strategy", run.value("evaluation_strategy", "no"))
    split_key, share = "dataset_test_split", "test_split_size"
    if run.written(share) and 0 < run.number(share, default=0.0) < 1:
        run.put("data.eval_fraction", run.number(share, default=0.0), share)
    elif asks not in ("no", False) and run.written("dataset_name") and "data.eval" not in run.given:
        run.put("data.eval", [_named(run, split_key, "test")], split_key)
    else:
        run.idle("there is nothing to evaluate on", split_key)
    text = "dataset_text_field"
    if run.value(text, "text") != "text":
        run.put("data.fields", {"text": run.value(text)}, text)
    else:
        run.idle("it is called so here too", text)


def _named(run: Conversion, key: str, default: str) -> dict[str, Any]:
    """Return the source for the keys of one data set."""
    source: dict[str, Any] = {"path": str(run.value("dataset_name"))}
    if run.written("dataset_config"):
        source["name"] = str(run.value("dataset_config"))
    local = run.theirs.place(source["path"]) is not None
    if not local or run.written(key):
        source["split"] = str(run.value(key, default))
    return source
