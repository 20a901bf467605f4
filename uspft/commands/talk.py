"""The command `chat`: it talks to a trained model in the terminal, in the template of its training.

It is plain transformers, on one GPU where there is one: what it shows is what a server would serve.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from uspft.config import InputError
from uspft.config.problems import COMMAND_LINE, said
from uspft.prepare.gpus import usable
from uspft.prepare.invocation import Invocation
from uspft.written import ADAPTER, MODEL

HELP = "Ctrl-C ends an answer, /new the conversation, Ctrl-D the program"
ANSWER_TOKENS = 1024
"""The most tokens of an answer where the command line says no other number."""


class Talker(NamedTuple):
    """A model that answers, and its tokenizer."""

    model: Any
    tokenizer: Any


def chat(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Answer what is typed, or read from stdin, line by line until its end.

    target: an output folder, whose `hf` is taken or else its `adapter`; or such a folder itself.
    overrides: `system=TEXT`, `max_new_tokens=N`, and `base=PLACE` for an adapter whose base model
    is elsewhere now. Raises InputError, also where stdin is closed.
    """
    asked = _asked(overrides)
    if sys.stdin is None or sys.stdin.closed:
        raise _wrong("chat", "there is no stdin to read questions from", "run it in a terminal")
    limit = _limit(asked.get("max_new_tokens"))
    folder = _folder(target)
    talker = _loaded(folder, asked.get("base"))
    opening = [{"role": "system", "content": asked["system"]}] if "system" in asked else []
    turns = list(opening)
    if sys.stdin.isatty():
        print(f"{folder}: {HELP}")
    for line in _lines():
        if line == "/new":
            turns = list(opening)
            continue
        turns.append({"role": "user", "content": line})
        answer = _answer(talker, turns, limit, target)
        if answer is None:
            turns.pop()
        else:
            turns.append({"role": "assistant", "content": answer})
    return 0


def _lines() -> Iterator[str]:
    """Yield each line that is not empty, until Ctrl-D, Ctrl-C or the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line


def _answer(talker: Talker, turns: list[dict[str, str]], limit: int, target: Path) -> str | None:
    """Print the answer to the last turn as it comes, and return it; None where it was cut short.

    Raises InputError where the template refuses the conversation.
    """
    from jinja2 import TemplateError
    from transformers import TextStreamer

    try:
        inputs = talker.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(talker.model.device)
    except (TemplateError, TypeError, ValueError) as error:
        what = f"the chat template refuses the conversation: {said(error)}"
        raise _wrong(str(target), what, "leave system= out where it knows none") from error
    streamer = TextStreamer(talker.tokenizer, skip_prompt=True, skip_special_tokens=True)
    try:
        with torch.inference_mode():
            out = talker.model.generate(**inputs, streamer=streamer, max_new_tokens=limit)
    except KeyboardInterrupt:
        print("\n(stopped: this question and its answer are forgotten)")
        return None
    made = out[0, inputs["input_ids"].shape[1] :]
    if len(made) == limit:
        print(f"(cut at {limit} tokens: max_new_tokens=N takes more)")
    text: str = talker.tokenizer.decode(made, skip_special_tokens=True)
    return text


def _loaded(folder: Path, base: str | None) -> Talker:
    """Load a model, or an adapter on its base model, and the tokenizer beside it.

    Raises InputError.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    adapter = (folder / "adapter_config.json").is_file()
    if base and not adapter:
        raise _wrong("base", f"{folder} is a whole model", "leave it out")
    at = _base(folder, base) if adapter else str(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(at, config=config, dtype=config.dtype)
        if adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder))
            model.generation_config = _generation(folder, model)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        remedy = "write base=PLACE, where its base model is" if adapter else "write it anew: export"
        raise _wrong(str(folder), f"cannot be loaded: {said(error)}", remedy) from error
    if tokenizer.chat_template is None:
        what = f"{folder} has no chat template, so the model was not trained on conversations"
        remedy = "train on messages, or take the model into a program that goes on with text"
        raise _wrong("chat", what, remedy)
    device = "cuda" if usable() else "cpu"
    return Talker(model.to(device).eval(), tokenizer)


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
        raise _wrong("base", what, "talk to the merged model: export.huggingface: true")
    return str(named)


def _folder(target: Path) -> Path:
    """Return the folder of the model that a path means. Raises InputError."""
    for folder in (target / MODEL, target / ADAPTER, target):
        if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            return folder
    if not target.exists():
        raise _wrong(str(target), "does not exist", "name a run's output folder")
    if (target / "checkpoints").is_dir():
        raise _wrong(str(target), "holds no trained model yet", f"write uspft export {target}")
    raise _wrong(str(target), "holds no hf, adapter or model", "name a run's output folder")


def _asked(words: Sequence[str]) -> dict[str, str]:
    """Return what the command line asks for, by name. Raises InputError."""
    asked: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in ("system", "max_new_tokens", "base") or not value:
            what = "chat takes system=TEXT, max_new_tokens=N and base=PLACE and nothing else"
            raise _wrong(word, what, "write one of them or leave it out")
        if key in asked:
            raise _wrong(key, "is given twice", "write it once")
        asked[key] = value
    return asked


def _limit(value: str | None) -> int:
    if value is None:
        return ANSWER_TOKENS
    if not (value.isascii() and value.isdigit() and int(value)):
        raise _wrong("max_new_tokens", f"`{value}` is no number of tokens", "write 512")
    return int(value)


def _wrong(word: str, what: str, remedy: str) -> InputError:
    return InputError(f"{COMMAND_LINE}: {word}: {what}; {remedy}")
