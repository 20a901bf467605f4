"""The command `chat`: it talks to a trained model in the terminal, with the chat template of its
training.

It uses plain transformers, on one GPU if there is one, as a server would. Answers go to stdout;
thoughts and chat's own messages go to stderr.
"""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TextStreamer

from uspft.config import ModelBlock
from uspft.config.problems import Fault, UsageError, said, settings_of
from uspft.families.multimodal import loading_class
from uspft.model.fetch import fetch_model
from uspft.prepare.host import Invocation, usable
from uspft.written import ADAPTER, MODEL

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
"""Tokens of gpt-oss's template: the start of a message, and the separators in its header."""
FINAL = "final"


class Answer(TextStreamer):
    """A streamer that prints an answer on stdout as it is generated, and a model's thoughts on
    stderr.

    A model with gpt-oss's template writes messages to channels, which their headers name; the
    answer is what it writes to `final`. With other templates everything is the answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        known = tokenizer.get_added_vocab()
        marks = (START, CHANNEL, MESSAGE)
        self._marks = {known[mark]: mark for mark in marks} if known.keys() >= {*marks} else {}
        self._head: list[int] | None = None
        self._thinks = False
        self._answer: list[int] = []
        self.channels = False
        """Whether the model has named a channel."""

    @property
    def text(self) -> str:
        """The answer, without thoughts and special tokens."""
        text: str = self.tokenizer.decode(self._answer, skip_special_tokens=True)
        return text

    def put(self, value: torch.Tensor) -> None:
        """Skip the prompt, which comes first, and decode the tokens of the answer."""
        if self.next_tokens_are_prompt:
            super().put(value)
        else:
            for token in value.flatten().tolist():
                self._take(token)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of a message; the end of a thought closes the parenthesis around it."""
        end = "\n" if stream_end else ""
        if self._thinks:
            print(text, end=f"){end}" if stream_end else "", flush=True, file=sys.stderr)
        else:
            print(text, end=end, flush=True)

    def _take(self, token: int) -> None:
        mark = self._marks.get(token)
        if mark in (START, CHANNEL):
            if self._head is None and (self._thinks or self._answer):  # the message ends
                self.end()
                self.next_tokens_are_prompt = self._thinks = False
            self._head = [*(self._head or ()), token]
        elif self._head is None:
            if not self._thinks:
                self._answer.append(token)
            super().put(torch.tensor([token]))
        elif mark == MESSAGE:
            _, channel, name = self.tokenizer.decode(self._head).rpartition(CHANNEL)
            self._head, self.channels = None, self.channels or bool(channel)
            self._thinks = bool(channel) and name.split()[:1] != [FINAL]
            if self._thinks:
                print("(", end="", file=sys.stderr)
        else:
            self._head.append(token)


HELP = "Ctrl-C ends an answer, /new the conversation, Ctrl-D the program"
ANSWER_TOKENS = "1024"
"""The default limit on an answer's tokens."""
SETTINGS = {"system": "TEXT", "max_new_tokens": "N", "base": "PLACE"}


