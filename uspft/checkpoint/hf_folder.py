"""The Hugging Face folders of a trained model: hf/ with its weights, adapter/ with its adapter's.

Both also have config, tokenizer, generation config and model card. A checkpoint stores these too,
so that an export from a run and one from its checkpoint write the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from uspft.checkpoint.model_card import ADAPTER_CARD, model_card
from uspft.checkpoint.weights import WholeModel
from uspft.config import ModelBlock
from uspft.durable import publish, save_tensors, start_partial
from uspft.families.multimodal import (
    is_multimodal,
    language_model,
    loading_class,
    module_name,
    written_config,
)
from uspft.job import Job
from uspft.model.adapter import lora_config
from uspft.model.hf_config import changed_fields
from uspft.parameters.experts import as_files, corrections
from uspft.parameters.source import FolderWeights

CONFIG = "config.json"
OLD_TEMPLATE = "chat_template.json"
"""The file with the chat template of older processors, which is read in preference to the
tokenizer's."""
PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "image_processor_config.json"),
    *("video_preprocessor_config.json", "video_processor_config.json", OLD_TEMPLATE),
)
"""The files of a multimodal model's processor."""
SHARD_BYTES = 5 * 10**9
CORRECTIONS = "corrections.safetensors"
"""The file in a checkpoint with the float32 bias of routers, under its names in exports; it does
not train."""
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The embedding, and the head, which files may contain even if it is tied to the embedding."""
PREFIX = "base_model.model."
"""The prefix that peft writes before the base model's own names."""
IN_MODULE = ("gate_up_proj", "down_proj")
"""The experts' parameters, in the order of their modules."""
_OF_EXPERTS = re.compile(
    rf"(?P<module>.*\.experts)\.(?P<own>{'|'.join(IN_MODULE)})\.(?P<side>lora_[AB]\.weight)"
)


def write_exports(
    whole: WholeModel, files: Path, *, hf: Path | None, adapter: Path | None = None
) -> None:
    """Write a trained model as Hugging Face folders, each of which is complete or absent.

    files: the folder that `write_model_files` wrote. hf: the folder for the whole model, with an
    adapter merged; None: skip it. adapter: the folder for the adapter, if one was trained. The
    parameters are read in the order of `export_order`. Raises OSError, and WeightsError if the base
    model cannot be read.
    """
    if adapter and whole.block.adapter:
        export_adapter(whole.adapter(), whole.block, files, adapter)
    if hf:
        export_folder(whole.merged(), whole.dtype, files, hf, whole.base)


