"""The model and the samples of a configuration of MindSpore Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from uspft.convert.conversion import Conversion

CONFIG = "model.model_config"
LOADER = "train_dataset.data_loader"
HANDLER = f"{LOADER}.handler"
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
"""Their dimensions: the name in a Hugging Face config, and the default there."""
SHAPE = (
    *(*DIMENSIONS, "n_kv_heads", "intermediate_size", "multiple_of", "ffn_dim_multiplier"),
    *("max_position_embedding", "qkv_has_bias", "tie_word_embeddings"),
    "untie_embeddings_and_output_weights",
)
SCALED = {"PI": "linear", "YARN": "yarn", "LLAMA3": "llama3", "DYNAMIC_NTK": "dynamic"}


def model(run: Conversion) -> None:
    """Write the model: its folder, or its dimensions for random weights."""
    _dtype(run)
    folder = run.written("pretrained_model_dir", "load_checkpoint")
    theirs = run.value("load_ckpt_format", "safetensors") != "safetensors"
    if folder and theirs and "model.name_or_path" not in run.given:
        what = "is ckpt, MindSpore's own weights"
        run.refuse("load_ckpt_format", what, "add model.name_or_path=FOLDER of safetensors")
    for key in ("pretrained_model_dir", "load_checkpoint", "load_ckpt_format"):
        if key in run.theirs.values and run.value(key) is None:
            run.ignored(key, "names nothing")
    if "model.name_or_path" in run.given or "model.config" in run.given:
        _not_here(run, "the model is that of the command line")
    elif folder:
        run.put("model.name_or_path", str(run.value(folder)), folder)
        _not_here(run, f"the config.json of {run.value(folder)} rules")
        run.changed("load_ckpt_format", "safetensors") if run.written("load_ckpt_format") else None
    elif run.theirs.has_block(CONFIG):
        _dimensions(run)
    else:
        what = "names no model"
        run.refuse("pretrained_model_dir", what, "add model.name_or_path=FOLDER")


def _dtype(run: Conversion) -> None:
    key = f"{CONFIG}.compute_dtype"
    theirs = str(run.value(key, "float16"))
    if "model.dtype" in run.given:
        if run.written(key):
            run.changed(key, "`model.dtype` of the command line stands in its place")
    elif theirs in DTYPES:
        run.put("model.dtype", DTYPES[theirs], key)
    else:
        what = f"is {theirs}" if run.written(key) else "is float16 where it is left out"
        run.refuse(key, what, "add model.dtype=bfloat16, which has its range and needs no scaling")


def _not_here(run: Conversion, why: str) -> None:
    """Leave the dimensions out, and say why."""
    for name in SHAPE:
        if f"{CONFIG}.{name}" in run.theirs.values:
            run.ignored(f"{CONFIG}.{name}", why)
    for key in ("extend_method", "scaling_factor"):
        if run.written(f"{CONFIG}.{key}"):
            run.ignored(f"{CONFIG}.{key}", why)
    if run.written("model.arch.type"):
        run.ignored("model.arch.type", why)


def _dimensions(run: Conversion) -> None:
    """Write model.config of their dimensions, each under its name in Hugging Face's."""
    arch = run.value("model.arch.type", "LlamaForCausalLM")
    if arch != "LlamaForCausalLM":
        what = f"is {arch}, of which only dimensions are written"
        run.refuse("model.arch.type", what, "add model.name_or_path=FOLDER of such a model")
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
    run.outcome.values["model.config"] = found
    for name in SHAPE:
        key = f"{CONFIG}.{name}"
        if key in run.theirs.values:
            run.changed(key, f"here in `model.config`, a {kind} with random weights")
    if run.written("model.arch.type"):
        run.changed("model.arch.type", f"here `model.config.model_type: {kind}`")
    _positions(run)


