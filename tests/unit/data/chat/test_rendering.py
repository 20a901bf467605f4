"""Records as text with the spans that train, and what a template leaves out, which is an error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chat_templates import (
    CONVERSATIONS,
    ENDS,
    MARKED,
    TOOLS,
    UNMARKED,
    call,
    render,
    turn,
)
from uspft.data.chat.template import ChatTemplate
from uspft.data.faults import SampleFault

BOTH = pytest.mark.parametrize("source", [MARKED["chatml"], UNMARKED["chatml"]], ids=["m", "u"])
TURNS = CONVERSATIONS["answers"]["messages"]
ANSWER = "Hello<|im_end|>"


def trained(fields: dict[str, Any], source: str, train_on: str = "assistant") -> list[str]:
    rendered = render(fields, ChatTemplate(source, {}, ENDS), train_on)
    return [rendered.text[a:b] for a, b in rendered.spans]


def weighing(*weights: int | None) -> dict[str, Any]:
    """TURNS with a weight for each that has one."""
    pairs = zip(TURNS, weights, strict=True)
    return {"messages": [t if w is None else {**t, "weight": w} for t, w in pairs]}


@BOTH
def test_which_answers_train(source: str) -> None:
    fields = {"messages": TURNS}
    text = ChatTemplate(source, {}).write(TURNS)
    assert trained(fields, source) == [ANSWER, ANSWER]
    assert trained(fields, source, "last") == [ANSWER]
    last = render(fields, ChatTemplate(source, {}, ENDS), "last").spans
    assert last == [(text.rindex("Hello"), len(text) - 1)]
    assert trained(fields, source, "all") == [text]
    open_end = {"messages": TURNS[:4]}  # a question comes last
    assert trained(open_end, source, "last") == [ANSWER]


@BOTH
def test_a_turns_own_weight_wins(source: str) -> None:
    text = ChatTemplate(source, {}).write(TURNS)
    middle = text.index("Hello")
    own = weighing(None, None, 0, None, None)
    for train_on in ("assistant", "last"):
        assert trained(own, source, train_on) == [ANSWER]
    assert trained(weighing(None, None, 1, None, 0), source, "last") == [ANSWER]
    first = render(weighing(None, 0, 1, 0, 0), ChatTemplate(source, {}, ENDS), "assistant")
    assert first.spans == [(middle, middle + len(ANSWER))]
    assert trained(own, source, "all") == [text[:middle], text[middle + len(ANSWER) :]]
    assert trained(weighing(None, None, 0, None, 0), source) == []
    for weights, train_on in (((None, 1, None, None, None), "last"), ((0,) * 5, "all")):
        with pytest.raises(SampleFault, match=r"has the weight ., and is no answer"):
            trained(weighing(*weights), source, train_on)


def test_marks_that_are_not_one_for_each_answer() -> None:
    source = MARKED["chatml"].replace(
        "{{ m.content or '' }}", "{{ m.content }}{%- endgeneration -%}{%- generation -%}"
    )
    assert trained({"messages": TURNS}, source) == [ANSWER, ANSWER]
    with pytest.raises(SampleFault, match="has 4 marked parts for 2 answers"):
        trained({"messages": TURNS}, source, "last")


@BOTH
def test_tools_calls_and_thoughts_go_to_the_template(source: str) -> None:
    one, two, three, four = trained(CONVERSATIONS["tools"], source)
    assert one == '<tool_call>look{"at": "the moon"}</tool_call><|im_end|>'
    assert (two, four) == ("A moon.<|im_end|>", "A sun.<|im_end|>") and "the sun" in three
    rendered = render(CONVERSATIONS["tools"], ChatTemplate(source, {}, ENDS), "last")
    assert rendered.text.startswith('<|im_start|>system\n[{"type": "function"')
    seen = "{{ messages[0].mood }}{{ style }}{{ messages[0].reasoning_content }}"
    fields = {
        "messages": [turn("user", "Hi", mood="glad", thinking="Hm."), turn("assistant", "Hello")],
        "chat_template_kwargs": {"style": "brief"},
    }
    text = render(fields, ChatTemplate(seen + source, {}, ENDS), "assistant").text
    assert text.startswith("gladbriefHm.<|im_start|>user\nHi")


@BOTH
def test_parts_are_joined_for_a_template_that_reads_none(source: str) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    fields = {"messages": [turn("user", "Hi"), {"role": "assistant", "content": parts}]}
    assert trained(fields, source) == [ANSWER]
    # Seen to fail where they are handed on: Jinja's trim writes a list as Python shows it.
    reads_none = source.replace("m.content or ''", "(m.content or '') | trim")
    assert trained(fields, reads_none) == [ANSWER]
    reads = "{%- for p in m.content -%}{{ p.text + '|' }}{%- endfor -%}"
    own = source.replace("{{ m.content or '' }}", reads).replace(
        "m.content +", "m.content[0].text +"
    )
    fields["messages"][0] = {"role": "user", "content": parts[:1]}
    assert trained(fields, own) == ["Hel|lo|<|im_end|>"]


def test_a_turn_that_the_template_leaves_out_is_refused() -> None:
    source = "{%- for m in messages if m.role != 'developer' -%}{{ m.content }}{%- endfor -%}"
    turns = [turn("developer", "Be brief."), turn("user", "Hi"), turn("assistant", "Hello")]
    with pytest.raises(SampleFault, match=r"leaves out messages\[0\], of the role 'developer'; "):
        trained({"messages": turns}, source, "all")
    with pytest.raises(SampleFault, match="does not write tools; "):
        trained({"messages": turns[1:], "tools": TOOLS}, source, "all")
    calls = [turns[1], turn("assistant", "", tool_calls=[call("look")])]
    for train_on, later in (("assistant", []), ("last", turns[1:]), ("all", turns[1:])):
        with pytest.raises(SampleFault, match="leaves out the call of 'look'; "):
            trained({"messages": [*calls, *later]}, source, train_on)


def test_a_template_that_needs_content_says_whose() -> None:
    source = MARKED["chatml"].replace("m.content or ''", "m.content + ''")
    what = r"refuses it: messages\[1\] has calls and no content \(unsupp.*\); "
    with pytest.raises(SampleFault, match=what + 'write "content": "" there'):
        trained(CONVERSATIONS["tools"], source)
    deaf = "{%- for m in messages -%}{{ m.content + '' }}{%- endfor -%}"
    with pytest.raises(SampleFault, match=what + "name a .* that writes tool_calls$"):
        trained(CONVERSATIONS["tools"], deaf, "all")


def test_a_template_without_marks_that_tells_nothing_is_refused() -> None:
    with pytest.raises(SampleFault) as caught:
        trained({"messages": TURNS}, "{{ messages | length }}Be brief.Hi Hello")
    what, _, remedy = str(caught.value).partition("; ")
    assert what == (
        "the chat template has no {% generation %} marks, and it does not write messages[2] once"
    )
    assert "data.chat_template" in remedy


def test_the_date_is_a_fixed_one() -> None:
    source = (
        "{%- if date_string is not defined -%}{%- set date_string = strftime_now('%Y') -%}"
        "{%- endif -%}{{ date_string }}" + UNMARKED["chatml"]
    )
    template = ChatTemplate(source, {}, ENDS)
    assert template.write(TURNS).startswith("26 Jul 2024<|im_start|>")
    assert not template.writes_today
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).writes_today
    assert template.write(TURNS, date_string="1 May 2026").startswith("1 May 2026<")


ASKED = [turn("user", "What is 6 * 7?"), turn("assistant", "Let me look.")]
SAID = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"


def only(condition: str) -> str:
    """A template that writes the turns of which a condition holds."""
    return f"{{%- for m in messages if {condition} -%}}{SAID}{{%- endfor -%}}"


KNOWN_OF_IT = ("written", "style", "arguments", "writes_none", "writes_thoughts")
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
