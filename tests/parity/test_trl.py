"""What a converted recipe trains on, beside what TRL's own trainer makes of the same arguments."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tests.support.converted import at, converted
from uspft.config import load
from uspft.convert import Outcome
from uspft.data.corpus.corpus import Corpus
from uspft.data.corpus.prepare import prepare

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "data/tokenizer"
VOCABULARY = 8192
ASKED, ANSWER = "What does json.loads do", "It reads a document.\nOf bytes too."
CHAT = [
    {"role": "system", "content": "You explain Python."},
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "In json."},
]
Records = list[dict[str, Any]]
SAMPLES: dict[str, tuple[Records, dict[str, Any]]] = {
    "answers": ([{"messages": CHAT}], {"assistant_only_loss": True}),
    "every turn": ([{"messages": CHAT}], {}),
    "texts": ([{"text": ASKED}, {"text": ANSWER}], {}),
    "pairs": (
        [{"prompt": f"{ASKED}?", "completion": f" {ANSWER}"}],
        {"completion_only_loss": True},
    ),
    "pairs, all of them": (
        [{"prompt": f"{ASKED}?", "completion": f" {ANSWER}"}],
        {"completion_only_loss": False},
    ),
    "the answers of pairs of turns": (
        [{"prompt": CHAT[:2], "completion": CHAT[2:3]}],
        {"assistant_only_loss": True},
    ),
}


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZER)


def trainer(folder: Path, records: Records, kind: str = "llama", **keys: Any) -> Any:
    """TRL's trainer of a tiny model."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    more = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": VOCABULARY}
    if kind != "llama":
        more |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more))
    model.save_pretrained(folder / "model")
    args = SFTConfig(str(folder / "out"), use_cpu=True, bf16=False, report_to="none", **keys)
    data = Dataset.from_list(records)
    return SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer())


def recipe_of(folder: Path, records: Records, **keys: Any) -> tuple[Outcome, dict[str, Any]]:
    """What the same arguments in a file give, and the recipe, for one device."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    named = {"model_name_or_path": str(folder / "model"), "max_length": 1024}
    sets = [{"path": "json", "data_files": str(data)}]
    outcome, recipe = converted(folder, {**named, "datasets": sets, **keys}, 1, tool="trl")
    assert recipe, outcome.lines()
    return outcome, recipe


def corpus_of(folder: Path) -> Corpus:
    """The tokens of the recipe."""
    data = load(folder / "recipe.yaml").recipe.data
    return Corpus.open(prepare(data, str(TOKENIZER), VOCABULARY, folder / "cache"))


def said(outcome: Outcome, key: str) -> str:
    """What is said of a key."""
    return " ".join(str(remark) for remark in outcome.remarks if remark.key == key)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_have_the_tokens_and_targets_that_trl_gives_them(name: str, tmp_path: Path) -> None:
    records, keys = SAMPLES[name]
    theirs = trainer(tmp_path, records, **keys).train_dataset
    recipe_of(tmp_path, records, **keys)
    ours = corpus_of(tmp_path)
    assert len(ours) == len(theirs)
    for number, row in enumerate(theirs):
        sample = ours.sample(number)
        assert sample.ids.tolist() == row["input_ids"]
        # nothing foretells the first token
        assert sample.labels.tolist()[1:] == row["labels"][1:]


@pytest.mark.parametrize("coefficient", [None, 0.0, 0.02])
def test_the_routers_loss_counts_where_trl_counts_it(
    coefficient: float | None, tmp_path: Path
) -> None:
    """Its config does not ask for it, and TRL trains with its coefficient anyway."""
    keys = {} if coefficient is None else {"router_aux_loss_coef": coefficient}
    records = SAMPLES["texts"][0]
    theirs = trainer(tmp_path, records, "qwen3_moe", **keys)
    written = json.loads((tmp_path / "model/config.json").read_text())
    assert written.get("output_router_logits", False) is False
    config = written | at(recipe_of(tmp_path, records, **keys)[1], "model.overrides")
    assert config["output_router_logits"] is theirs.aux_loss_enabled
    if theirs.aux_loss_enabled:
        assert config["router_aux_loss_coef"] == theirs.router_aux_loss_coef


APART: dict[str, Records] = {
    "a token over both": [{"prompt": ASKED, "completion": f"ne? {ANSWER}"}],
    "a line break behind the answer": [{"prompt": CHAT[:2], "completion": CHAT[2:3]}],
}


@pytest.mark.parametrize("name", APART)
def test_pairs_that_trl_takes_for_one_text_are_told(name: str, tmp_path: Path) -> None:
    records, keys = APART[name], {"completion_only_loss": True}
    row = trainer(tmp_path, records, **keys).train_dataset[0]
    outcome, _ = recipe_of(tmp_path, records, **keys)
    sample = corpus_of(tmp_path).sample(0)
    assert (sample.ids.tolist(), sample.labels.tolist()) != (row["input_ids"], row["labels"])
    assert "tokenised apart" in said(outcome, "completion_only_loss")


@pytest.mark.parametrize(("epochs", "told"), [(1, False), (2, True)])
def test_epochs_that_have_other_steps_there_are_told(
    epochs: int, told: bool, tmp_path: Path
) -> None:
    records: Records = [{"text": ASKED}] * 5
    keys = {"num_train_epochs": epochs, "per_device_train_batch_size": 2}
    theirs = trainer(tmp_path, records, **keys)
    loader = theirs.get_train_dataloader()
    steps = theirs.set_initial_training_values(theirs.args, loader)[-1]
    outcome, recipe = recipe_of(tmp_path, records, **keys)
    ours = math.ceil(epochs * len(records) / recipe["training"]["global_batch_size"])
    assert (steps != ours) == told == ("span two epochs" in said(outcome, "num_train_epochs"))
