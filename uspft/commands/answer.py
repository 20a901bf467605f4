"""An answer of a model as it comes, token by token: what is shown of it, and where."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import TextStreamer

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
"""The tokens of gpt-oss's template before a message, and between the parts of its head."""
FINAL = "final"


class Answer(TextStreamer):
    """A streamer that prints an answer on stdout as it comes, and a model's thoughts on stderr.

    A model of gpt-oss's template writes messages, each for a channel that its head names; the
    answer is what stands in `final`. Elsewhere the answer is all that the model writes.
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
        """Take the prompt, which is not shown, and then tokens of the answer."""
        if self.next_tokens_are_prompt:
            super().put(value)
            return
        for token in value.flatten().tolist():
            self._take(token)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of a message; of a thought it ends the parenthesis around it."""
        end = "\n" if stream_end else ""
        if self._thinks:
            print(text, end=f"){end}" if stream_end else "", flush=True, file=sys.stderr)
        else:
            print(text, end=end, flush=True)

    def _take(self, token: int) -> None:
        mark = self._marks.get(token)
        if mark in (START, CHANNEL):
            if self._head is None:
                self._end_message()
            self._head = [*(self._head or ()), token]
        elif self._head is None:
            if not self._thinks:
                self._answer.append(token)
            super().put(torch.tensor([token]))
        elif mark == MESSAGE:
            self._begin_message(self.tokenizer.decode(self._head))
            self._head = None
        else:
            self._head.append(token)

    def _begin_message(self, head: str) -> None:
        _, channel, name = head.rpartition(CHANNEL)
        self.channels |= bool(channel)
        self._thinks = bool(channel) and name.split()[:1] != [FINAL]
        if self._thinks:
            print("(", end="", file=sys.stderr)

    def _end_message(self) -> None:
        if self._thinks or self._answer:
            self.end()
            self.next_tokens_are_prompt = self._thinks = False
