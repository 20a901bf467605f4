"""What lies beside the weights of a model: config, tokenizer, generation config and model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from uspft.checkpoint.model_card import ADAPTER_CARD, model_card
from uspft.families.multimodal import is_multimodal, loading_class, written_config
from uspft.job import Job
from uspft.model.hf_config import changed_fields

CONFIG = "config.json"
OLD_TEMPLATE = "chat_template.json"
"""The file with the chat template of older processors, which they read before the tokenizer's."""
PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "image_processor_config.json"),
    *("video_preprocessor_config.json", "video_processor_config.json", OLD_TEMPLATE),
)
"""What a multimodal model needs to make tensors of images."""


def write_model_files(folder: Path, config: Any, job: Job, step: int) -> None:
    """Write into a folder all that from_pretrained and a server need beside the weights.

    config: the model's, as trained, with its rope scaling. The tokenizer gets the chat template
    that was trained, the generation config the tokens that end a turn. Where an adapter was
    trained, its own card lies there too: each export keeps the one that it needs. A multimodal
    checkpoint keeps its own config, but for what was trained otherwise, and what it says of its
    other parts. Raises OSError.
    """
    _write_config(folder, config, job)
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
    """Return the quantisation from which a run's weights were read; empty where there was none."""
    block = job.here.model
    if block.config or not block.name_or_path:
        return ""
    raw = json.loads((Path(block.name_or_path) / CONFIG).read_text("utf-8"))
    return str((raw.get("quantization_config") or {}).get("quant_method", ""))


def _write_config(folder: Path, config: Any, job: Job) -> None:
    """Write config.json, and of a multimodal checkpoint the files of its processor."""
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