def chat(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Answer lines typed or read from stdin until its end.

    target: an output folder, whose `hf` is loaded or else its `adapter`; or such a folder itself.
    overrides: `system=TEXT`, `max_new_tokens=N`, and `base=PLACE` for an adapter whose base model
    has moved. Raises InputError, also where stdin is closed.
    """
    asked = settings_of("chat", overrides, SETTINGS)
    if not _is_text(asked.get("system", "")):
        raise UsageError("system", "holds bytes that are not UTF-8", "write it in UTF-8")
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("chat", "there is no stdin to read questions from", "run it in a terminal")
    limit = asked.get("max_new_tokens", ANSWER_TOKENS)
    if not (limit.isascii() and limit.isdigit() and int(limit)):
        raise UsageError("max_new_tokens", f"`{limit}` is no number of tokens", "write 512")
    folder = _folder(target, place)
    talker = load_talker(folder, asked.get("base"))
    opening = [{"role": "system", "content": asked["system"]}] if "system" in asked else []
    turns = list(opening)
    if sys.stdin.isatty():
        print(f"{folder}: {HELP}")
    for line in _lines():
        if re.fullmatch(r"/\w+(\s.*)?", line):
            if line == "/new":
                turns = list(opening)
            else:
                _note(f"`{line}` is no command: {HELP}; a blank before it makes it a question")
            continue
        turns.append({"role": "user", "content": line.strip()})
        answer = _answer(talker, turns, int(limit), target)
        if answer is None:
            turns.pop()
        else:
            turns.append({"role": "assistant", "content": answer})
    return 0


def _lines() -> Iterator[str]:
    """Yield each line that is not empty, until Ctrl-D, Ctrl-C or the end of the input.

    Raises InputError for a line that is not valid UTF-8.
    """
    prompt = "> " if sys.stdin.isatty() else ""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # so that the error can name the line
    for number in count(1):
        try:
            line = input(prompt).rstrip()
        except (EOFError, KeyboardInterrupt):
            return
        if not _is_text(line):
            what = f"line {number} of stdin holds bytes that are not UTF-8"
            remedy = "write it in UTF-8: iconv -f LATIN1 -t UTF-8 makes it so"
            raise UsageError("chat", what, remedy)
        if line.strip():
            yield line


def _is_text(word: str) -> bool:
    """Return whether a word was decoded without invalid bytes."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _answer(talker: Talker, turns: list[dict[str, str]], limit: int, target: Path) -> str | None:
    """Print the answer to the last turn as it is generated, and return it.

    It returns None where the conversation cannot continue from it, because it was stopped or cut
    inside a thought. Raises InputError where the template refuses the conversation.
    """
    from jinja2 import TemplateError

    try:
        inputs = talker.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(talker.model.device)
    except (TemplateError, TypeError, ValueError) as error:
        what = f"the chat template refuses the conversation: {said(error)}"
        raise UsageError(str(target), what, "leave system= out where it knows none") from error
    answer = Answer(talker.tokenizer)
    try:
        with torch.inference_mode():
            out = talker.model.generate(**inputs, streamer=answer, max_new_tokens=limit)
    except KeyboardInterrupt:
        _note("stopped: this question and its answer are forgotten", "\n")
        return None
    made = out[0, inputs["input_ids"].shape[1] :].tolist()
    ends = talker.model.generation_config.eos_token_id
    if len(made) == limit and made[-1] not in (ends if isinstance(ends, list) else [ends]):
        _note(f"cut at {limit} tokens: max_new_tokens=N takes more")
    if answer.channels and not answer.text:
        _note("no answer came behind the thoughts: this question is forgotten")
        return None
    return answer.text


def _note(what: str, before: str = "") -> None:
    """Print a message on stderr."""
    print(f"{before}({what})", file=sys.stderr)


def _folder(target: Path, place: Invocation) -> Path:
    """Return the model folder at a path. Raises InputError."""
    for folder in (target / MODEL, target / ADAPTER, target):
        if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            return folder
    if not target.exists():
        raise UsageError(str(target), "does not exist", "name a run's output folder")
    if (target / "checkpoints").is_dir():
        remedy = f"write {place.to_type('export', str(target))}"
        raise UsageError(str(target), "holds no trained model yet", remedy)
    raise UsageError(str(target), "holds no hf, adapter or model", "name a run's output folder")


class Talker(NamedTuple):
    """A model to chat with, and its tokenizer."""

    model: Any
    tokenizer: Any


def load_talker(folder: Path, base: str | None) -> Talker:
    """Load a model, or an adapter on its base model, with its tokenizer.

    Raises InputError.
    """
    import transformers
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    adapter = (folder / "adapter_config.json").is_file()
    if base and not adapter:
        raise UsageError("base", f"{folder} is a whole model", "leave it out")
    if not (folder / "tokenizer_config.json").is_file():
        what = f"{folder} has no tokenizer, so the model was trained on token ids"
        raise UsageError("chat", what, "train on messages, with model.tokenizer")
    at = _base(folder, base) if adapter else str(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = AutoConfig.from_pretrained(folder)
        own = AutoConfig.from_pretrained(at).to_dict() if adapter else {}
        if quantised := own.get("quantization_config"):
            config.quantization_config = {**quantised, "dequantize": True}
        model = getattr(transformers, loading_class(config.to_dict())).from_pretrained(
            at, config=config, dtype=config.dtype or "auto"
        )
        if adapter:
            from peft import PeftModel

            with warnings.catch_warnings():  # peft uses names that transformers has deprecated
                warnings.simplefilter("ignore", FutureWarning)
                model = PeftModel.from_pretrained(model, str(folder))
            if (folder / "generation_config.json").is_file():  # peft does not read it
                model.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        remedy = "write base=PLACE, where its base model is" if adapter else "write it anew: export"
        raise UsageError(str(folder), f"cannot be loaded: {said(error)}", remedy) from error
    if tokenizer.chat_template is None:
        what = f"{folder} has no chat template, so the model was not trained on conversations"
        remedy = "train on messages, or take the model into a program that goes on with text"
        raise UsageError("chat", what, remedy)
    device = "cuda" if usable() else "cpu"
    return Talker(model.to(device).eval(), tokenizer)


def _base(folder: Path, given: str | None) -> str:
    """Return the location of an adapter's base model. Raises InputError."""
    named = given or json.loads((folder / "adapter_config.json").read_text()).get(
        "base_model_name_or_path"
    )
    if not named:
        what = f"{folder} is an adapter of random weights, which are nowhere"
        raise UsageError("base", what, "talk to the merged model: export.huggingface: true")
    block = ModelBlock(name_or_path=str(named))
    try:
        return fetch_model(block).get("name_or_path", str(named))
    except Fault as fault:
        what = "; ".join(what for _, what, _ in fault.findings)
        remedy = "name its folder, or its org/name of the hub"
        if not given:
            what = f"{folder} is an adapter, and its base model is not where it was: {what}"
            remedy = "put it back, or write base=PLACE, where it is now"
        raise UsageError("base", what, remedy) from fault