def write_model_files(
    folder: Path, config: Any, job: Job, step: int, model: nn.Module | None = None
) -> None:
    """Write all files that from_pretrained and a server need, except weights, into a folder.

    config: the model's, as trained, with its rope scaling. The tokenizer gets the chat template
    that was trained, the generation config the tokens that end a turn. If an adapter was trained,
    its card is written too: each export takes the one that it needs. A multimodal checkpoint keeps
    its own config, except for what training changed. model: the source of the routers' untrained
    bias, which is written too. Raises OSError.
    """
    _write_config(folder, config, job)
    if model:
        _keep_corrections(folder, model, config)
    loads = loading_class(json.loads((folder / CONFIG).read_text("utf-8")))
    if job.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
        if job.serving.template:
            tokenizer.chat_template = job.serving.template
        tokenizer.save_pretrained(folder)
    if job.serving.generation:
        text = json.dumps(job.serving.generation, indent=2)
        (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    quantised = _quantised(job)
    card = model_card(job, step, loads, quantised=quantised)
    (folder / "README.md").write_text(card, encoding="utf-8")
    if job.recipe.model.adapter:
        card = model_card(job, step, loads, adapter=True, quantised=quantised)
        (folder / ADAPTER_CARD).write_text(card, encoding="utf-8")


def _quantised(job: Job) -> str:
    """Return the quantisation of the base model's files; empty if they were not quantised."""
    block = job.here.model
    if block.config or not block.name_or_path:
        return ""
    raw = json.loads((Path(block.name_or_path) / CONFIG).read_text("utf-8"))
    return str((raw.get("quantization_config") or {}).get("quant_method", ""))


def _write_config(folder: Path, config: Any, job: Job) -> None:
    """Write config.json, and for a multimodal checkpoint the files of its processor."""
    block = job.here.model
    base = Path(block.name_or_path or "")
    raw = {} if block.config else json.loads((base / CONFIG).read_text("utf-8"))
    if not is_multimodal(raw):
        config.save_pretrained(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    found = written_config(raw, changed_fields(base, config), block.dtype)
    if found == raw:
        shutil.copyfile(base / CONFIG, folder / CONFIG)
    else:
        (folder / CONFIG).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for name in PROCESSOR_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    told, old = {"chat_template": job.serving.template}, folder / OLD_TEMPLATE
    if job.serving.template and old.exists() and json.loads(old.read_text("utf-8")) != told:
        old.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _keep_corrections(folder: Path, model: nn.Module, config: Any) -> None:
    """Write the bias of a model's routers, and other untrained buffers, if it has any."""
    raw = {"model_type": config.model_type}
    every = [as_files(name, one, raw) for name, one in corrections(model).items()]
    if every:
        held = {name: _held(value, torch.float32) for name, value in chain(*every)}
        save_tensors(held, folder / CORRECTIONS, {"format": "pt"})


def export_folder(
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    files: Path,
    target: Path,
    base: FolderWeights | None = None,
) -> Path:
    """Write a complete Hugging Face folder with parameters in `dtype`; return the folder.

    tensors: names and whole values, one at a time; only one shard is in memory. files: the folder
    of config and tokenizer, which are copied; the config decides how files name experts. target: a
    new name or an empty folder; it is complete or absent afterwards. base: the multimodal
    checkpoint whose language model was trained; its other tensors are copied bit for bit. Raises
    OSError, and WeightsError if the base cannot be read.
    """
    aside = _begun(target, files)
    (aside / ADAPTER_CARD).unlink(missing_ok=True)
    config = json.loads((aside / CONFIG).read_text("utf-8"))
    named = _multimodal(tensors, dtype, base, config) if base else _model(tensors, dtype, config)
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}
    if (untrained := aside / CORRECTIONS).exists():
        held = {} if base else load_file(untrained)  # a base's files have them
        untrained.unlink()
    held_bytes = sum(value.numel() * value.element_size() for value in held.values())
    for name, value in named:
        size = value.numel() * value.element_size()
        if held and held_bytes + size > SHARD_BYTES:
            shards.append(_write(held, aside, len(shards)))
            held, held_bytes = {}, 0
        held[name] = value
        held_bytes += size
    shards.append(_write(held, aside, len(shards)))
    _name_shards(aside, shards)
    publish(aside, target)
    return target


def _begun(target: Path, files: Path) -> Path:
    """Return the folder in which `target` is written, with copies of the files in it."""
    aside = start_partial(target)
    for file in files.rglob("*"):
        if file.is_file():
            to = aside / file.relative_to(files)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(file.read_bytes())  # shutil's errors do not say that a disk is full
    return aside


def _model(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors under their names in files."""
    for pair in tensors:
        for name, value in as_files(*pair, config):
            yield name, _held(value, dtype)


def _multimodal(
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    base: FolderWeights,
    config: dict[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a multimodal checkpoint under their names in its files.

    A trained tensor whose dtype there differs from the embedding's, as gates' may, keeps it.
    """
    text, written, types = language_model(config), set[str](), base.dtypes()
    ((table, _),) = base.as_stored(TABLE, torch.empty(0))
    for name, value in tensors:
        copies = [name, HEAD] if text["tie_word_embeddings"] and name == TABLE else [name]
        for stored, part in chain.from_iterable(
            base.as_stored(one, value) for one in copies if one == name or base.holds(one)
        ):
            written.add(stored)
            own = types[stored]
            yield stored, _held(part, dtype if own == types[table] else own)
    yield from base.others(written, text["num_hidden_layers"])


def _held(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to("cpu", dtype).contiguous().clone()


def _write(held: dict[str, Tensor], folder: Path, number: int) -> dict[str, int]:
    save_tensors(held, folder / f"shard-{number}", {"format": "pt"})
    return {name: value.numel() * value.element_size() for name, value in held.items()}


def _name_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, sizes in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / name)
        where |= dict.fromkeys(sizes, name)
    total = sum(size for sizes in shards for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def export_adapter(
    tensors: Iterable[tuple[str, Tensor]],
    block: ModelBlock,
    files: Path,
    target: Path,
) -> Path:
    """Write an adapter's float32 weights for `PeftModel.from_pretrained`; return the folder.

    tensors: from `adapter_of`; an adapter of a multimodal checkpoint's language model is written
    for the whole model. files: the folder of config and tokenizer, which are copied: peft reads
    neither, but the base model needs that config, and was trained with that template. target: a new
    name or an empty folder; it is complete or absent afterwards. Raises OSError.
    """
    assert block.adapter is not None
    aside = _begun(target, files)
    inside = is_multimodal(json.loads((aside / CONFIG).read_text("utf-8")))
    every = [(name, value.to("cpu").float().contiguous().clone()) for name, value in tensors]
    names = nested([name for name, _ in every])
    held = {
        PREFIX + (module_name(names[name]) if inside else names[name]): value
        for name, value in every
    }
    if (aside / ADAPTER_CARD).exists():  # a checkpoint of an earlier version has none
        (aside / ADAPTER_CARD).replace(aside / "README.md")
    (aside / CORRECTIONS).unlink(missing_ok=True)
    save_tensors(held, aside / "adapter_model.safetensors", {"format": "pt"})
    adapted: Collection[str] | None = block.adapter.target_modules
    if adapted is None:
        adapted = _modules([name for name, _ in every], block.adapter.target_parameters)
    config = lora_config(block.adapter, sorted(adapted), _base(block))
    # peft has converted them to a set, whose order varies
    config.target_modules = _inside(adapted) if inside else sorted(adapted)
    config.target_parameters = sorted(block.adapter.target_parameters) or None
    config.inference_mode = True
    config.save_pretrained(str(aside))
    publish(aside, target)
    return target


def nested(names: Collection[str]) -> dict[str, str]:
    """Return peft's name of each parameter of an adapter, by uspft's name.

    peft wraps a module of experts once for each adapted parameter, the last one outermost, and
    calls a wrapped module `base_layer`. For routers and projections the two names are the same.
    """
    of_module: dict[str, list[str]] = {}
    for name in names:
        if match := _OF_EXPERTS.fullmatch(name):
            every = of_module.setdefault(match["module"], [])
            every += [match["own"]] if match["own"] not in every else []
    found = {}
    for name in names:
        match = _OF_EXPERTS.fullmatch(name)
        if not match:
            found[name] = name
            continue
        every = sorted(of_module[match["module"]], key=IN_MODULE.index)
        deep = len(every) - 1 - every.index(match["own"])
        found[name] = f"{match['module']}{'.base_layer' * deep}.{match['side']}"
    return found


def _modules(names: Iterable[str], parameters: Collection[str]) -> set[str]:
    """Return the last words of the names of adapted projections. parameters: those adapted through
    `target_parameters`, which do not count."""
    owners = {name.partition(".lora_")[0] for name in names}
    every = {one for one in owners if not any(_is_of(one, parameter) for parameter in parameters)}
    return {one.rpartition(".")[2] for one in every}


def _is_of(owner: str, parameter: str) -> bool:
    return any(f".{owner}{end}".endswith(f".{parameter}") for end in ("", ".weight"))


def _base(block: ModelBlock) -> str | None:
    """Return the base model's hub id or folder; None: its weights are random."""
    name = block.name_or_path
    return str(Path(name).resolve()) if name and os.path.isdir(name) else name


def _inside(adapted: Collection[str]) -> str:
    """Return the regular expression for peft's target_modules that matches only modules of a
    multimodal model's language model; its other parts have modules of the same names."""
    names = "|".join(re.escape(name) for name in sorted(adapted))
    return rf"{re.escape(module_name('model.layers'))}\.\d+\.(.*\.)?({names})"
