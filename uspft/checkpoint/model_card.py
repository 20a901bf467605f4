"""The model card of a trained model, README.md: what it is made from, its use, and the recipe."""

from __future__ import annotations

import os
from typing import Any

import yaml

from uspft import __version__
from uspft.config import Recipe, dump
from uspft.data.sources import is_hub_id
from uspft.job import Job

_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".")
{use}
print(tokenizer.decode(model.generate(**inputs)[0]))
```"""
_CHAT = """inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello"}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)"""
_TEXT = 'inputs = tokenizer("Once", return_tensors="pt")'


def model_card(job: Job, step: int) -> str:
    """Return the text of a model card, with the facts that the hub reads at its top.

    step: the number of steps that the weights had.
    """
    recipe = job.recipe
    head = yaml.safe_dump(_facts(recipe), sort_keys=False, allow_unicode=True)
    name = recipe.output_dir.name if recipe.output_dir else "model"
    data = ", ".join(f"`{source.title}`" for source in recipe.data.train)
    lines = [f"---\n{head}---", f"# {name}"]
    lines.append(
        f"{_origin(recipe)} with uspft {__version__}: {step:,} steps on {data}, in rows of "
        f"{recipe.data.sequence_length:,} tokens{_rope(recipe)}."
    )
    if job.tokenizer:
        chats = bool(job.serving.ends)
        lines += ["## Use", _LOAD.format(use=_CHAT if chats else _TEXT)]
        if chats:
            ends = " or ".join(f"`{token}`" for token in job.serving.ends)
            lines.append(
                f"The tokenizer's chat template is the one that was trained. An answer ends with "
                f"{ends}, where `generate` stops."
            )
    if recipe.model.adapter:
        lines.append(
            "A folder with `adapter_config.json` is the adapter alone: load the base model with "
            "`config=AutoConfig.from_pretrained(folder)`, then "
            "`PeftModel.from_pretrained(base, folder)`."
        )
    lines += ["## Recipe", f"```yaml\n{dump(recipe)}```"]
    return "\n\n".join(lines) + "\n"


def _facts(recipe: Recipe) -> dict[str, Any]:
    """Return what the hub reads of a card: where model and data come from, if they are there."""
    facts: dict[str, Any] = {"tags": ["uspft"]}
    base = recipe.model.name_or_path
    if base and not os.path.isdir(base):
        facts["base_model"] = base
    if hub := [source.path for source in recipe.data.train if is_hub_id(source.path)]:
        facts["datasets"] = hub
    return facts


def _origin(recipe: Recipe) -> str:
    base = recipe.model.name_or_path
    if base is None:
        return "Trained from random weights"
    return f"{'A LoRA adapter of' if recipe.model.adapter else 'Fine-tuned from'} `{base}`,"


def _rope(recipe: Recipe) -> str:
    scaling = recipe.model.rope_scaling
    return f", rotary positions scaled by `{scaling['rope_type']}`" if scaling else ""
