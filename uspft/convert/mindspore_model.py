"""The model of a configuration of MindSpore Transformers: its folder, or its dimensions."""

from __future__ import annotations

from typing import Any

from uspft.convert.conversion import Conversion

CONFIG = "model.model_config"
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
        if f"{CONFIG}.{key}" in run.theirs.values:
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
    if not isinstance(theirs, str) or theirs not in SCALED:
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
