"""`chat`: a tiny model answers in the terminal, whole or as an adapter, and what cannot is told."""

from __future__ import annotations

import io
import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
)

from tests.support.answers import ANSWER, ASKED, base_model, says
from tests.support.launch import ROOT
from tests.support.multimodal import CHECKPOINTS
from tests.support.originals import original
from uspft.__main__ import main
from uspft.called import VARIABLE
from uspft.commands.chat import Talker, load_talker
from uspft.config.inputs import DataBlock
from uspft.data.corpus.tokenise import load_tokeniser

END = "<|im_end|>"
ROWS = {"train": "x", "sequence_length": 128}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model that answers, as a run's hf/ has it."""
    folder = base_model(tmp_path_factory.mktemp("talk") / "base", "llama")
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tokeniser = load_tokeniser(str(folder), DataBlock.model_validate(ROWS))
    says(net, tokeniser)
    ends = [tokeniser.backend.token_to_id(END), tokeniser.eos]
    net.generation_config.eos_token_id = ends
    net.save_pretrained(folder)
    return folder


def test_the_language_model_of_a_multimodal_model_answers(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, text, vision, beside = CHECKPOINTS["gemma3"]
    raw = json.loads((base / "config.json").read_text()) | text | {"model_type": "gemma3_text"}
    raw["max_position_embeddings"] = 64
    config = Gemma3Config(
        text_config=raw, vision_config=vision, **beside, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    net = AutoModelForImageTextToText.from_config(config)
    tokeniser = load_tokeniser(str(base), DataBlock.model_validate(ROWS))
    says(net, tokeniser)
    net.generation_config.eos_token_id = [tokeniser.backend.token_to_id(END), tokeniser.eos]
    net.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path)
    assert talk(monkeypatch, ASKED["content"], str(tmp_path), "max_new_tokens=14") == 0
    assert capsys.readouterr().out.strip() == ANSWER
    assert type(load_talker(tmp_path, None).model).__name__ == f"{name}ForConditionalGeneration"


@pytest.fixture
def out(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base, tmp_path / "out/hf")
    return tmp_path / "out"


def talk(monkeypatch: pytest.MonkeyPatch, typed: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    return main(["chat", *words])


def test_it_answers_every_line(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = f"{ASKED['content']}\n\n/new\n{ASKED['content']}"
    assert talk(monkeypatch, typed, str(out), "max_new_tokens=14") == 0
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if line] == [ANSWER, ANSWER]
    assert talk(monkeypatch, ASKED["content"], str(out / "hf"), "max_new_tokens=3") == 0
    said = capsys.readouterr()
    assert ANSWER.startswith(said.out.strip()) and said.out.count("\n") == 1
    assert said.err == "(cut at 3 tokens: max_new_tokens=N takes more)\n"


def test_an_answer_that_ends_with_the_last_token_is_not_cut(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = len(AutoTokenizer.from_pretrained(out / "hf")(f"{ANSWER}{END}")["input_ids"])
    for limit, cut in ((tokens, False), (tokens - 1, True)):
        words = (str(out), f"max_new_tokens={limit}")
        assert talk(monkeypatch, ASKED["content"], *words) == 0
        said = capsys.readouterr()
        assert said.out.strip() == ANSWER and ("(cut at" in said.err) == cut


def test_bytes_that_are_not_utf_8_are_told(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = io.BytesIO(f"{ASKED['content']}\nà la carte\n".encode("latin-1"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed, encoding="utf-8"))
    assert main(["chat", str(out), "max_new_tokens=14"]) == 2
    said = capsys.readouterr()
    assert said.out.strip() == ANSWER  # of the line before
    assert said.err.startswith("command line: chat: line 2 of stdin holds bytes that are not UTF-8")
    assert said.err.count("\n") == 1
    assert talk(monkeypatch, "", str(out), "system=\udce0") == 2
    assert "system: holds bytes that are not UTF-8; write it" in capsys.readouterr().err


def test_an_adapter_answers_on_its_base(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "out/adapter"
    net = AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    get_peft_model(net, lora).save_pretrained(adapter)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(base / name, adapter)
    shutil.copy(base / "generation_config.json", adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # those of libraries are not for the user
        assert talk(monkeypatch, ASKED["content"], str(tmp_path / "out"), "max_new_tokens=14") == 0
    assert capsys.readouterr() == (f"{ANSWER}\n", "")
    moved = base.rename(base.with_name("moved"))
    try:
        assert talk(monkeypatch, "", str(tmp_path / "out")) == 2
        said = capsys.readouterr().err
        assert f"the folder `{base}` does not exist; put it back, or write base=PLACE" in said
        assert said.startswith("command line: base: ") and said.count("\n") == 1
        assert talk(monkeypatch, "", str(tmp_path / "out"), "base=/nowhere") == 2
        said = capsys.readouterr().err
        assert said == "command line: base: the folder `/nowhere` does not exist; " + (
            "name its folder, or its org/name of the hub\n"
        )
        words = (str(tmp_path / "out"), f"base={moved}", "max_new_tokens=14")
        assert talk(monkeypatch, ASKED["content"], *words) == 0
        assert capsys.readouterr().out.strip() == ANSWER
    finally:
        moved.rename(base)


def test_what_cannot_be_talked_to_is_told(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert talk(monkeypatch, "", *words) == 2
        said = capsys.readouterr().err
        assert said.startswith("command line: ") and said.count("\n") == 1, said
        return said

    monkeypatch.setenv(VARIABLE, "../bin/uspft")
    assert "nowhere: does not exist; name a run's output folder" in refused("nowhere")
    assert "chat: needs a target; write ../bin/uspft chat OUTPUT" in refused()
    empty = out.with_name("empty")
    (empty / "checkpoints").mkdir(parents=True)
    assert f"holds no trained model yet; write ../bin/uspft export {empty}" in refused(str(empty))
    assert "is a whole model; leave it out" in refused(str(out), "base=/x")
    assert "`many` is no number of tokens" in refused(str(out), "max_new_tokens=many")
    assert "temperature=1: chat takes system=TEXT" in refused(str(out), "temperature=1")
    assert "system: is given twice" in refused(str(out), "system=a", "system=b")
    (out / "hf/chat_template.jinja").unlink()
    assert "has no chat template" in refused(str(out))
    monkeypatch.setattr("sys.stdin", None)  # as Python leaves it where the descriptor is closed
    assert main(["chat", str(out)]) == 2
    said = capsys.readouterr().err
    assert "chat: there is no stdin to read questions from" in said and said.count("\n") == 1


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
    monkeypatch.setattr("uspft.commands.chat.load_talker", lambda *_: Talker(model, tokenizer))
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
