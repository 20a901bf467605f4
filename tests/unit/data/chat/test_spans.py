"""Rendering with and without each turn finds the spans that marks enclose, or says why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.chat_templates import CONVERSATIONS, ENDS, MARKED, UNMARKED, turn
from uspft.data.chat.spans import AnswerStyle, SpanUnknown, all_but, turn_spans
from uspft.data.chat.template import ChatTemplate
from uspft.data.faults import SampleFault

SPECIAL = {"bos_token": "<s>"}
ANSWER = "Hello<|im_end|>"


def both(habit: str, conversation: str, alone: bool = False) -> tuple[list[str], list[str]]:
    """The trained texts that marks enclose, and those that rendering with and without finds.

    alone: whether each turn is told alone, as where several cannot be told at once.
    """
    fields = dict(CONVERSATIONS[conversation])
    turns = fields.pop("messages")
    text, spans = ChatTemplate(MARKED[habit], SPECIAL).write_marked(turns, **fields)
    template = ChatTemplate(UNMARKED[habit], SPECIAL, ENDS)
    assert template.write(turns, **fields) == text and not template.marked

    def write(some: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        return template.write(some, prompt, **fields)

    asked = [i for i, one in enumerate(turns) if one["role"] == "assistant"]
    style = replace(template.style, around=None) if alone else template.style
    found = turn_spans(write, turns, text, asked, style)
    return [text[a:b] for a, b in spans], [text[a:b] for a, b in found]


@pytest.mark.parametrize("alone", [False, True], ids=["at once", "alone"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("habit", MARKED)
def test_the_spans_are_those_of_the_marks(habit: str, conversation: str, alone: bool) -> None:
    marked, found = both(habit, conversation, alone)
    assert found == marked and len(found) >= 1


def texts_written(source: str, turns: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many texts are written to tell the answers' spans, and these spans."""
    template = ChatTemplate(source, SPECIAL, ENDS)
    text, style, written = template.write(turns), template.style, []

    def write(some: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        written.append(len(some))
        return template.write(some, prompt)

    asked = [i for i, one in enumerate(turns) if one["role"] == "assistant"]
    found = turn_spans(write, turns, text, asked, style)
    return len(written), [text[a:b] for a, b in found]


@pytest.mark.parametrize("habit", ["chatml", "thoughts", "llama", "closed"])
def test_answers_are_told_at_once_however_many_there_are(habit: str) -> None:
    # The same question again and again: only together do its places tell which is which.
    pair = [turn("user", "Go on"), turn("assistant", "Hello")]
    count, found = texts_written(UNMARKED[habit], pair * 20)
    assert count == 1 and len(found) == 20 and all("Hello" in one for one in found)


def test_answers_that_could_be_elsewhere_are_told_alone() -> None:
    hello = turn("assistant", "Hello")
    inside = "One<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\nTwo"
    turns = [turn("user", "Hi"), turn("assistant", inside), turn("user", "Go on"), hello]
    count, found = texts_written(UNMARKED["chatml"], turns)
    assert count > 1 and found == [f"{inside}<|im_end|>", ANSWER]


def test_what_a_tool_answers_is_not_the_assistants_where_a_template_writes_it_so() -> None:
    # Gemma 4: the turn that calls goes on with what was answered, and a tool alone is not written.
    answered = (
        "{%- if m.tool_calls and not loop.last -%}"
        "{{ '<|' + messages[loop.index].content + '|>' }}{%- endif -%}"
        "{%- elif m.role == 'tool' -%}{%- else -%}"
    )
    source = UNMARKED["chatml"].replace("{%- else -%}{{", answered + "{{", 1)
    assert not ChatTemplate(source, SPECIAL, ENDS).style.tools
    count, found = texts_written(source, CONVERSATIONS["tools"]["messages"])
    # Seen to fail where stand-ins were put for calls too: the moon was trained.
    assert count > 1 and len(found) == 4 and not any("|a " in one for one in found)


def test_the_thoughts_of_the_last_of_two_answers_train() -> None:
    two = [turn("user", "Hi"), turn("assistant", "Hm"), turn("assistant", "Hello")]
    _, found = texts_written(UNMARKED["thoughts"], two)
    template = ChatTemplate(UNMARKED["thoughts"], SPECIAL, ENDS)
    text = template.write(two)
    ((start, stop),) = turn_spans(template.write, two, text, [2], template.style)
    assert text[start:stop] == found[1] == "<think>\n\n</think>\n\n" + ANSWER


def test_a_turns_end_trains_and_the_white_space_behind_it_does_not() -> None:
    _, found = both("chatml", "answers")
    assert found == ["Hello<|im_end|>", "Hello<|im_end|>"]
    turns = CONVERSATIONS["answers"]["messages"]
    template = ChatTemplate(UNMARKED["chatml"], {})
    # Seen to fail: without the tokenizer's special tokens the line break behind is trained.
    ((start, stop),) = turn_spans(
        template.write, turns, template.write(turns), [4], AnswerStyle(True, ())
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
    with pytest.raises(SpanUnknown) as caught:
        turn_spans(template.write, turns, template.write(turns), [1], AnswerStyle(False, ENDS))
    assert str(caught.value) == reason


def test_a_first_answers_header_does_not_train_where_the_prompt_follows_turns_only() -> None:
    # Zephyr: the generation prompt is inside the loop over turns, so that no turns have none.
    source = UNMARKED["chatml"]
    start = source.index("{%- if add_generation_prompt")
    inside = source[start:].replace("if add_gen", "if loop.last and add_gen")
    source = source[:start].removesuffix("{%- endfor -%}") + inside + "{%- endfor -%}"
    turns = [turn("assistant", "Hello"), turn("user", "Hi")]
    # Seen to fail: the header trained with the answer.
    assert texts_written(source, turns)[1] == [ANSWER]
    assert texts_written(source, turns[::-1])[1] == [ANSWER]


def test_templates_that_refuse_a_first_answer_are_asked_otherwise() -> None:
    source = "{{ raise_exception('empty') if not messages }}" + UNMARKED["chatml"]
    turns = CONVERSATIONS["one answer"]["messages"][1:]
    template = ChatTemplate(source, {})
    with pytest.raises(SampleFault, match="empty"):
        template.write([])
    text = template.write(turns)
    ((start, stop),) = turn_spans(template.write, turns, text, [0], AnswerStyle(True, ENDS))
    assert text[start:stop] == "Hello<|im_end|>"


def test_all_but_some_spans() -> None:
    assert all_but([], "abc") == [(0, 3)]
    assert all_but([(0, 1), (2, 3)], "abcd") == [(1, 2), (3, 4)]
    assert all_but([(0, 4)], "abcd") == []
