"""The spans of a conversation's text that are answers, found by rendering with and without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from uspft.data.faults import SampleFault
from uspft.data.samples import Spans

Turn = dict[str, Any]
Write = Callable[..., str]
"""write(turns, prompt=False) → text; raises SampleFault where the template refuses the turns."""

PLACEHOLDER = "\ue0a0answer\ue0a1"
"""The text that replaces an answer; its private-use characters occur in no other text."""


class SpanUnknown(Exception):
    """The span of a turn cannot be found; the text says why."""


@dataclass(frozen=True)
class AnswerStyle:
    """How a template writes answers."""

    prompts: bool
    """Whether nothing but the generation prompt precedes an answer."""
    tokens: tuple[str, ...]
    """The special tokens as text; most templates end a turn with one."""
    around: tuple[str, str] | None = None
    """The texts that the template writes before and after an answer that ends a conversation, the
    first without the generation prompt; None if that is not known."""
    tools: bool = False
    """Whether it renders a tool's turn without a call before it, and so not as part of the call."""
    asks: bool = False
    """Whether it writes a generation prompt behind a user's turn."""


def turn_spans(
    write: Write, turns: Sequence[Turn], text: str, wanted: Sequence[int], style: AnswerStyle
) -> Spans:
    """Return for each wanted turn the span of `text` = write(turns) that the model has to generate.

    A span begins after the generation prompt, and ends with the token that ends the turn. It is
    found by rendering again without the turn, or with a placeholder in its place, and comparing.
    Raises SpanUnknown.
    """
    found_at_once = _all_at_once(write, turns, text, wanted, style)
    if found_at_once is not None:
        return found_at_once
    found: Spans = []
    for i in wanted:
        span = _grown(write, turns, text, i, style.asks) if style.prompts else None
        start, stop = span or _replaced(write, turns, text, i, style)
        if found and start < found[-1][1]:
            raise SpanUnknown(f"messages[{i}] cannot be told apart from the turn before it")
        found.append((start, _ended(text, start, stop, style.tokens)))
    return found


def _ended(text: str, start: int, stop: int, tokens: tuple[str, ...]) -> int:
    """Return where a turn ends: after its last special token, without the white space behind it,
    which is never generated."""
    bare = start + len(text[start:stop].rstrip())
    return bare if text.endswith(tokens, start, bare) else stop


def all_but(spans: Spans, text: str) -> Spans:
    """Return the complement of spans: the text outside of them."""
    bounds = [0, *(bound for span in spans for bound in span), len(text)]
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return [(start, stop) for start, stop in pairs if start < stop]


def _all_at_once(
    write: Write, turns: Sequence[Turn], text: str, wanted: Sequence[int], style: AnswerStyle
) -> Spans | None:
    """Return the spans of all wanted turns from one more rendering, with a placeholder for each.

    One rendering per turn would take quadratic time. Returns None if the texts between the
    placeholders are not in `text`, or fit in more than one way; each turn is then found by itself.
    """
    if style.around is None or len(wanted) < 2:
        return None
    if not style.tools and any(turns[i].get("tool_calls") for i in wanted):
        return None
    names = {i: f"{PLACEHOLDER}{i}\ue0a1" for i in wanted}
    try:
        rest = write(
            [_with(turn, names[i]) if i in names else turn for i, turn in enumerate(turns)]
        )
    except SampleFault:
        return None
    fixed, end = [], 0
    own, tail = style.around
    for name in names.values():
        before, found, rest = rest.partition(name)
        if not found:
            return None
        fixed.append(before[end:].removesuffix(own))
        end = _end_of_turn(tail, rest, style.tokens)
    fixed.append(rest[end:])
    if any(PLACEHOLDER in piece for piece in fixed):
        return None
    spans = _only_gaps(fixed, text)
    return spans and [(start, _ended(text, start, stop, style.tokens)) for start, stop in spans]


