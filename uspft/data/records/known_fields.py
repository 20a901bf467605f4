"""Every field of records and key of turns that is known by name, and what becomes of it.

The shapes of records, refusals, the hints for misspelt names and the table of docs/coming-from.md
(`data/reference`) all follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

RECORD, TURN = "a record", "a turn"
AXOLOTL, FACTORY, SWIFT, TRL, OPENAI = "axolotl", "LLaMA-Factory", "ms-swift", "TRL", "OpenAI"
_EMPTY = ("", "[]", "{}", "null", "None", "nan", "NaN")
"""How text tables write missing values."""


@dataclass(frozen=True)
class KnownField:
    """A field of records or a key of turns, and what becomes of it."""

    name: str
    becomes: str
    """The text in docs/coming-from.md."""
    of: str = RECORD
    also: tuple[str, ...] = ()
    """Synonyms, read where a record or a turn has no field of this name."""
    often: tuple[str, ...] = ()
    """Names that other data use for it; a hint proposes to map them."""
    tools: tuple[str, ...] = ()
    """The tools whose data have this field."""


@dataclass(frozen=True)
class Refused(KnownField):
    """A field that gives a sample a meaning beyond its text, such as a worse answer or an image, so
    that some of its values are refused."""

    when: Callable[[Any], bool] = lambda value: not is_empty(value)
    """Whether a sample with this value is refused."""
    harmless: Callable[[Any], bool] = lambda value: is_empty(value)  # noqa: PLW0108  it is below
    """Whether a value may be ignored silently; other values that are not refused count as
    unused."""
    why: str = ""
    remedy: str = "write data.fields: {{{name}: null}} to leave it alone"
    """`{name}` in it is the field's."""
    beside: tuple[str, ...] = ()
    """The formats in which it is refused; empty: all."""
    same_as: str = ""
    """A synonym: refused only where a record has both, with different values."""

    def refuses(self, fields: Mapping[str, Any]) -> bool:
        """Tell whether a record with these fields (under our names) is refused."""
        other = fields.get(self.same_as)
        differs = not is_empty(other) and other != fields[self.name]
        return self.when(fields[self.name]) and (differs or not self.same_as)

    def unused(self, fields: Mapping[str, Any]) -> bool:
        """Tell whether a record with these fields has a value of it that nothing uses."""
        same = self.same_as and fields.get(self.same_as) == fields[self.name]
        return not same and not self.harmless(fields[self.name])


def is_empty(value: Any) -> bool:
    """Tell whether a value is null, an empty text, or a list or object of such."""
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    if isinstance(value, dict):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, str) and value.strip() in _EMPTY)


def _is_no(value: Any) -> bool:
    """Tell whether a value marks an unwanted answer: false, 0, or either as a text."""
    if isinstance(value, str):
        return value.strip().lower() in ("false", "0", "0.0")
    return isinstance(value, bool | int | float) and value == 0


def _is_yes(value: Any) -> bool:
    """Tell whether a value marks a wanted answer, or nothing."""
    if isinstance(value, str):
        return is_empty(value) or value.strip().lower() in ("true", "1", "1.0")
    return value is None or (isinstance(value, bool | int | float) and value == 1)


def says_answer(value: Any) -> bool:
    """Tell whether a value is an answer rather than a score or mark."""
    return isinstance(value, str | list | dict) and not is_empty(value)


def are_answers(value: Any) -> bool:
    """Tell whether a value is a list of answers."""
    return isinstance(value, list) and len(value) > 1 and all(isinstance(one, str) for one in value)


def _is_medium(value: Any) -> bool:
    return not isinstance(value, bool | int | float) and not is_empty(value)


CONVERSATION = ("system", "history", "tools", "chat_template_kwargs")
"""Fields of pairs that only a conversation can express, not plain text."""
_ANY = f"{AXOLOTL}, {FACTORY}, {TRL}"
_CHOSEN = {
    "chosen": _ANY,
    "chosen_response": SWIFT,
    "response_chosen": "",
    "preferred_output": OPENAI,
    "chosen_input_ids": TRL,
}
_REJECTED = {
    "rejected": _ANY,
    "rejected_response": SWIFT,
    "rejected_messages": SWIFT,
    "response_rejected": "",
    "non_preferred_output": OPENAI,
    "rejected_input_ids": TRL,
}
CHOSEN, REJECTED = tuple(_CHOSEN), tuple(_REJECTED)
"""Fields of preferences: the better answer, and the worse."""
PREFERENCES = "nothing here trains on preferences"
_ANSWERS = ("response", "target", "answer", "output", "reply", "solution", "completion")
_PAIRS = (AXOLOTL, FACTORY, SWIFT)
_TALK = ("messages", "prompt_completion")

