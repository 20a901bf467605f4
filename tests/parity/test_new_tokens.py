"""A model that grows for new tokens trains as one that transformers has grown, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import runs
from tests.support.launch import records_in
from tests.support.models import make_model
from tests.support.ranks import spawn

OWN, GROWN = 97, 101
NEW = ["<a>", "<b>", "<c>", "<d>"]
ADDED = {"add_tokens": NEW, "overrides": {"vocab_size": GROWN}}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
CASES: dict[str, dict[str, Any]] = {
    "grown before": {"model": {}, "stage": 1},
    "ring, ZeRO-3": {"model": ADDED, "stage": 3},
    "tensor, ZeRO-2": {
        "model": ADDED,
        "stage": 2,
        "parallel": {"model_parallel": 2, "context_parallel": 1},
    },
    "frozen": {"model": {**ADDED, "freeze": ["embed_tokens"]}, "stage": 1},
}


def work(rank: int, folder: Path) -> dict[str, Any]:
    from uspft.training.loop import train

    runs.VOCABULARY = GROWN
    ring = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
    found = {}
    for number, (name, case) in enumerate(CASES.items()):
        model = folder / ("grown" if name == "grown before" else "own")
        recipe = runs.small_recipe(
            model,
            folder / "a.jsonl",
            32,
            model=case["model"],
            parallel_config={**ring, **case.get("parallel", {})},
            deepspeed={
                "zero_optimization": {
                    "stage": case["stage"],
                    "stage3_param_persistence_threshold": 0,
                }
            },
            training={"steps": 2},
        )
        output = folder / str(number)
        run = runs.prepared(recipe, output)
        start = {name: value for name, value in runs.held(run.engine).items() if name in TABLES}
        train(run, lambda: False)
        end = runs.held(run.engine)
        runs.close(run)
        lines = records_in(output / "metrics.jsonl")
        kept = [(line["loss"], line["grad_norm"]) for line in lines]
        found[name] = {"start": start, "end": end, "steps": kept}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any, Any]:
    """Runs of each case, and the models before and after transformers has grown one."""
    folder = tmp_path_factory.mktemp("grown")
    make_model(folder / "own", "llama", heads=4, kv_heads=2, tie_word_embeddings=False)
    ids = torch.randint(0, GROWN, (3, 32), generator=torch.Generator().manual_seed(1))
    ids[:, ::5] = torch.arange(21).reshape(3, 7) % 4 + OWN
    lines = [json.dumps({"input_ids": one}) for one in ids.tolist()]
    (folder / "a.jsonl").write_text("\n".join(lines))
    own = AutoModelForCausalLM.from_pretrained(folder / "own")
    grown = AutoModelForCausalLM.from_pretrained(folder / "own")
    grown.resize_token_embeddings(GROWN, mean_resizing=False)
    with torch.no_grad():
        for module in (grown.get_input_embeddings(), grown.get_output_embeddings()):
            module.weight[OWN:] = module.weight[:OWN].double().mean(0)
    grown.save_pretrained(folder / "grown")
    return spawn(2, work, folder)[0], own, grown


@pytest.mark.parametrize("name", [name for name in CASES if name != "grown before"])
def test_rows_start_as_the_mean(found: tuple[dict[str, Any], Any, Any], name: str) -> None:
    runs_of, own, grown = found
    for table, value in runs_of[name]["start"].items():
        want, before = grown.state_dict()[table], own.state_dict()[table]
        assert torch.equal(value[:OWN], before)
        torch.testing.assert_close(value[OWN:], want[OWN:], rtol=1e-6, atol=0)
        assert not torch.allclose(value[OWN:], before[:4], atol=1e-3)
    assert sorted(runs_of[name]["start"]) == sorted(TABLES)


@pytest.mark.parametrize("name", ["ring, ZeRO-3", "tensor, ZeRO-2"])
def test_training_goes_on_as_with_a_model_grown_before(
    found: tuple[dict[str, Any], Any, Any], name: str
) -> None:
    runs_of, _, _ = found
    reference, mine = runs_of["grown before"], runs_of[name]
    torch.testing.assert_close(
        torch.tensor(mine["steps"]), torch.tensor(reference["steps"]), rtol=2e-5, atol=0
    )
    assert mine["end"].keys() == reference["end"].keys()
    for key, value in mine["end"].items():
        torch.testing.assert_close(value, reference["end"][key], rtol=1e-4, atol=2e-5)
    for table in TABLES:  # the new rows train
        change = (mine["end"][table][OWN:] - mine["start"][table][OWN:]).abs().amax(1)
        assert bool((change > 1e-5).all())


def test_frozen_rows_stay_the_mean(found: tuple[dict[str, Any], Any, Any]) -> None:
    frozen = found[0]["frozen"]
    embedding, head = TABLES
    assert torch.equal(frozen["end"][embedding], frozen["start"][embedding])
    assert not torch.equal(frozen["end"][head], frozen["start"][head])
