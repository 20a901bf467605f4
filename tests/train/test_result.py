"""A LoRA run on conversations, from recipe to what is served: hf/ and adapter/ answer in the
template that was trained, and say where a turn ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT
from uspft.config import load

SAYS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning."}]


def made_data(path: Path, count: int) -> Path:
    lines = [json.dumps({"messages": SAYS}) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def recipe_of(folder: Path) -> dict[str, Any]:
    """The quickstart's model and tokenizer, smaller, with scaled positions and an adapter."""
    return {
        "model": {
            "config": str(ROOT / "configs/models/quickstart.json"),
            "tokenizer": str(ROOT / "data/tokenizer"),
            "dtype": "float32",
            "overrides": {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 1},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "adapter": {"type": "lora", "rank": 2},
        },
        "data": {"train": str(made_data(folder / "train.jsonl", 6)), "sequence_length": 64},
        "parallel_config": {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"},
        "training": {"steps": 2, "global_batch_size": 1},
        "launch": {"device": "cpu"},
    }


def test_what_a_run_leaves_is_served_as_it_was_trained(tmp_path: Path) -> None:
    process = Forked.start(recipe_of(tmp_path), tmp_path)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, err) == (0, ""), out
    trained = AutoTokenizer.from_pretrained(ROOT / "data/tokenizer")
    assert "{%- generation %}" in trained.chat_template
    for name in ("hf", "adapter"):
        folder = tmp_path / "out" / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert "{%- generation %}" not in tokenizer.chat_template
        for prompt in (False, True):
            texts = [
                one.apply_chat_template(SAYS, tokenize=False, add_generation_prompt=prompt)
                for one in (tokenizer, trained)
            ]
            assert texts[0] == texts[1]
        said = json.loads((folder / "generation_config.json").read_text())
        ends = trained.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
        assert said["eos_token_id"] == ends, name
        scaling = AutoConfig.from_pretrained(folder).rope_parameters
        assert (scaling["rope_type"], scaling["factor"]) == ("linear", 2.0)
        card = (folder / "README.md").read_text()
        body = card.partition("```yaml\n")[2].partition("```")[0]
        (tmp_path / "card.yaml").write_text(body)
        assert load(tmp_path / "card.yaml").recipe == load(tmp_path / "out/recipe.yaml").recipe
