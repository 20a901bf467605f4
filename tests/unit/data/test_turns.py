"""Rendering with and without each turn finds the spans that marks enclose, or says why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.chat_templates import CONVERSATIONS, ENDS, MARKED, UNMARKED
from uspft.data.faults import SampleFault
from uspft.data.rendering import ChatTemplate
from uspft.data.turns import Manner, Untold, all_but, turn_spans

SPECIAL = {"bos_token": "<s>"}


def both(habit: str, conversation: str) -> tuple[list[str], list[str]]:
    """The trained texts that marks enclose, and those that rendering with and without finds."""
    fields = dict(CONVERSATIONS[conversation])
    turns = fields.pop("messages")
    text, spans = ChatTemplate(MARKED[habit], SPECIAL).write_marked(turns, **fields)
    template = ChatTemplate(UNMARKED[habit], SPECIAL, ENDS)
    assert template.write(turns, **fields) == text and not template.marked

    def write(some: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        return template.write(some, prompt, **fields)

    asked = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    found = turn_spans(write, turns, text, asked, Manner(template.prompts, ENDS))
    return [text[a:b] for a, b in spans], [text[a:b] for a, b in found]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("habit", MARKED)
def test_the_spans_are_those_of_the_marks(habit: str, conversation: str) -> None:
    marked, found = both(habit, conversation)
    assert found == marked and len(found) >= 1


def test_a_turns_end_trains_and_the_white_space_behind_it_does_not() -> None:
    _, found = both("chatml", "answers")
    assert found == ["Hello<|im_end|>", "Hello<|im_end|>"]
    turns = CONVERSATIONS["answers"]["messages"]
    template = ChatTemplate(UNMARKED["chatml"], {})
    # Seen to fail: without the tokenizer's special tokens the line break behind is trained.
    ((start, stop),) = turn_spans(
        template.write, turns, template.write(turns), [4], Manner(True, ())
    )
    assert template.write(turns)[start:stop] == "Hello<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages | length }}", "it does not write messages[1] once"),
        (
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{{ messages[1].content }}",
            "it does not write messages[1] once",
        ),
        (
            "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
            "{{ messages[1].content | length }}",
            "what follows messages[1] depends on it",
        ),
        (
            "{{ messages[1].content | length }}{% for m in messages %}{{ m.role + m.content }}"
            "{% endfor %}",
            "messages[1] is not where another answer would be",
        ),
        (
            "{% if messages[1].content | length != 5 %}{{ raise_exception('five') }}{% endif %}"
            "{{ messages[1].content }}",
            "with another answer in messages[1] the chat template refuses it: five",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_reason(source: str, reason: str) -> None:
    turns = CONVERSATIONS["a question last"]["messages"]
    template = ChatTemplate(source, {})
    with pytest.raises(Untold) as caught:
        turn_spans(template.write, turns, template.write(turns), [1], Manner(False, ENDS))
    assert str(caught.value) == reason


def test_templates_that_refuse_a_first_answer_are_asked_otherwise() -> None:
    source = "{{ raise_exception('empty') if not messages }}" + UNMARKED["chatml"]
    turns = CONVERSATIONS["one answer"]["messages"][1:]
    template = ChatTemplate(source, {})
    with pytest.raises(SampleFault, match="empty"):
        template.write([])
    text = template.write(turns)
    ((start, stop),) = turn_spans(template.write, turns, text, [0], Manner(True, ENDS))
    assert text[start:stop] == "Hello<|im_end|>"


def test_all_but_some_spans() -> None:
    assert all_but([], "abc") == [(0, 3)]
    assert all_but([(0, 1), (2, 3)], "abcd") == [(1, 2), (3, 4)]
    assert all_but([(0, 4)], "abcd") == []