FIELDS = (
    KnownField(
        "messages",
        "turns of a conversation, in the chat template",
        also=("conversations",),
        often=("conversation", "dialog", "dialogue", "dialogs", "chat", "turns", "history"),
        tools=(AXOLOTL, FACTORY, SWIFT, TRL, OPENAI),
    ),
    KnownField(
        "system",
        "the conversation's first turn",
        also=("system_prompt", "system_message"),
        tools=_PAIRS,
    ),
    KnownField(
        "history",
        "turns before a pair's own: `[[question, answer], …]`, or a list of turns",
        tools=(FACTORY, SWIFT),
    ),
    KnownField("tools", "passed to the chat template", tools=(FACTORY, SWIFT, TRL, OPENAI)),
    KnownField("chat_template_kwargs", "settings of the chat template", tools=(TRL,)),
    KnownField(
        "prompt",
        "what comes before the completion, a text or turns; does not train",
        often=("query", "context", "source", "instruction", "question", "user", "human"),
        tools=(TRL,),
    ),
    KnownField(
        "completion",
        "what trains, a text or turns",
        often=(*_ANSWERS, "assistant", "bot"),
        tools=(TRL,),
    ),
    KnownField(
        "instruction",
        "the question",
        often=("task", "prompt", "question", "query"),
        tools=(AXOLOTL, FACTORY),
    ),
    KnownField("output", "the answer, which trains", often=_ANSWERS, tools=(AXOLOTL, FACTORY)),
    KnownField(
        "input",
        "the rest of the question; beside `output` alone, the question",
        often=("context", "passage", "source", "prompt", "question"),
        tools=(AXOLOTL, FACTORY),
    ),
    KnownField(
        "question",
        "the question",
        often=("query", "problem", "instruction", "prompt"),
        tools=(AXOLOTL,),
    ),
    KnownField("answer", "the answer, which trains", often=_ANSWERS, tools=(AXOLOTL,)),
    KnownField(
        "text",
        "a document, all of which trains",
        often=("content", "document", "body", "code", "raw_content"),
        tools=(AXOLOTL, FACTORY, TRL),
    ),
    KnownField(
        "input_ids",
        "token ids, as given",
        often=("ids", "tokens", "token_ids"),
        tools=(AXOLOTL, TRL),
    ),
    KnownField(
        "labels", "what trains of `input_ids`; not where `label = -100`", tools=(AXOLOTL, TRL)
    ),
)
"""The fields of shapes, which `data.fields` may map."""

MASKS = (
    KnownField(
        "completion_mask",
        "what trains of `input_ids`, where there are no `labels`; not where `mask = 0`",
        also=("assistant_masks", "loss_mask"),
        tools=(TRL,),
    ),
    KnownField("attention_mask", "left out; where it hides a token, refused: padding is made here"),
)
"""Masks for token ids."""

_PREFERENCE = f"is there, and {PREFERENCES}"
_MEDIUM = "is there, and only text is trained"
_MEDIA = {
    "images": (f"{FACTORY}, {SWIFT}, {TRL}", SWIFT),
    "image": (f"{AXOLOTL}, {TRL}", SWIFT),
    "videos": (f"{FACTORY}, {SWIFT}", SWIFT),
    "video": (TRL, SWIFT),
    "audios": (f"{FACTORY}, {SWIFT}", SWIFT),
    "audio": (TRL, f"{SWIFT}, {OPENAI}"),
}
"""The names of media, each with the tools that have it as a field of records, and as a key of
turns."""
_ALONE = "leave such records out, or write data.fields: {{{name}: null}} to train on the text alone"
_WANTED = (
    "data.on_bad_sample: skip trains on the others alone, "
    "data.fields: {{{name}: null}} on all of them"
)

ANSWERS = Refused(
    "output",
    "a list of answers: refused",
    tools=(FACTORY,),
    when=are_answers,
    why=f"is a list of answers, as preferences are, and {PREFERENCES}",
    remedy="write the one to train on alone, as a string",
)
"""The answer of a pair as a list of several."""

REFUSED = (
    *(
        Refused(
            name,
            f"false: refused, {PREFERENCES}; true: the sample trains",
            tools=(tool,),
            when=_is_no,
            harmless=_is_yes,
            why=f"says that the answer is not wanted, and {PREFERENCES}",
            remedy=_WANTED,
            beside=_TALK,
        )
        for name, tool in (("label", f"{TRL}, {SWIFT}"), ("kto_tag", FACTORY))
    ),
    *(
        Refused(
            name,
            "0 or false: refused; 1 or true: the sample trains",
            when=_is_no,
            harmless=_is_yes,
            why="says that the sample is not to train",
            remedy=_WANTED,
            beside=_TALK,
        )
        for name in ("weight", "loss", "train", "training")
    ),
    *(
        Refused(
            name,
            f"beside `{other}`, and another: refused",
            why=f"is there together with {other}",
            remedy="write data.fields: {{{name}: null}} to take "
            + other
            + (", or {{" + other + ": {name}}}" if name != "history" else " alone"),
            beside=beside,
            same_as=other,
        )
        for other, names, beside in (
            ("messages", ("conversations", "history"), ("messages",)),
            ("system", ("system_prompt", "system_message"), _TALK),
        )
        for name in names
    ),
    *(
        Refused(name, "refused", tools=(tool,) * bool(tool), when=says_answer, why=_PREFERENCE)
        for name, tool in (*_CHOSEN.items(), *_REJECTED.items())
    ),
    *(
        Refused(name, "refused", tools=(tool,), when=_is_medium, why=_MEDIUM, remedy=_ALONE)
        for name, (tool, _) in _MEDIA.items()
    ),
)
"""Fields of records with which a sample is refused, unless `data.fields` sets them to null."""

