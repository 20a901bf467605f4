"""Alpaca's own sentences around an instruction, with and without input."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoTokenizer

from tests.support.data_cases import CHAT, TOKENIZER, block, faults_of, write_lines
from uspft.config.inputs import Sentences
from uspft.config.recipe import DataBlock
from uspft.data import Corpus, DataError, first_look, prepare, read_report
from uspft.data.prompts import SENTENCES

WITH = {"instruction": "Add {these}.", "input": "2 + 2", "output": "4"}
WITHOUT = {"instruction": "Say hello.", "input": "", "output": "Hello."}
BELOW = "Below is an instruction that describes a task"
WRITE = "Write a response that appropriately completes the request."
PAIRED = (
    f"{BELOW}, paired with an input that provides further context. {WRITE}\n\n"
    "### Instruction:\nAdd {these}.\n\n### Input:\n2 + 2\n\n### Response:"
)
PLAIN = f"{BELOW}. {WRITE}\n\n### Instruction:\nSay hello.\n\n### Response:"
CHAT_OF_MINDSPORE = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: "
)
WRITTEN = {
    "alpaca": (PAIRED, PLAIN),
    "alpaca_mindspore": tuple(f"{CHAT_OF_MINDSPORE}{text} ASSISTANT: " for text in (PAIRED, PLAIN)),
}


def texts(tmp_path: Path, data: Any) -> list[tuple[str, str]]:
    """Of each sample what does not train, and what does."""
    found = Corpus.open(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    made = []
    for i in range(len(found)):
        sample = found.sample(i)
        trains = sample.labels != -100
        made.append((tokenizer.decode(sample.ids[~trains]), tokenizer.decode(sample.ids[trains])))
    return made


@pytest.mark.parametrize("name", get_args(Sentences))
def test_the_sentences_stand_before_the_answer(name: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [WITH, WITHOUT])
    want = [
        (prompt, f"{one['output']}<|endoftext|>")
        for prompt, one in zip(WRITTEN[name], (WITH, WITHOUT), strict=True)
    ]
    assert texts(tmp_path, block(path, prompt_template=name)) == want
    assert texts(tmp_path, block(path)) != want, "another name in the cache, too"
    assert set(WRITTEN) == set(SENTENCES) == set(get_args(Sentences))


def test_in_the_chat_template_they_are_the_question(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [WITH])
    data = block(path, format="messages", prompt_template="alpaca")
    ((question, answer),) = texts(tmp_path, data)
    assert f"user\n{PAIRED}<|im_end|>" in question and answer == "4<|im_end|>"


def test_what_has_no_instruction_is_refused(tmp_path: Path) -> None:
    """By file where a pair is none of Alpaca's, by key where there is no pair at all."""
    pairs = write_lines(tmp_path / "a.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    (line,) = faults_of(tmp_path, block(pairs, prompt_template="alpaca"))
    assert "write data.fields: {instruction: question, output: answer}" in line
    turns = {"instruction": CHAT["messages"][:1], "output": "a"}
    (line,) = faults_of(
        tmp_path, block(write_lines(tmp_path / "b.jsonl", [turns]), prompt_template="alpaca")
    )
    assert "and this is turns" in line
    chats = write_lines(tmp_path / "c.jsonl", [CHAT])
    (line,) = faults_of(tmp_path, block(chats, prompt_template="alpaca"))
    assert line.startswith("data.prompt_template: is alpaca, and no record has an instruction")
    whole = DataBlock.model_validate(
        {"train": str(chats), "sequence_length": 4096, "prompt_template": "alpaca"}
    )
    with pytest.raises(DataError, match="no record has an instruction"):
        first_look(whole, str(TOKENIZER), 8192)
    both = block(chats, write_lines(tmp_path / "d.jsonl", [WITH]), prompt_template="alpaca")
    folder = prepare(both, str(TOKENIZER), 8192, tmp_path / "cache")
    shapes = "\n".join(read_report(folder)["shapes"])
    assert "Alpaca: instruction, output, input, in the sentences of alpaca" in shapes


def test_names_of_ones_own_are_mapped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"question": "Say hello.", "answer": "Hello."}])
    fields = {"instruction": "question", "output": "answer"}
    data = block(path, fields=fields, prompt_template="alpaca")
    assert texts(tmp_path, data) == [(PLAIN, "Hello.<|endoftext|>")]
