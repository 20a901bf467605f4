"""The configurations of LLaMA-Factory and 360-LLaMA-Factory as recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from uspft.config.document import bare
from uspft.config.problems import InputError
from uspft.convert import trainer
from uspft.convert.accelerate import sharding
from uspft.convert.conversion import NOTHING, Conversion, short
from uspft.convert.routers import routers
from uspft.convert.theirs import read_tree

MODES = {"zigzag-ring": "p2p", "llama3": "all_gather", "ulysses": "a2a"}
"""360-LLaMA-Factory's names for the values of Megatron's cp_comm_type."""
LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "quantization_bit")
COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
    "messages": "messages",
}
"""The columns of dataset_info.json, and our names for these fields."""
TAGS = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
MEDIA = ("images", "videos", "audios")


def convert_llamafactory(run: Conversion, ranks: int | None) -> int:
    """Convert LLaMA-Factory's configuration, as CONVERTERS says."""
    degree = run.whole("sequence_parallel_size", least=1)
    batch = trainer.global_batch(run, degree, None, ranks)
    if mode := run.choice("sequence_parallel_mode", MODES, "zigzag-ring"):
        keys = ("sequence_parallel_size", degree, MODES[mode], "sequence_parallel_mode")
        trainer.context(run, *keys)
    trainer.updates(run)
    if run.flag("pure_bf16"):
        say = "master weights and Adam are float32"
        run.put("model.dtype", "bfloat16", "pure_bf16", "bf16", say=say)
    else:
        run.idle(NOTHING, "pure_bf16")
        trainer.precision(run, default="bfloat16")
    _model(run)
    if run.value("moe_aux_loss_coef"):
        there = "counted whole in each batch there: as many times as a step has batches"
        routers(run, "moe_aux_loss_coef", "model_name_or_path", there=there)
    else:
        run.idle("config.json says it, as there", "moe_aux_loss_coef")
    texts = _stage(run)
    _adapter(run)
    _rows(run, texts)
    _data(run, texts)
    _memory(run)
    sharding(run)
    trainer.outputs(run)
    return batch


def _model(run: Conversion) -> None:
    trainer.model_named(run, "model_name_or_path")
    scaling = run.value("rope_scaling")
    if scaling in ("linear", "dynamic", "yarn"):
        say = "with the factor that the rows need; there it is rounded up"
        run.put("model.rope_scaling", {"rope_type": scaling}, "rope_scaling", say=say)
    elif scaling == "llama3":
        found = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        run.put("model.rope_scaling", found, "rope_scaling")
    elif scaling is not None:
        run.wrong("rope_scaling", "write linear, dynamic, yarn or llama3")
    for key in ("add_special_tokens", "new_special_tokens"):
        if run.written(key):
            run.put("model.add_tokens", _words(run.value(key)), key)
    run.idle(trainer.KERNEL, "flash_attn")
    run.idle("code from the hub is not run; families here need none", "trust_remote_code")


def _words(value: Any) -> list[str]:
    """Return a list, or the items of a text with commas."""
    found = value if isinstance(value, list) else str(value).split(",")
    return [str(word).strip() for word in found if str(word).strip()]


def _stage(run: Conversion) -> bool:
    """Return whether the stage is pre-training, which trains on all tokens of texts."""
    rows = "packed whole; there rows are cut from one text behind another, which see one another"
    kinds = {"sft": "a recipe trains answers", "pt": f"texts, all of which train, {rows}"}
    why = ", and training is by cross-entropy on texts and answers"
    if stage := run.choice("stage", kinds, "sft", why=why):
        run.told(kinds[stage], "stage")
    return stage == "pt"


def _adapter(run: Conversion) -> None:
    remedy = "write full or lora; `model.freeze` names what of full does not train"
    kind = run.choice("finetuning_type", ("full", "lora"), "lora", remedy=remedy)
    if kind == "full":
        run.told("all weights train", "finetuning_type")
        run.dropped(trainer.WHOLE, *LORA)
    if kind != "lora":
        return
    run.put("model.adapter.type", "lora", "finetuning_type")
    rank = run.whole("lora_rank", default=8)
    run.put("model.adapter.rank", rank, "lora_rank")
    if not run.written("lora_alpha"):
        run.put("model.adapter.alpha", 2 * rank)
    trainer.adapter(run, "lora_target", default="all")
    run.told("left out: weights are not quantised", "quantization_bit")


def _rows(run: Conversion, texts: bool) -> None:
    """Convert packing, and what happens to samples longer than a row."""
    if not run.written("cutoff_len"):
        run.put("data.sequence_length", 2048, why="cutoff_len, 2048 where it is left out")
    neat = run.flag("neat_packing")
    packs = neat or run.flag("packing", default=texts)
    more = "" if neat or texts else ", which they do there"
    trainer.packing(run, packs, "packing", "neat_packing", more=more)
    if texts and packs:
        run.put("data.overlong", "split", why="longer texts are cut into rows")
    else:
        run.put("data.overlong", "truncate", why="longer samples are cut at the end")
    history, prompts = run.flag("mask_history"), run.flag("train_on_prompt")
    trained = "last" if history else "all" if prompts else "assistant"
    run.put("data.train_on", trained, "train_on_prompt", "mask_history")
    trainer.order(run)
    run.switch("disable_shuffling", "data.shuffle", False)
    if shuffles := run.written("shuffle_for_sequence_parallel"):
        run.put("data.shuffle", run.flag(shuffles), shuffles)
    trainer.chat_template(run, run.written("template"), None)
    if not texts:
        run.told(trainer.BEHIND, "template")


