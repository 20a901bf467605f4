"""The sentences that are written around an instruction, with and without its input.

`alpaca`: Taori et al., Stanford Alpaca, train.py. `alpaca_mindspore`: the same inside a chat, as
AlpacaInstructDataHandler of MindSpore Transformers writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

_TASK = "Below is an instruction that describes a task"
_WRITE = "Write a response that appropriately completes the request."
_PLAIN = f"{_TASK}. {_WRITE}\n\n### Instruction:\n{{instruction}}\n\n### Response:"
_PAIRED = (
    f"{_TASK}, paired with an input that provides further context. {_WRITE}\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_CHAT = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: "
)
_ANSWER = " ASSISTANT: "


@dataclass(frozen=True)
class Prompt:
    """What stands before an answer; {instruction} and {input} in it stand for a record's."""

    plain: str
    paired: str
    """Where there is an input."""

    def write(self, instruction: str, more: str) -> str:
        """Return the prompt of an instruction. more: its input; an empty text is none."""
        chosen = self.paired if more else self.plain
        return chosen.format(instruction=instruction, input=more)


SENTENCES = {
    "alpaca": Prompt(_PLAIN, _PAIRED),
    "alpaca_mindspore": Prompt(f"{_CHAT}{_PLAIN}{_ANSWER}", f"{_CHAT}{_PAIRED}{_ANSWER}"),
}
"""The shipped prompts, by the names that `data.prompt_template` knows."""
