"""What a template leaves out is refused, wherever else its text stands; what it writes is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chat_templates import CONVERSATIONS, ENDS, UNMARKED, render, turn
from uspft.data.chat.template import ChatTemplate
from uspft.data.faults import SampleFault

ASKED = [turn("user", "What is 6 * 7?"), turn("assistant", "Let me look.")]
SAID = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"


def only(condition: str) -> str:
    """A template that writes the turns of which a condition holds."""
    return f"{{%- for m in messages if {condition} -%}}{SAID}{{%- endfor -%}}"


KNOWN_OF_IT = ("written", "manner", "arguments", "writes_none", "writes_thoughts")
KNOWN = only("m.role in ('system', 'user', 'assistant')")
FIRST = "{%- for m in messages -%}{%- if m.role != 'system' or loop.first -%}"
FIRST += SAID + "{%- endif -%}{%- endfor -%}"
"""One that writes a system message in the first place only."""


def checked(source: str, *turns: dict[str, Any], **more: Any) -> int:
    """How many texts are rendered of a conversation once its template is known, if it is taken."""
    template = ChatTemplate(source, {}, ENDS)
    _ = [getattr(template, name) for name in KNOWN_OF_IT]
    written = []

    class Counted(ChatTemplate):
        def write(self, *turns: Any, **more: Any) -> str:
            written.append(turns)
            return template.write(*turns, **more)

    counted = Counted(source, {}, ENDS)
    counted.__dict__.update({name: vars(template)[name] for name in KNOWN_OF_IT})
    render({"messages": list(turns), **more}, counted, "all")
    return len(written)


@pytest.mark.parametrize(
    ("source", "turns", "lost"),
    [
        (KNOWN, [*ASKED, turn("tool", "42"), turn("assistant", "It is 42.")], "2], of the role 't"),
        (KNOWN, [turn("developer", "Hi"), turn("user", "Hi"), ASKED[1]], "0], of the role 'd"),
        (FIRST, [*ASKED, turn("system", "look"), turn("assistant", "Yes")], "2], of the role 's"),
        (FIRST, [*ASKED, turn("system", "Go on"), turn("user", "Go on")], "2], of the role 's"),
    ],
)
def test_a_turn_whose_text_stands_elsewhere(
    source: str, turns: list[dict[str, Any]], lost: str
) -> None:
    with pytest.raises(SampleFault) as caught:
        checked(source, *turns)
    assert f"leaves out messages[{lost}" in str(caught.value)


@pytest.mark.parametrize("habit", UNMARKED)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_what_is_written_needs_no_more_than_one_rendering(habit: str, conversation: str) -> None:
    fields = dict(CONVERSATIONS[conversation])
    if fields.get("tools") and "tools" not in UNMARKED[habit]:
        del fields["tools"]
    assert checked(UNMARKED[habit], *fields.pop("messages"), **fields) == 1


def test_turns_that_say_the_same_need_no_more() -> None:
    again = [turn("user", "Go on"), turn("assistant", "<think>Go on</think>Go on")] * 9
    without_thoughts = KNOWN.replace("m.content", "m.content.split('</think>')[-1]")
    assert checked(KNOWN, *again) == checked(without_thoughts, *again) == 1


def test_a_text_that_the_template_changes_is_not_lost() -> None:
    upper = KNOWN.replace("m.content", "m.content | upper")
    assert checked(upper, *ASKED) == 2
    empty = turn("developer", " ")
    assert checked(KNOWN, empty, *ASKED) == 1


def test_roles_that_a_template_writes() -> None:
    assert ChatTemplate(KNOWN, {}).written == {"system", "user"}
    calls = "{%- if messages[1] and not messages[1].tool_calls -%}{{ raise_exception('') }}"
    asks = ChatTemplate(calls + "{%- endif -%}" + only("m.role == 'tool'"), {})
    assert asks.written == {"tool"}