def _data(run: Conversion, texts: bool) -> None:
    """Convert the data, described in dataset_info.json."""
    for ours, key in (("data.train", "dataset"), ("data.eval", "eval_dataset")):
        if run.settled(ours, key) or not run.written(key):
            continue
        sources = [_source(run, key, name, texts) for name in _words(run.value(key))]
        found = [source for source in sources if source]
        if found:
            if not texts and not all("messages" in s.get("fields", ()) for s in found):
                what = "of instructions, the input stands an empty line below, a line there"
                run.changed(key, what)
            most = run.value("max_samples")
            for source in found if isinstance(most, int) else ():
                source["max_samples"] = min(source.get("max_samples", most), most)
            run.outcome.values[ours] = found
            run.outcome.sources[ours] = run.theirs.values[key].where, key
            run.changed(key, f"here `{ours}`: what dataset_info.json says of {run.value(key)}")
    run.told("here in each source: max_samples", "max_samples")
    run.told("here in the paths of `data.train`", "dataset_dir")
    if "data.train" not in {*run.outcome.values, *run.given} and not run.written("dataset"):
        run.refuse("dataset", "is missing", "add data.train=FILE")
    _mixed(run)
    trainer.held_out(run, "val_size", beside=True)


def _mixed(run: Conversion) -> None:
    """Convert how often each source is taken."""
    strategy = run.value("mix_strategy", "concat")
    shares = run.value("interleave_probs")
    sources = run.outcome.values.get("data.train")
    if strategy == "concat" or not isinstance(sources, list):
        run.idle("each sample is taken once an epoch", "mix_strategy")
        return
    try:
        weights = [float(word) for word in _words(shares)] if shares else [1.0] * len(sources)
    except ValueError:
        run.wrong("interleave_probs", "write a number for each set")
        return
    if len(weights) != len(sources):
        what = f"has {len(weights)} numbers for {len(sources)} sets"
        run.refuse("interleave_probs", what, f"write {len(sources)}")
    else:
        trainer.weighted(run, sources, weights, "mix_strategy", "interleave_probs")


def _source(run: Conversion, key: str, name: str, texts: bool) -> dict[str, Any]:
    """Return the source for an entry of dataset_info.json; empty where it is refused."""
    folder = str(run.value("dataset_dir", "data"))
    place = run.theirs.place(f"{folder}/dataset_info.json")
    ours = "data.train" if key == "dataset" else "data.eval"
    if folder == "ONLINE":
        return {"path": name, "format": "text" if texts else "messages"}
    if place is None:
        what = f"names {short(name)}, and {folder}/dataset_info.json is not found here"
        run.refuse(key, what, f"put it there, or add {ours}=FILE")
        return {}
    try:
        known = bare(read_tree(place))
    except InputError as error:
        run.refuse(key, f"cannot be looked up: {error}", f"add {ours}=FILE")
        return {}
    said = known.get(name)
    if not isinstance(said, dict):
        run.refuse(key, f"names {short(name)}, which {place} lacks", f"add {ours}=FILE")
        return {}
    return _described(run, key, name, said, place.parent, texts)


def _described(
    run: Conversion, key: str, name: str, said: dict[str, Any], folder: Path, texts: bool
) -> dict[str, Any]:
    """Return the source for an entry with this description; empty where it is refused."""
    blocks = (said.get(name) for name in ("columns", "tags"))
    columns, tags = ({**block} if isinstance(block, dict) else {} for block in blocks)
    hub, file = said.get("hf_hub_url"), said.get("file_name")
    path = hub or (str(folder / str(file)) if file else None)
    bad = next((m for m in MEDIA if m in columns), None)
    if said.get("ranking") or bad or path is None:
        what = "of preferences" if said.get("ranking") else f"with {bad}" if bad else "without file"
        remedy = "leave it out, or add data.train=FILE"
        run.refuse(key, f"names {short(name)}, a set {what}", remedy)
        return {}
    source: dict[str, Any] = {"path": path}
    for theirs, ours in (("subset", "name"), ("split", "split"), ("num_samples", "max_samples")):
        if said.get(theirs) is not None:
            source[ours] = said[theirs]
    if texts:
        source["format"] = "text"
        column = columns.get("prompt", "text")
        return source if column == "text" else {**source, "fields": {"text": column}}
    source["format"] = "messages"
    turns = said.get("formatting", "alpaca") != "alpaca"
    fields = {
        COLUMNS[theirs]: column
        for theirs, column in columns.items()
        if theirs in COLUMNS and column and column != COLUMNS[theirs]
    }
    if turns and "messages" not in columns:
        fields["messages"] = "conversations"
    for tag, ours in (("role_tag", "role"), ("content_tag", "content")):
        if tag in tags:
            fields[ours] = tags[tag]
    roles = {tags[tag]: role for tag, role in TAGS.items() if tags.get(tag) not in (None, role)}
    if roles:
        fields["roles"] = roles
    return {**source, "fields": fields} if fields else source


def _memory(run: Conversion) -> None:
    key = "disable_gradient_checkpointing"
    written = run.written(key, "gradient_checkpointing")
    off = run.flag(key)
    ours = "memory.gradient_checkpointing"
    run.put(ours, not off, written)
    if run.written("gradient_checkpointing") and not run.spoken("gradient_checkpointing"):
        run.ignored("gradient_checkpointing", f"{key} says it")
