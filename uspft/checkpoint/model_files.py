"""What lies beside the weights of a model: config, tokenizer, generation config and model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from uspft.checkpoint.model_card import ADAPTER_CARD, model_card
from uspft.job import Job


def write_model_files(folder: Path, config: Any, job: Job, step: int) -> None:
    """Write into a folder all that from_pretrained and a server need beside the weights.

    config: the model's, as trained, with its rope scaling. The tokenizer gets the chat template
    that was trained, the generation config the tokens that end a turn. Where an adapter was
    trained, its own card lies there too: each export keeps the one that it needs. Raises OSError.
    """
    config.save_pretrained(folder)
    if job.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
        if job.serving.template:
            tokenizer.chat_template = job.serving.template
        tokenizer.save_pretrained(folder)
    if job.serving.generation:
        text = json.dumps(job.serving.generation, indent=2)
        (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(job, step), encoding="utf-8")
    if job.recipe.model.adapter:
        card = model_card(job, step, adapter=True)
        (folder / ADAPTER_CARD).write_text(card, encoding="utf-8")
