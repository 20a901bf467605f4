"""The model card of a trained model, README.md: its base and data, its use, and the recipe."""

from __future__ import annotations

import os
from typing import Any

import yaml

from uspft import __version__
from uspft.config import Recipe, dump
from uspft.config.problems import counted
from uspft.data.files.sources import is_hub_id
from uspft.job import Job

ADAPTER_CARD = "README-adapter.md"
"""The file with the adapter's card, next to the merged model's card; it becomes README.md in the
adapter's own folder."""

_WHOLE = """from transformers import {loads}, AutoTokenizer

{tokenizer}model = {loads}.from_pretrained(".")"""
_ADAPTER = """from peft import PeftConfig, PeftModel
from transformers import AutoConfig, {loads}, AutoTokenizer, GenerationConfig

{tokenizer}config = AutoConfig.from_pretrained(".")
{read}place = PeftConfig.from_pretrained(".").base_model_name_or_path
base = {loads}.from_pretrained(place, config=config, dtype=config.dtype)
model = PeftModel.from_pretrained(base, ".")"""
_DEQUANTISED = 'config.quantization_config = {{"quant_method": "{method}", "dequantize": True}}\n'
_TOKENIZER = 'tokenizer = AutoTokenizer.from_pretrained(".")\n'
_ENDS = 'model.generation_config = GenerationConfig.from_pretrained(".")'
_CHAT = """inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello"}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)"""
_TEXT = 'inputs = tokenizer("Once", return_tensors="pt")'
_ANSWER = "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=256)[0]))"


def model_card(
    job: Job, step: int, loads: str, *, adapter: bool = False, quantised: str = ""
) -> str:
    """Return the text of a model card, with the hub's metadata at its top.

    step: the number of steps that the weights were trained. loads: transformers' class that loads
    the model. adapter: whether the folder has only an adapter, rather than the whole model with an
    adapter merged. quantised: the quantisation of the base's files, if any.
    """
    recipe = job.recipe
    head = yaml.safe_dump(_facts(recipe), sort_keys=False, allow_unicode=True)
    name = recipe.output_dir.name if recipe.output_dir else "model"
    data = ", ".join(f"`{source.title}`" for source in recipe.data.train)
    lines = [f"---\n{head}---", f"# {name}"]
    lines.append(
        f"{_origin(recipe, adapter)} with uspft {__version__}: {counted(step, 'step')} on {data}, "
        f"in rows of {recipe.data.sequence_length:,} tokens{_rope(recipe)}."
    )
    if quantised:
        held = "they are read so for training" if adapter else "here they are"
        what = f"The base model has its experts in {quantised.upper()}: dequantised,"
        lines.append(f"{what} {held} in {recipe.model.dtype}.")
    lines += _use(job, loads, adapter, quantised)
    lines += ["## Recipe", f"```yaml\n{dump(recipe)}```"]
    return "\n\n".join(lines) + "\n"


def _use(job: Job, loads: str, adapter: bool, quantised: str) -> list[str]:
    """Return the section on loading the folder and generating with it."""
    if adapter and not job.recipe.model.name_or_path:
        what = "Its base model has random weights, which are in no file"
        return ["## Use", f"{what}: what can be loaded is the merged model."]
    chats = bool(job.serving.ends)
    tokenizer = _TOKENIZER if job.tokenizer else ""
    read = _DEQUANTISED.format(method=quantised) if quantised else ""
    code = [(_ADAPTER if adapter else _WHOLE).format(tokenizer=tokenizer, loads=loads, read=read)]
    if adapter and job.serving.generation:
        code.append(_ENDS)
    if job.tokenizer:
        code += [_CHAT if chats else _TEXT, _ANSWER]
    lines = ["## Use", "\n".join(["```python", *code, "```"])]
    if adapter:
        lines.append(
            "The config of this folder is that of the training: the base model is loaded with it."
        )
    if job.tokenizer and chats:
        ends = " or ".join(f"`{token}`" for token in job.serving.ends)
        lines.append(
            f"The tokenizer's chat template is the one that was trained. An answer ends with "
            f"{ends}, where `generate` stops."
        )
    return lines


def _facts(recipe: Recipe) -> dict[str, Any]:
    """Return the hub's metadata of a card: the hub ids of model and data."""
    facts: dict[str, Any] = {"tags": ["uspft"]}
    base = recipe.model.name_or_path
    if base and not os.path.isdir(base):
        facts["base_model"] = base
    if hub := [source.path for source in recipe.data.train if is_hub_id(source.path)]:
        facts["datasets"] = hub
    return facts


def _origin(recipe: Recipe, adapter: bool) -> str:
    base = recipe.model.name_or_path
    if adapter:
        return f"A LoRA adapter for {f'`{base}`' if base else 'random weights'}, trained"
    if recipe.model.adapter:
        by = "by a LoRA adapter that is merged into it,"
        return f"Fine-tuned from `{base}` {by}" if base else f"Trained from a random model {by}"
    return f"Fine-tuned from `{base}`," if base else "Trained from random weights"


def _rope(recipe: Recipe) -> str:
    scaling = recipe.model.rope_scaling
    return f", rotary positions scaled by `{scaling['rope_type']}`" if scaling else ""
