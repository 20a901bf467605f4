"""`chat` with gpt-oss's own template: thoughts are shown apart, and the answer alone goes on. Of
what is typed, commands do not go to the model."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.launch import ROOT
from tests.support.originals import original
from uspft.__main__ import main
from uspft.commands.talker import Talker

MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|constrain|>"]
THOUGHT = "<|channel|>analysis<|message|>Two and two, that is it.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is 4.<|return|>"


class Played:
    """A model that gives the answers that it is told to, and keeps what it was asked."""

    device = torch.device("cpu")

    def __init__(self, tokenizer: Any, answers: list[str]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.asked: list[str] = []
        end = tokenizer.convert_tokens_to_ids("<|return|>")
        self.generation_config = SimpleNamespace(eos_token_id=end)

    def generate(self, input_ids: Any, streamer: Any, max_new_tokens: int, **_: Any) -> Any:
        self.asked.append(self.tokenizer.decode(input_ids[0]))
        streamer.put(input_ids)
        answer = self.tokenizer(self.answers.pop(0), return_tensors="pt")["input_ids"]
        answer = answer[:, :max_new_tokens]
        for token in answer[0]:
            streamer.put(token[None])
        streamer.end()
        return torch.cat([input_ids, answer], 1)


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = original("gptoss")
    return tokenizer


def played(
    tokenizer: Any,
    answers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *words: str,
    typed: str = "",
) -> Played:
    """A conversation: what is typed, or as many questions as there are answers."""
    model = Played(tokenizer, list(answers))
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr("uspft.commands.talk.load_talker", lambda *_: Talker(model, tokenizer))
    monkeypatch.setattr("sys.stdin", io.StringIO(typed or "What is 2 + 2?\n" * len(answers)))
    assert main(["chat", str(folder), *words]) == 0
    return model


@pytest.mark.parametrize("thought", ["", THOUGHT, THOUGHT.replace("analysis", "commentary to=f")])
def test_the_answer_is_what_stands_in_the_final_channel(
    tokenizer: Any,
    thought: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = played(tokenizer, [thought + FINAL] * 2, monkeypatch, tmp_path)
    said = capsys.readouterr()
    assert said.out == "It is 4.\n" * 2
    assert said.err == "(Two and two, that is it.)\n" * (2 if thought else 0)
    talked = "<|start|>assistant<|channel|>final<|message|>It is 4.<|end|><|start|>user"
    assert talked in model.asked[1] and "Two and two" not in model.asked[1]


def test_thoughts_without_an_answer_are_forgotten(
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    limit = len(tokenizer(FINAL)["input_ids"])
    model = played(tokenizer, [THOUGHT, FINAL], monkeypatch, tmp_path, f"max_new_tokens={limit}")
    said = capsys.readouterr()
    assert said.out == "It is 4.\n"
    thought, cut, forgotten = said.err.splitlines()
    assert thought.startswith("(Two") and thought.endswith(")")
    assert cut == f"(cut at {limit} tokens: max_new_tokens=N takes more)"
    assert forgotten == "(no answer came behind the thoughts: this question is forgotten)"
    assert model.asked[0] == model.asked[1]


def test_a_model_without_channels_says_all_of_its_answer(
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    played(tokenizer, ["It is\n4 or\n so.<|return|>"], monkeypatch, tmp_path)
    assert capsys.readouterr() == ("It is\n4 or\n so.\n", "")


def test_only_questions_go_to_the_model(
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = "/help\n/new now\n Who?\n/new \n /system\n/new\n/etc/hosts?"
    model = played(tokenizer, [FINAL] * 3, monkeypatch, tmp_path, typed=typed)
    asked = [text.split("<|start|>user<|message|>")[1:] for text in model.asked]
    assert asked == [
        [f"{it}<|end|><|start|>assistant"] for it in ("Who?", "/system", "/etc/hosts?")
    ]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in said] == [
        "(`/help` is no command",
        "(`/new now` is no command",
    ]
