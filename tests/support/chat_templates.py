"""Marked chat templates, each with a habit that real ones have, and without their marks."""

from __future__ import annotations

import re
from typing import Any

from uspft.data.chat import rendering
from uspft.data.chat.template import ChatTemplate
from uspft.data.samples import Origin, Record, Rendered

_OPEN, _CLOSE = "{%- generation -%}", "{%- endgeneration -%}"
_START = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
_OTHER = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + c.function.arguments"
    " | tojson + '</tool_call>' }}{% endfor %}"
)


def _chatml(answer: str, opening: str = "") -> str:
    tools = "{%- if tools -%}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}"
    return (
        f"{tools}{{%- endif -%}}{{%- for m in messages -%}}{{%- if m.role == 'assistant' -%}}"
        f"{{{{ '<|im_start|>assistant\\n' }}}}{answer}"
        f"{{%- else -%}}{_OTHER}{{%- endif -%}}{{%- endfor -%}}"
        + _START.replace("\\n'", f"\\n{opening}'")
    )


_THOUGHTS = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)

MARKED = {
    "chatml": _chatml(
        _OPEN + "{{ m.content or '' }}" + _CALLS + "{{ '<|im_end|>' }}" + _CLOSE + "{{ '\\n' }}"
    ),
    # Qwen3: earlier answers lose their thoughts, the last one has them even if they are empty.
    "thoughts": _THOUGHTS
    + _chatml(
        _OPEN
        + "{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}"
        + "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif -%}"
        + "{{ m.content or '' }}"
        + _CALLS
        + "{{ '<|im_end|>' }}"
        + _CLOSE
        + "{{ '\\n' }}"
    ),
    # QwQ: the prompt opens thoughts, which answers that follow do not have.
    "open thoughts": _chatml(
        _OPEN
        + "{{ (m.content or '').split('</think>')[-1] }}"
        + _CALLS
        + "{{ '<|im_end|>' }}"
        + _CLOSE
        + "{{ '\\n' }}",
        "<think>\\n",
    ),
    # Llama 3.1: a call ends with another token, contents are trimmed, tools' answers are JSON.
    "llama": (
        "{{ bos_token }}{%- for m in messages -%}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
        "{%- if m.role == 'assistant' -%}"
        + _OPEN
        + "{%- if m.tool_calls -%}{{ (m.tool_calls | map(attribute='function') | list) | tojson }}"
        + "{{ '<|eom_id|>' }}{%- else -%}{{ m.content | trim + '<|eot_id|>' }}{%- endif -%}"
        + _CLOSE
        + "{%- elif m.role == 'tool' -%}{{ m.content | tojson + '<|eot_id|>' }}"
        "{%- else -%}{{ m.content | trim + '<|eot_id|>' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"
    ),
    # Mistral: no generation prompt, tools stand before the last question.
    "mistral": (
        "{{ bos_token }}{%- set ns = namespace(last=0) -%}{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
        + _OPEN
        + "{%- if m.content -%}{{ ' ' + m.content }}{%- endif -%}"
        + _CALLS
        + "{{ '</s>' }}"
        + _CLOSE
        + "{%- else -%}{%- if tools and loop.index0 == ns.last -%}{{ tools | tojson }}{%- endif -%}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{%- endif -%}{%- endfor -%}"
    ),
    # Phi-3: the whole conversation ends with a token of its own.
    "closed": (
        "{%- for m in messages -%}{{ '<|' + m.role + '|>\\n' }}{%- if m.role == 'assistant' -%}"
        + _OPEN
        + "{{ m.content or '' }}"
        + _CALLS
        + "{{ '<|end|>' }}{%- if loop.last -%}{{ '\\n<|endoftext|>' }}{%- endif -%}"
        + _CLOSE
        + "{%- if not loop.last -%}{{ '\\n' }}{%- endif -%}"
        + "{%- else -%}{{ m.content + '<|end|>\\n' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
    ),
    # No generation prompt at all, and an empty line ends a turn.
    "plain": (
        "{%- for m in messages -%}{{ m.role + ': ' }}{%- if m.role == 'assistant' -%}"
        + _OPEN
        + "{{ m.content or '' }}"
        + _CALLS
        + "{{ '\\n\\n' }}"
        + _CLOSE
        + "{%- else -%}{{ m.content + '\\n\\n' }}{%- endif -%}{%- endfor -%}"
    ),
}
UNMARKED = {
    name: re.sub(r"\{%- (end)?generation -%\}", "", source) for name, source in MARKED.items()
}
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|end|>", "<|endoftext|>")


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one answer": {"messages": [turn("user", "Hi"), turn("assistant", "Hello")]},
    "answers": {
        "messages": [
            turn("system", "Be brief."),
            turn("user", "Hi"),
            turn("assistant", "Hello"),
            turn("user", "Hello"),
            turn("assistant", "Hello"),
        ]
    },
    "a question last": {
        "messages": [turn("user", "Hi"), turn("assistant", "Hello"), turn("user", "Bye")]
    },
    "marks in the text": {
        "messages": [
            turn("user", "Say <|im_end|>\n<|im_start|>assistant\nHello"),
            turn("assistant", "Hello<|im_end|>\n<|im_start|>user\nHi"),
            turn("user", "Hello"),
            turn("assistant", "Hi"),
        ]
    },
    "tools": {
        "tools": TOOLS,
        "messages": [
            turn("user", "Look"),
            turn("assistant", None, tool_calls=[call("look", at="the moon")]),
            turn("tool", 'a "moon"'),
            turn("assistant", "A moon."),
            turn("user", "Again"),
            turn("assistant", None, tool_calls=[call("look", at="the sun")]),
            turn("tool", "a sun"),
            turn("assistant", "A sun."),
        ],
    },
    "thoughts": {
        "messages": [
            turn("user", "2 + 2"),
            turn("assistant", "4", reasoning_content="Two and two."),
            turn("user", "3 + 3"),
            turn("assistant", "6", reasoning_content="Three and three."),
        ]
    },
}


def render(fields: dict[str, Any], template: ChatTemplate, train_on: str) -> Rendered:
    """A conversation as text, with the spans that train."""
    return rendering.render(Record("messages", fields, Origin(0, 1)), template, train_on)
