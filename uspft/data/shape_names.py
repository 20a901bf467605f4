"""The shapes of records: the names of their fields, by which all else here knows them."""

from __future__ import annotations

from dataclasses import dataclass

CHAT = ("tools", "chat_template_kwargs")
SHAREGPT = "conversations"


@dataclass(frozen=True)
class RecordShape:
    """A shape of records: the fields that tell it, those that it may have, and its formats.

    The first format is that of `auto`.
    """

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    formats: tuple[str, ...]


PAIR = ("prompt_completion", "messages")
SHAPES = (
    RecordShape("chat", ("messages",), ("system", *CHAT), ("messages",)),
    RecordShape("prompt and completion", ("prompt", "completion"), ("system", *CHAT), PAIR),
    RecordShape("Alpaca", ("instruction", "output"), ("input", "system", *CHAT), PAIR),
    RecordShape("input and output", ("input", "output"), ("system", *CHAT), PAIR),
    RecordShape("question and answer", ("question", "answer"), ("system", *CHAT), PAIR),
    RecordShape("text", ("text",), (), ("text",)),
    RecordShape("tokenized", ("input_ids",), ("labels",), ("tokenized",)),
)
NAMES = tuple(dict.fromkeys(name for shape in SHAPES for name in shape.needs + shape.may))
"""Every field that `data.fields` may map."""
