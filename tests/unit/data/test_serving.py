"""Templates without their marks render the same text, and the tokens that end a turn are found."""

from __future__ import annotations

import re

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support.chat_templates import CONVERSATIONS, ENDS, MARKED, UNMARKED
from tests.support.launch import ROOT
from uspft.data.chat_template import ChatTemplate
from uspft.data.faults import SampleFault
from uspft.data.serving import turn_ends, without_marks

SHIPPED = {path.name: path.read_text() for path in (ROOT / "data/templates").glob("*.jinja")}
SPACED = """{%- for m in messages %}
  {% if m.role == 'assistant' %}
    {% generation %}
  {{ m.content }}<|im_end|>
    {%- endgeneration -%}
  {% else %}
  {%+ generation +%}  {{ m.content }}
  {% endgeneration %}
  {% endif %}
{% endfor %}"""
"""White space that marks with and without signs, alone on a line or not, cut in each way."""


def texts(source: str) -> dict[str, str]:
    """What a template writes of each conversation that it does not refuse."""
    found = {}
    for name, fields in CONVERSATIONS.items():
        more = {"tools": fields["tools"]} if "tools" in fields else {}
        for prompt in (False, True):
            try:
                made = ChatTemplate(source, {"bos_token": "<s>"}).write(
                    fields["messages"], prompt, **more
                )
            except SampleFault:
                continue
            found[f"{name} {prompt}"] = made
    return found


@pytest.mark.parametrize("source", [*MARKED.values(), *SHIPPED.values(), SPACED])
def test_a_template_without_its_marks_writes_the_same(source: str) -> None:
    bare = without_marks(source)
    assert "generation" not in re.sub("add_generation_prompt", "", re.sub(r"\{#.*?#\}", "", bare))
    assert len(texts(source)) >= 8 and texts(bare) == texts(source)
    assert without_marks(bare) == bare
    plain = ImmutableSandboxedEnvironment()  # which knows no marks
    with pytest.raises(TemplateError, match="generation"):
        plain.from_string(source)
    plain.from_string(bare)


def test_marks_that_were_cut_out_would_change_the_text() -> None:
    cut = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", SPACED)
    assert texts(cut) != texts(SPACED)


def test_the_tokens_that_end_a_turn() -> None:
    ends = {name: turn_ends(ChatTemplate(source, {}, ENDS)) for name, source in MARKED.items()}
    assert ends == {
        "chatml": ["<|im_end|>"],
        "thoughts": ["<|im_end|>"],
        "open thoughts": ["<|im_end|>"],
        "llama": ["<|eot_id|>", "<|eom_id|>"],
        "mistral": ["</s>"],
        "closed": ["<|end|>", "<|endoftext|>"],
        "plain": [],
    }
    bare = {name: turn_ends(ChatTemplate(source, {}, ENDS)) for name, source in UNMARKED.items()}
    assert bare == ends


def test_a_call_that_is_closed_before_its_turn_does_not_end_it() -> None:
    tokens = (*ENDS, "</call>", "</calls>")
    source = MARKED["chatml"].replace("</tool_call>'", "</call>'").replace("'<|im_end|>'", "'</s>'")
    assert "</call>" in source
    assert turn_ends(ChatTemplate(source, {}, tokens)) == ["</s>"]


def test_shipped_templates_are_found() -> None:
    assert set(SHIPPED) == {"chatml.jinja", "gemma.jinja", "llama3.jinja"}