WEIGHT = KnownField(
    "weight",
    "of an answer: whether it trains, `weight: false` or `weight: true`, or a number for it",
    TURN,
    also=("loss", "train", "training"),
    tools=(AXOLOTL, SWIFT, OPENAI),
)
OF_PROMPT = -1
"""The weight of an answer inside a prompt, which trains only with `train_on: all`."""
ROLE = KnownField(
    "role",
    "who speaks; `data.fields: {roles: …}` names others",
    TURN,
    also=("from",),
    often=("from", "speaker", "author", "who", "sender", "user_type", "name"),
    tools=(AXOLOTL, FACTORY, SWIFT, TRL, OPENAI),
)
CONTENT = KnownField(
    "content",
    "what is said: text, or parts that are text",
    TURN,
    also=("value",),
    often=("value", "text", "message", "utterance", "body", "said"),
    tools=(AXOLOTL, FACTORY, SWIFT, TRL, OPENAI),
)
CALLS = KnownField(
    "tool_calls",
    "passed to the chat template; `arguments` as it reads them, an object or JSON text",
    TURN,
    also=("function_call",),
    tools=(TRL, OPENAI),
)
THOUGHTS = KnownField(
    "reasoning_content",
    "passed to the chat template, as thoughts",
    TURN,
    also=("reasoning", "thinking"),
    tools=(TRL, SWIFT),
)
TURN_KEYS = (ROLE, CONTENT, WEIGHT, CALLS, THOUGHTS)
PROTOCOL = ("name", "id", "tool_call_id", "refusal", "annotations", "prefix")
"""Keys of turns that link them or name their author; many templates need none of them."""
REFUSED_KEYS = (
    *(
        Refused(
            name,
            "refused",
            TURN,
            tools=(tool,),
            when=_is_medium,
            why=_MEDIUM,
            remedy="leave such records out, or take it out of the turn",
        )
        for name, (_, tool) in _MEDIA.items()
    ),
    Refused(
        "train_detail",
        "refused",
        TURN,
        tools=(AXOLOTL,),
        why="chooses parts of a turn, and a turn trains as a whole or not at all",
        remedy="write weight: false or true",
    ),
    Refused(
        "loss_scale",
        "refused unless it is one",
        TURN,
        tools=(SWIFT,),
        when=lambda value: not is_empty(value) and value != 1,
        harmless=lambda value: True,
        why="weighs a turn, and a turn trains as a whole or not at all",
        remedy="write weight: false or true",
    ),
)
"""Keys of turns with which a sample is refused."""

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
"""The roles that templates know; each template decides which of them it accepts."""
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""The roles that values of `from` stand for."""
LIKELY = {
    **dict.fromkeys(("human", "prompter", "customer", "User", "Human"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "ai", "agent", "Assistant", "AI"), "assistant"),
}
"""The roles that other names most likely stand for."""


@dataclass(frozen=True)
class RecordShape:
    """A shape of records: its required fields, its optional fields, and the formats it can become.

    `auto` takes the first format.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    formats: tuple[str, ...]


PAIR, ALPACA = ("prompt_completion", "messages"), "Alpaca"
_TEMPLATES = ("tools", "chat_template_kwargs")
SHAPES = (
    RecordShape("chat", ("messages",), ("system", *_TEMPLATES), ("messages",)),
    RecordShape("prompt and completion", ("prompt", "completion"), CONVERSATION, PAIR),
    RecordShape(ALPACA, ("instruction", "output"), ("input", *CONVERSATION), PAIR),
    RecordShape("input and output", ("input", "output"), CONVERSATION, PAIR),
    RecordShape("question and answer", ("question", "answer"), CONVERSATION, PAIR),
    RecordShape("text", ("text",), (), ("text",)),
    RecordShape("tokenized", ("input_ids",), ("labels",), ("tokenized",)),
)
FORMATS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), _TEMPLATES),
    "prompt_completion": (("prompt", "completion"), ()),
    "text": (("text",), ()),
    "tokenized": (("input_ids",), ("labels",)),
}
"""By format, the required and the optional fields of its samples."""
NAMES = tuple(field.name for field in FIELDS)
"""Every field that `data.fields` may map."""
