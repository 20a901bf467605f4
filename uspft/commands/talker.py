"""A trained model that answers, loaded from its folder: whole, or as an adapter on its base."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from uspft.config import InputError, ModelBlock
from uspft.config.problems import COMMAND_LINE, Fault, said
from uspft.families.multimodal import loading_class
from uspft.model.fetch import fetch_model
from uspft.prepare.gpus import usable


class Talker(NamedTuple):
    """A model that answers, and its tokenizer."""

    model: Any
    tokenizer: Any


def load_talker(folder: Path, base: str | None) -> Talker:
    """Load a model, or an adapter on its base model, and the tokenizer beside it.

    Raises InputError.
    """
    import transformers
    from transformers import AutoConfig, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    adapter = (folder / "adapter_config.json").is_file()
    if base and not adapter:
        raise wrong("base", f"{folder} is a whole model", "leave it out")
    at = _base(folder, base) if adapter else str(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        if adapter and (quantised := _quantised(AutoConfig.from_pretrained(at))):
            config.quantization_config = {**quantised, "dequantize": True}
        model = getattr(transformers, loading_class(config.to_dict())).from_pretrained(
            at, config=config, dtype=config.dtype or "auto"
        )
        if adapter:
            from peft import PeftModel

            with warnings.catch_warnings():  # peft asks for what transformers has renamed
                warnings.simplefilter("ignore", FutureWarning)
                model = PeftModel.from_pretrained(model, str(folder))
            model.generation_config = _generation(folder, model)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        remedy = "write base=PLACE, where its base model is" if adapter else "write it anew: export"
        raise wrong(str(folder), f"cannot be loaded: {said(error)}", remedy) from error
    if tokenizer.chat_template is None:
        what = f"{folder} has no chat template, so the model was not trained on conversations"
        remedy = "train on messages, or take the model into a program that goes on with text"
        raise wrong("chat", what, remedy)
    device = "cuda" if usable() else "cpu"
    return Talker(model.to(device).eval(), tokenizer)


def _quantised(config: Any) -> dict[str, Any]:
    """Return how the weights of a config's model are quantised; empty where they are not."""
    found: dict[str, Any] = config.to_dict().get("quantization_config") or {}
    return found


def _generation(folder: Path, model: Any) -> Any:
    """Return the generation config of an adapter's folder, which peft does not read."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return model.generation_config


def _base(folder: Path, given: str | None) -> str:
    """Return where the base model of an adapter is. Raises InputError."""
    named = given or json.loads((folder / "adapter_config.json").read_text()).get(
        "base_model_name_or_path"
    )
    if not named:
        what = f"{folder} is an adapter of random weights, which are nowhere"
        raise wrong("base", what, "talk to the merged model: export.huggingface: true")
    block = ModelBlock(name_or_path=str(named))
    try:
        return fetch_model(block).get("name_or_path", str(named))
    except Fault as fault:
        what = "; ".join(what for _, what, _ in fault.findings)
        remedy = "name its folder, or its org/name of the hub"
        if not given:
            what = f"{folder} is an adapter, and its base model is not where it was: {what}"
            remedy = "put it back, or write base=PLACE, where it is now"
        raise wrong("base", what, remedy) from fault


def wrong(word: str, what: str, remedy: str) -> InputError:
    """Return the error that a word of the command line is wrong."""
    return InputError(f"{COMMAND_LINE}: {word}: {what}; {remedy}")
