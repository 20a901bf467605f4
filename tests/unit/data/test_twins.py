"""Which templates are known, and how a twin is made of one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.chat_templates import CONVERSATIONS, ENDS, MARKED, UNMARKED, render
from tests.support.data_cases import TOKENIZER
from uspft.data import twins
from uspft.data.chat_template import ChatTemplate
from uspft.data.known_fields import ROLES
from uspft.data.tokenise import TextTokeniser
from uspft.data.twins import digest, edited, models, twin_of

SOURCE = UNMARKED["chatml"]
ANSWER = "{{ m.content or '' }}"
CLOSED = "{{ '<|im_end|>' }}{{ '\\n' }}"
MARKS = [
    {"at": ANSWER, "before": "{% generation %}"},
    {"at": CLOSED, "instead": CLOSED.replace("}}{{", "}}{% endgeneration %}{{")},
]


class Once(ChatTemplate):
    """A template of which all is known, and that is not to be rendered as it is."""

    written = frozenset(ROLES)
    arguments = frozenset({dict})
    writes_none = frozenset[bool]()

    def write(self, *_: Any, **__: Any) -> str:
        raise AssertionError("rendered without marks")


def known(monkeypatch: pytest.MonkeyPatch, *edits: dict[str, str]) -> None:
    """SOURCE is a template whose twin has these edits."""
    table = {digest(SOURCE): {"model": "a", "edits": edits}}
    monkeypatch.setattr(twins, "models", lambda: table)


def test_a_template_is_known_by_its_text_but_for_a_newline_at_its_end() -> None:
    assert digest(SOURCE) == digest(SOURCE + "\n") != digest(SOURCE + "\n\n")
    assert digest(SOURCE) != digest(SOURCE.replace("assistant", "assistent", 1))
    assert twin_of(SOURCE) is None
    assert ChatTemplate(SOURCE, {}).twin is None and ChatTemplate(MARKED["chatml"], {}).twin is None


def test_an_edit_is_made_where_its_text_stands_once() -> None:
    assert edited("a b c", {"at": "b", "before": "1", "after": "2"}) == "a 1b2 c"
    assert edited("a b c", {"at": "b ", "instead": ""}) == "a c"
    for text, times in (("x", 0), ("b", 2)):
        with pytest.raises(ValueError, match=rf"holds '{text}' {times} times"):
            edited("a b b", {"at": text, "before": "1"})


def test_the_table_has_marks_for_each_of_its_templates() -> None:
    assert len({known["model"] for known in models().values()}) == len(models()) >= 12
    for hashed, known in models().items():
        assert re.fullmatch(r"[0-9a-f]{64}", hashed)
        assert all(edit.keys() <= {"at", "before", "after", "instead"} for edit in known["edits"])
        put = "".join(edit.get(key, "") for edit in known["edits"] for key in edit if key != "at")
        assert put.count("{% generation %}") == len(re.findall(r"\{%-? endgeneration %\}", put)) > 0


def test_a_known_template_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = CONVERSATIONS["tools"]
    told = render(fields, ChatTemplate(SOURCE, {}, ENDS), "assistant")
    with pytest.raises(AssertionError, match="rendered without marks"):
        render(fields, Once(SOURCE, {}, ENDS), "assistant")
    known(monkeypatch, *MARKS)
    assert render(fields, Once(SOURCE, {}, ENDS), "assistant") == told


def test_a_twin_without_one_mark_for_each_answer_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = CONVERSATIONS["answers"]
    told = render(fields, ChatTemplate(SOURCE, {}, ENDS), "assistant")
    other = "{{ '<|im_start|>' + m.role"
    known(monkeypatch, *MARKS, {"at": other, "before": "{% generation %}a{% endgeneration %}"})
    template = ChatTemplate(SOURCE, {}, ENDS)
    assert template.twin and len(template.twin.write_marked(fields["messages"])[1]) == 5
    assert render(fields, template, "assistant") == told


def test_tokenised_data_is_named_after_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(source: str) -> str:
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        return TextTokeniser(tokenizer, source, "assistant").identity()

    told, another = identity(SOURCE), identity(MARKED["closed"])
    known(monkeypatch, *MARKS)
    marked = identity(SOURCE)
    known(monkeypatch, *MARKS, {"at": "{{ '<|im_start|>' + m.role", "after": ""})
    assert identity(SOURCE) == marked != told and identity(MARKED["closed"]) == another
    known(monkeypatch, {"at": ANSWER, "before": "a"})
    assert identity(SOURCE) not in (marked, told)