def _only_gaps(pieces: Sequence[str], text: str) -> Spans | None:
    """Return the gaps between pieces of a text, which begins with the first and ends with the last.

    None if the pieces are not in the text in this order, or fit in more than one way: then the
    leftmost fit differs from the rightmost.
    """
    first, *inner, last = pieces
    begin, end = len(first), len(text) - len(last)
    if not (all(inner) and text.startswith(first) and text.endswith(last)):
        return None
    starts, stops = [begin], []
    for piece in inner:
        stops.append(text.find(piece, starts[-1], end))
        if stops[-1] < 0:
            return None
        starts.append(stops[-1] + len(piece))
    stops.append(end)
    for piece, stop in zip(reversed(inner), reversed(stops[:-1]), strict=True):
        end = text.rfind(piece, begin, end)
        if end != stop:
            return None
    return list(zip(starts, stops, strict=True)) if starts[-1] <= stops[-1] else None


def _with(turn: Turn, answer: str) -> Turn:
    """Return a turn of the same role with another content and without calls."""
    parts = isinstance(turn.get("content"), list)
    content = [{"type": "text", "text": answer}] if parts else answer
    return {"role": turn["role"], "content": content}


def _grown(
    write: Write, turns: Sequence[Turn], text: str, i: int, asks: bool
) -> tuple[int, int] | None:
    """Return the span that turn i adds to the text of the turns before it; None if later turns
    change it: Qwen3's template leaves out thoughts once other turns follow."""
    try:
        before = _prompt(write, turns[:i], asks)
        if before is None or not text.startswith(before):
            return None
        through = text if i + 1 == len(turns) else write(turns[: i + 1])
    except SampleFault:
        return None
    grows = text.startswith(through) and len(through) > len(before)
    return (len(before), len(through)) if grows else None


def _prompt(write: Write, turns: Sequence[Turn], asks: bool) -> str | None:
    """Return the turns with the generation prompt; None where the template has one (`asks`) but
    does not write it here.

    Zephyr's is written in the loop over turns, so that a first answer's header would count as
    the answer's. Raises SampleFault.
    """
    prompt = write(turns, True)
    return None if asks and prompt == write(turns) else prompt


def _replaced(
    write: Write, turns: Sequence[Turn], text: str, i: int, style: AnswerStyle
) -> tuple[int, int]:
    """Return the span in which the text differs from one with a placeholder for turn i's answer.

    Raises SpanUnknown.
    """
    here = f"messages[{i}]"
    replaced = _with(turns[i], PLACEHOLDER)
    try:
        alone = write([*turns[:i], replaced])
        later = turns[i + 1 :]
        whole = write([*turns[:i], replaced, *later]) if later else alone
    except SampleFault as fault:
        raise SpanUnknown(
            f"with another answer in {here} {str(fault).partition(';')[0]}"
        ) from fault
    if not alone.count(PLACEHOLDER) == whole.count(PLACEHOLDER) == 1:
        raise SpanUnknown(f"it does not write {here} once")
    head, _, tail = alone.partition(PLACEHOLDER)
    before, _, after = whole.partition(PLACEHOLDER)
    own = between(write, turns[:i], head, style.prompts, style.asks)
    own = own or (style.around[0] if style.around else "")  # an answer before it may omit its own
    start = len(before) - len(own) if before.endswith(own) else len(before)
    shared = _shared(before[:start], text)
    if before[shared:start].strip():
        raise SpanUnknown(f"{here} is not where another answer would be")
    rest = after[_end_of_turn(tail, after, style.tokens) :]
    if not text.endswith(rest) or len(text) - len(rest) < shared:
        raise SpanUnknown(f"what follows {here} depends on it")
    return shared, len(text) - len(rest)


def _end_of_turn(tail: str, after: str, tokens: tuple[str, ...]) -> int:
    """Return the length of the part of `after`, the text after an answer, that belongs to its turn.

    tail: the text after the answer if no turn follows. Some templates also close the conversation
    there (Phi-3 with <|endoftext|>); then the last special token that both share ends the turn.
    """
    if after.startswith(tail):
        return len(tail)
    both = tail[: _shared(tail, after)]
    return max((both.rfind(token) + len(token) for token in tokens if token in both), default=0)


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts share at their start."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def between(write: Write, turns: Sequence[Turn], head: str, prompts: bool, asks: bool) -> str:
    """Return the text that the template inserts between generation prompt and answer.

    Qwen3's inserts empty thoughts. head: the text before the answer.
    """
    try:
        prompt = _prompt(write, turns, asks) if prompts else write(turns)
    except SampleFault:
        return ""
    own = head[len(prompt) :] if prompt is not None and head.startswith(prompt) else ""
    return own if prompts or not own.strip() else ""
