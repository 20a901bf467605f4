"""Which chat template the recipe means, what is wrong with it, and what to know of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.config.problems import Finding
from uspft.data.chat_template import ChatTemplate
from uspft.data.faults import SampleFault, wrong_key
from uspft.data.turns import STAND_IN

if TYPE_CHECKING:
    from uspft.config.recipe import DataBlock

_KEY = "data.chat_template"
_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": STAND_IN}]
_SPECIAL = re.compile(r"<[|｜][^\s<>|｜]+[|｜]>|<(?:start|end)_of_turn>")
_REMEDY = (
    "name a Jinja file, data/templates/ has some: chatml.jinja (Qwen), llama3.jinja, gemma.jinja"
)


def template_of(data: DataBlock, tokenizer: Any) -> str | None:
    """Return the template that the recipe names, or the tokenizer's own. Raises DataError."""
    if data.chat_template is None:
        return own_template(tokenizer)
    try:
        template = Path(data.chat_template).expanduser().read_text(encoding="utf-8")
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

    backend: the tokenizers.Tokenizer that reads what it writes. own: whether it came with that:
    what it calls the roles may be text then, as OLMo 2's and Zephyr's is, where answers end in a
    token.
    """
    if template is None:
        return [(_KEY, "the tokenizer has no chat template", _REMEDY)]
    if mistake := template.mistake:
        return [(_KEY, f"the tokenizer's own is no Jinja: line {mistake}", _REMEDY)]
    lacking = _lacking(template, backend)
    if lacking and not (own and _ends_in_a_token(template)):
        what = f"it writes {', '.join(lacking)}, and the tokenizer has no such token"
        listed = json.dumps(lacking, ensure_ascii=False)
        return [(_KEY, what, f"add to model.add_tokens {listed}, or name another template")]
    return []


def _lacking(template: ChatTemplate, backend: Any) -> list[str]:
    """Return what the template writes that reads as a special token, and is none here."""
    try:
        text = template.write(_PROBE)
    except SampleFault:  # the records' faults will tell what it refuses
        return []
    names = dict.fromkeys(_SPECIAL.findall(text))
    return [name for name in names if backend.token_to_id(name) is None]


def _ends_in_a_token(template: ChatTemplate) -> bool:
    """Tell whether a special token of the tokenizer stands behind an answer."""
    behind = template.write(_PROBE).rpartition(STAND_IN)[2].lstrip()
    return any(token and behind.startswith(token) for token in template.tokens)


def template_notes(template: ChatTemplate, backend: Any) -> list[str]:
    """Return a line for each thing that a user should know although nothing is wrong.

    backend: as of `template_problems`.
    """
    found = []
    if lacking := _lacking(template, backend):
        what = f"the chat template's {', '.join(lacking)} are text"
        found.append(f"{what}: the tokenizer has no such tokens")
    if end := _end_outside(template):
        what = f"the chat template's marks end before {end}, which does not train"
        found.append(f"{what}; put {{% endgeneration %}} behind it to train it")
    if template.writes_today:
        what = "the chat template writes the day (strftime_now), so that tokens are of today"
        found.append(f"{what}; tomorrow the data is tokenised anew")
    return found


def _end_outside(template: ChatTemplate) -> str:
    """Return the special token that ends an answer behind the marks; empty where none does."""
    try:
        text, spans = template.write_marked(_PROBE) if template.marked else ("", [])
    except SampleFault:
        return ""
    if not spans or text[slice(*spans[-1])].rstrip().endswith(template.tokens):
        return ""
    rest = text[spans[-1][1] :].lstrip()
    return max(
        (token for token in template.tokens if token and rest.startswith(token)),
        default="",
        key=len,
    )