def intermediate_size(
    hidden: int, written: int | None, multiple: int, multiplier: float | None
) -> int:
    """Return the MLP's inner size as LLaMA's code counts it, where it is not written.

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
    theirs = run.value(method)
    inner = {key.rpartition(".")[2]: key for key in run.theirs.values if key.startswith(factor)}
    if theirs is None:
        for key in (method, *inner.values()):
            if key in run.theirs.values:
                run.ignored(key, "positions are not scaled")
        return
    if theirs not in SCALED:
        run.refuse(method, f"is {theirs}", f"write one of {', '.join(SCALED)}")
        return
    scaling: dict[str, Any] = {"rope_type": SCALED[theirs]}
    whole = run.value(factor)
    if whole is not None:
        scaling["factor"] = run.number(factor, default=1.0)
    names = {"scaling_factor": "factor"}
    for name, key in inner.items():
        if key != factor:
            scaling[names.get(name, name)] = run.value(key)
    run.put("model.rope_scaling", scaling, method, *inner.values())


def data(run: Conversion) -> None:
    """Write the samples, and how they become rows."""
    _rows(run)
    kind = str(run.value(f"{LOADER}.type", "MindDataset"))
    if "data.train" in run.given:
        _elsewhere(run)
        return
    if kind not in ("HFDataLoader", "CommonDataLoader"):
        what = f"is {kind}, whose files are not read"
        remedy = "add data.train=FILE with the samples themselves"
        run.refuse(f"{LOADER}.type", what, remedy)
        for key in ("dataset_dir", "dataset_files"):
            if f"{LOADER}.{key}" in run.theirs.values:
                run.ignored(f"{LOADER}.{key}", "its files are not read")
        return
    place, files = run.value(f"{LOADER}.path"), run.value(f"{LOADER}.data_files")
    if place is None and files is None:
        run.refuse(f"{LOADER}.path", "is missing", "add data.train=FILE")
        return
    source: dict[str, Any] = {"path": files if isinstance(files, str) else place}
    if isinstance(files, str) and place is not None and "/" in str(place):
        source["path"] = f"{Path(str(place)) / files}"
    elif files is not None and not isinstance(files, str):
        run.refuse(f"{LOADER}.data_files", "is no single file", "add data.train=[FILE, FILE]")
    if run.written(f"{LOADER}.split"):
        source["split"] = run.value(f"{LOADER}.split")
    if run.written(f"{HANDLER}.take.n"):
        source["max_samples"] = run.whole(f"{HANDLER}.take.n")
    if run.theirs.has_block(f"{HANDLER}.AlpacaInstructDataHandler"):
        source["format"] = "prompt_completion"
        what = "here `format: prompt_completion`: instruction and answer, no sentences around them"
        run.changed(f"{HANDLER}.AlpacaInstructDataHandler.type", what)
    run.outcome.values["data.train"] = [source]
    for key in ("type", "path", "split", "data_files"):
        if run.written(f"{LOADER}.{key}"):
            run.changed(f"{LOADER}.{key}", "here in `data.train`")
    for key in ("take.type", "take.n"):
        if run.written(f"{HANDLER}.{key}"):
            run.changed(f"{HANDLER}.{key}", "here in `data.train`: max_samples")
    _tokenizer(run)


def _elsewhere(run: Conversion) -> None:
    """Leave their samples out: the command line names others."""
    for key in run.theirs.values:
        if key.startswith(f"{LOADER}.") and not key.startswith(f"{LOADER}.shuffle"):
            run.changed(key, "`data.train` of the command line stands in its place")


def _tokenizer(run: Conversion) -> None:
    at = f"{HANDLER}.AlpacaInstructDataHandler"
    for key in (f"{at}.tokenizer_name", f"{at}.tokenizer", f"{LOADER}.tokenizer"):
        if isinstance(run.value(key), str) and "model.tokenizer" not in run.given:
            run.put("model.tokenizer", run.value(key), key)
            return
    file = f"{at}.tokenizer.vocab_file"
    if isinstance(run.value(file), str) and "model.tokenizer" not in run.given:
        run.put("model.tokenizer", str(Path(run.value(file)).parent), file)


def _rows(run: Conversion) -> None:
    """Write the length of a row and how it is filled."""
    lengths = (
        f"{CONFIG}.seq_length",
        f"{HANDLER}.PackingHandler.seq_length",
        f"{HANDLER}.AlpacaInstructDataHandler.seq_length",
        f"{LOADER}.config.seq_length",
    )
    key = run.written(*lengths)
    if key is None and "data.sequence_length" not in run.given:
        run.refuse(lengths[0], "is missing", "add data.sequence_length=N")
    elif key:
        run.outcome.values["data.sequence_length"] = run.whole(key)
        for other in lengths:
            if run.written(other):
                what = f"here `data.sequence_length: {run.whole(key)}`"
                run.changed(other, what)
    packs = run.theirs.has_block(f"{HANDLER}.PackingHandler")
    asked = run.written("train_dataset.packing", f"{LOADER}.packing")
    documents = run.flag(f"{CONFIG}.use_eod_attn_mask_compression")
    documents |= run.flag(f"{LOADER}.create_compressed_eod_mask")
    if packs or asked or documents:
        keys = (f"{CONFIG}.use_eod_attn_mask_compression", f"{LOADER}.create_compressed_eod_mask")
        say = "documents of a row never see one another"
        run.put("data.packing", "best_fit", *keys, *([asked] if asked else []), say=say)
    elif run.theirs.has_block(f"{HANDLER}.AlpacaInstructDataHandler"):
        run.put("data.packing", "none", f"{HANDLER}.AlpacaInstructDataHandler.padding")
    strategy = f"{HANDLER}.PackingHandler.pack_strategy"
    if run.written(strategy):
        cuts = run.value(strategy) == "truncate"
        run.put("data.overlong", "truncate" if cuts else "error", strategy)
    if run.written(f"{HANDLER}.PackingHandler.type"):
        run.changed(f"{HANDLER}.PackingHandler.type", "here `data.packing: best_fit`")
