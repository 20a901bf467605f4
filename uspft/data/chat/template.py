"""A tokenizer's chat template: which one a recipe means, how it renders a conversation, what is
wrong with it, and which one the trained model is exported with."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from uspft.config.problems import Finding
from uspft.data.chat.spans import PLACEHOLDER, AnswerStyle, Turn, between
from uspft.data.faults import SampleFault, wrong_key
from uspft.data.records.known_fields import ROLES
from uspft.data.samples import Spans

if TYPE_CHECKING:
    from uspft.config.inputs import DataBlock

TABLE = Path(__file__).with_name("marked_templates.yaml")


def marked_copy_of(source: str) -> str | None:
    """Return the marked copy of a chat template, or None where the template is not known."""
    known = models().get(digest(source))
    if known is None:
        return None
    for edit in known["edits"]:
        source = edited(source, edit)
    return source


def digest(source: str) -> str:
    """Return the hash by which a template is recognised.

    A final newline does not count: Jinja drops it, and a template file may have one where the
    tokenizer's own text has none.
    """
    return sha256(source.removesuffix("\n").encode()).hexdigest()


@cache
def models() -> dict[str, dict[str, Any]]:
    """Return the known templates by hash: the models that use each, and the edits that add
    marks."""
    listed = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {known["sha256"]: known for known in listed}


def edited(source: str, edit: Mapping[str, str]) -> str:
    """Return a template after an edit. Raises ValueError where the text to replace does not occur
    exactly once."""
    at = edit["at"]
    if source.count(at) != 1:
        raise ValueError(f"{TABLE.name}: the template holds {at!r} {source.count(at)} times")
    middle = edit.get("instead", at)
    return source.replace(at, edit.get("before", "") + middle + edit.get("after", ""))


MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
TODAY = "26 Jul 2024"
"""The date for templates that write `date_string`: Llama 3's own default."""
_USER = {"role": "user", "content": "a"}
_PROBE = [_USER, {"role": "assistant", "content": PLACEHOLDER}]
_RENDERING = threading.Lock()
"""Threads render one at a time: transformers stores a template's marks in an object that all calls
share."""
_ID = "abcdefghi"
"""The id of a call in probes: Mistral's templates require nine characters."""
_CALL = {"id": _ID, "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template with the tokenizer's special tokens: those that the template may name, and
    all as text."""

    source: str
    special: Mapping[str, str]
    tokens: tuple[str, ...] = ()
    """The special tokens as text; most templates end a turn with one."""

    @property
    def marked(self) -> bool:
        """Whether the template has {% generation %} marks."""
        return MARK.search(self.source) is not None

    @cached_property
    def marked_copy(self) -> ChatTemplate | None:
        """The copy of a known template that renders the same text with one mark for each answer;
        None if the template is unknown or has marks itself."""
        source = None if self.marked else marked_copy_of(self.source)
        return None if source is None else replace(self, source=source)

    @property
    def writes_today(self) -> bool:
        """Whether the text depends on the day on which it is rendered."""
        return "strftime_now" in self.source and "date_string" not in self.source

    @cached_property
    def mistake(self) -> str | None:
        """The line and cause of a Jinja syntax error, as in "3: unexpected '}'"; None
        without one."""
        from jinja2 import TemplateSyntaxError

        try:
            self.write([_USER])
        except SampleFault as fault:
            if isinstance(error := fault.__cause__, TemplateSyntaxError):
                return f"{error.lineno}: {error.message}"
        return None

    def write(self, turns: Sequence[Turn], prompt: bool = False, /, **more: Any) -> str:
        """Return the turns as text. prompt: whether a generation prompt follows.

        more: tools and other settings. Raises SampleFault if the template refuses the turns.
        """
        return self._write(turns, False, {"add_generation_prompt": prompt, **more})[0]

    def write_marked(self, turns: Sequence[Turn], /, **more: Any) -> tuple[str, Spans]:
        """Return the turns as text, and each marked span. Raises SampleFault as `write` does."""
        return self._write(turns, True, more)

    def _write(self, turns: Sequence[Turn], marks: bool, more: dict[str, Any]) -> tuple[str, Spans]:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with _RENDERING:
                texts, indices = render_jinja_template(
                    conversations=[list(turns)],
                    chat_template=self.source,
                    return_assistant_tokens_mask=marks,
                    **{**self.special, "date_string": TODAY, **more},
                )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            what, remedy = str(error), "mend the record, or choose another data.chat_template"
            silent = [i for i, turn in enumerate(turns) if turn.get("content") is None]
            if silent and isinstance(error, TypeError):
                what = f"messages[{silent[0]}] has calls and no content ({error})"
                remedy = "name a data.chat_template that writes tool_calls"
                if "tool_calls" in self.source:
                    remedy = 'write "content": "" there, or choose another data.chat_template'
            raise SampleFault(f"the chat template refuses it: {what}; {remedy}") from error
        return texts[0], list(indices[0]) if marks else []

    def text_of(self, turns: Sequence[Turn], prompt: bool = False, /) -> str | None:
        """Return the turns as text, as `write` does; None where the template refuses them."""
        try:
            return self.write(turns, prompt)
        except SampleFault:
            return None

    @cached_property
    def style(self) -> AnswerStyle:
        """How the template writes answers when a conversation has no settings of its own."""
        plain, prompt = self.text_of([_USER]), self.text_of([_USER], True)
        answered = self.text_of(_PROBE)
        if answered is None:
            return AnswerStyle(False, self.tokens)
        head, _, tail = answered.partition(PLACEHOLDER)
        known = plain is not None and prompt is not None
        asks = known and prompt != plain
        prompts = asks or (known and not head.removeprefix(plain or "").strip())
        own = between(self.write, [_USER], head, prompts, asks)
        tool = {"role": "tool", "content": PLACEHOLDER}
        tools = self._writes_placeholder([_USER, {"role": "assistant", "content": "a"}, tool])
        return AnswerStyle(prompts, self.tokens, (own, tail), tools, asks)

    @cached_property
    def written(self) -> frozenset[str]:
        """The roles, except the assistant's, whose turns the template renders at the positions
        where such turns usually are."""
        others = [role for role in ROLES if role != "assistant"]
        return frozenset(role for role in others if any(map(self._writes_placeholder, _asks(role))))

    @cached_property
    def writes_thoughts(self) -> bool:
        """Whether the template writes the thoughts of an answer, with or without calls.

        It may do so only for the last answer.
        """
        said = {"role": "assistant", "content": "b", "reasoning_content": PLACEHOLDER}
        calls = {**said, "tool_calls": [_CALL]}
        return any(self._writes_placeholder([_USER, one]) for one in (said, calls))

    def _writes_placeholder(self, turns: list[Turn]) -> bool:
        """Tell whether the placeholder in one of the turns appears in the rendered text."""
        return PLACEHOLDER in (self.text_of(turns) or "")

    @cached_property
    def reads_parts(self) -> bool:
        """Whether the template can read a content that is a list of parts."""
        part = {"type": "text", "text": PLACEHOLDER}
        text = self.text_of([{"role": "user", "content": [part]}]) or ""
        return PLACEHOLDER in text and "'text'" not in text and '"text"' not in text

    def reads(self, key: str) -> bool:
        """Tell whether the template reads a key of turns, by its name or by iterating over all."""
        return self._writes_all or re.search(rf"\b{re.escape(key)}\b", self.source) is not None

    @cached_property
    def _writes_all(self) -> bool:
        """Whether the template writes keys of a turn that it does not name."""
        return self._writes_placeholder([{**_USER, "uspft_other": PLACEHOLDER}])

    @cached_property
    def arguments(self) -> frozenset[type]:
        """The types of a call's arguments that the template renders as a JSON object: dict, str
        (JSON text), both or none. Neither text that is quoted again nor a dict in Python's notation
        counts, nor text beside an object that has a notation of its own (Gemma 4's)."""
        inner = json.dumps({"a": PLACEHOLDER}, ensure_ascii=False)
        found, plain = set[type](), False
        for given in ({"a": PLACEHOLDER}, inner):
            some = (one for said in ("", None) for one in _calls(given, {"content": said}))
            texts = (self.text_of(one) or "" for one in some)
            text = next((text for text in texts if PLACEHOLDER in text), "")
            if given is inner:
                counts = inner in text and (dict not in found or plain)
            else:
                counts, plain = bool(text) and "{'a'" not in text, inner in text
            found |= {type(given)} if counts else set()
        return frozenset(found)

    @cached_property
    def writes_none(self) -> frozenset[bool]:
        """The contents of a calling turn for which the template writes "None": the set has True if
        it does so for null, and False if it does so for absent content."""
        found: set[bool] = set()
        given: tuple[Any, ...] = ({}, "{}")
        for arguments in given:
            empty = _calls(arguments, {"content": ""})
            for said in ({"content": None}, {}):
                for silent, plain in zip(_calls(arguments, said), empty, strict=True):
                    text, without = self.text_of(silent), self.text_of(plain)
                    if text and without is not None and text.count("None") > without.count("None"):
                        found.add("content" in said)
        return frozenset(found)


def _calls(arguments: Any, said: Turn) -> list[list[Turn]]:
    """Return conversations with a turn that calls a function and also has the keys of `said`."""
    function = {"name": "f", "arguments": arguments}
    call = {"role": "assistant", "tool_calls": [{**_CALL, "function": function}], **said}
    seen = {"role": "tool", "content": "b", "name": "f", "tool_call_id": _ID}
    return [[_USER, call, seen], [_USER, call]]


def _asks(role: str) -> list[list[Turn]]:
    """Return conversations with a turn of the role whose content is the placeholder."""
    said, answered = {"role": role, "content": PLACEHOLDER}, {"role": "assistant", "content": "b"}
    if role == "user":
        return [[said], [said, answered]]
    if role in ("system", "developer"):
        return [[said, _USER, answered]]
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    said |= {"name": "f", "tool_call_id": _ID}
    return [[_USER, called, said], [_USER, answered, said]]


_KEY = "data.chat_template"
_SPECIAL = re.compile(r"<[|｜][^\s<>|｜]+[|｜]>|<(?:start|end)_of_turn>")
_REMEDY = (
    "name a Jinja file, data/templates/ has some: chatml.jinja (Qwen), llama3.jinja, gemma.jinja"
)


def template_of(data: DataBlock, tokenizer: Any) -> str | None:
    """Return the template that the recipe names, or the tokenizer's own. Raises DataError."""
    if data.chat_template is None:
        return own_template(tokenizer)
    try:
        template = Path(data.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise wrong_key(_KEY, f"cannot read {data.chat_template}: {error}", _REMEDY) from error
    if not template.strip():
        raise wrong_key(_KEY, f"{data.chat_template} is empty", _REMEDY)
    if mistake := ChatTemplate(template, {}).mistake:
        raise wrong_key(_KEY, f"{data.chat_template}:{mistake}", "mend it, or name another")
    return template


def own_template(tokenizer: Any) -> str | None:
    """Return the template that a tokenizer has by itself."""
    own = tokenizer.chat_template
    found: str | None = own.get("default") if isinstance(own, dict) else own
    return found


def template_problems(
    template: ChatTemplate | None, backend: Any, *, own: bool = False
) -> list[Finding]:
    """Return a finding for each reason why conversations cannot be written with a template.

    backend: the tokenizers.Tokenizer that reads what it writes. own: whether it is the tokenizer's
    own template; then its role marks may be plain text, as in OLMo 2 and Zephyr, if answers end in
    a special token.
    """
    if template is None:
        return [(_KEY, "the tokenizer has no chat template", _REMEDY)]
    if mistake := template.mistake:
        return [(_KEY, f"the tokenizer's own is no Jinja: line {mistake}", _REMEDY)]
    lacking = _lacking(template, backend)
    if lacking and own:  # accepted if a special token follows an answer
        behind = template.write(_PROBE).rpartition(PLACEHOLDER)[2].lstrip()
        if any(token and behind.startswith(token) for token in template.tokens):
            return []
    if lacking:
        what = f"it writes {', '.join(lacking)}, and the tokenizer has no such token"
        listed = json.dumps(lacking, ensure_ascii=False)
        return [(_KEY, what, f"add to model.add_tokens {listed}, or name another template")]
    return []


def _lacking(template: ChatTemplate, backend: Any) -> list[str]:
    """Return the strings of the template that look like special tokens but are not in the
    tokenizer."""
    text = template.text_of(_PROBE) or ""  # what it refuses is reported for each record
    names = dict.fromkeys(_SPECIAL.findall(text))
    return [name for name in names if backend.token_to_id(name) is None]


def template_notes(template: ChatTemplate, backend: Any) -> list[str]:
    """Return a line for each thing that a user should know although nothing is wrong.

    backend: as in `template_problems`.
    """
    found = []
    if lacking := _lacking(template, backend):
        what = f"the chat template's {', '.join(lacking)} are text"
        found.append(f"{what}: the tokenizer has no such tokens")
    try:
        text, spans = template.write_marked(_PROBE) if template.marked else ("", [])
    except SampleFault:
        spans = []
    outside = spans and not text[slice(*spans[-1])].rstrip().endswith(template.tokens)
    rest = text[spans[-1][1] :].lstrip() if outside else ""
    ends = [token for token in template.tokens if token and rest.startswith(token)]
    if end := max(ends, default="", key=len):  # the special token after the marks
        what = f"the chat template's marks end before {end}, which does not train"
        found.append(f"{what}; put {{% endgeneration %}} behind it to train it")
    prompt = template.text_of([_USER], True) or ""
    if spans and text.startswith(prompt) and (early := text[spans[-1][0] : len(prompt)]):
        what = f"the chat template's marks hold {early!r}, which the generation prompt has"
        found.append(f"{what}, and it trains; put {{% generation %}} behind it")
    if template.text_of(_PROBE) and not turn_ends(template):
        what = "the chat template ends an answer with no special token, and nothing teaches to stop"
        found.append(f"{what}; name a data.chat_template whose marks hold one behind each answer")
    if template.writes_today:
        what = "the chat template writes the day (strftime_now), so that tokens are of today"
        found.append(f"{what}; tomorrow the data is tokenised anew")
    return found


_MARKS = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


def without_marks(source: str) -> str:
    """Return a template that renders the same text without {% generation %} marks.

    Readers of templates other than transformers do not know the marks. Each becomes an {% if true
    %}, so that the white space around it stays the same.
    """
    return _MARKS.sub(lambda mark: f"{mark[1]}{'endif' if mark[2] else 'if true'}{mark[3]}", source)


def turn_ends(template: ChatTemplate) -> list[str]:
    """Return the special tokens with which the template ends an answer, and an answer with a call.

    The first token after an answer's text counts, since some templates then close the conversation
    too; after a call the last, since some templates close the call before the turn.
    """
    longest = sorted(filter(None, template.tokens), key=len, reverse=True)
    found: list[str] = []
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": PLACEHOLDER}}}
    answers: tuple[tuple[dict[str, Any], int], ...] = (
        ({"content": PLACEHOLDER}, 0),
        ({"content": "", "tool_calls": [call]}, -1),
    )
    for answer, which in answers:
        text = template.text_of([_USER, {"role": "assistant", **answer}]) or ""
        tail = text.rpartition(PLACEHOLDER)[2] if PLACEHOLDER in text else ""
        ends = re.findall("|".join(map(re.escape, longest)), tail) if longest else []
        found += ends[which:][:1]
    return list(dict.fromkeys(found))
