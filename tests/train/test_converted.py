"""Converted configurations train: as a hand-written recipe does, and as one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.converted import converted, example
from tests.support.data_cases import TOKENIZER
from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import records

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
TASK, WRITE = "Below is an instruction that describes a task", "Write a response that appropriately"
ROW = 512
SIZES = {"num_attention_heads": 4, "vocab_size": 8192, "max_position_embeddings": ROW}


def alpaca(folder: Path) -> tuple[Path, Path]:
    """Twelve instructions, of which ten are taken, and by hand what those are as prompts."""
    instructions, prompts = folder / "alpaca.jsonl", folder / "prompts.jsonl"
    told = []
    with instructions.open("w") as file:
        for i in range(12):
            more = f"{i} + {i}" if i % 2 else ""
            record = {"instruction": f"Add {i} to it.", "input": more, "output": f"{2 * i} " * 9}
            file.write(json.dumps(record) + "\n")
            asked = f"### Instruction:\nAdd {i} to it."
            task = f"{TASK}. {WRITE} completes the request."
            if more:
                asked += f"\n\n### Input:\n{more}"
                given = "paired with an input that provides further context"
                task = f"{TASK}, {given}. {WRITE} completes the request."
            prompt = f"{SYSTEM} USER: {task}\n\n{asked}\n\n### Response: ASSISTANT: "
            told.append({"prompt": prompt, "completion": record["output"]})
    prompts.write_text("".join(json.dumps(one) + "\n" for one in told[:10]))
    return instructions, prompts


def trained(recipe: dict[str, Any], folder: Path, *words: str) -> list[tuple[float, float, int]]:
    """Train a recipe; return of each step the loss, the gradient's norm and the targets."""
    folder.mkdir()
    process = Forked.start(recipe, folder, *words)
    out, err = process.communicate(timeout=2 * HANG_SECONDS)
    assert (process.returncode, err) == (0, ""), out + err
    return [(one["loss"], one["grad_norm"], one["target_tokens"]) for one in records(folder)]


def require_equal(
    ours: list[tuple[float, float, int]], theirs: list[tuple[float, float, int]]
) -> None:
    """Two runs have the same steps; and a step is told from another, so that this can fail."""
    assert len(ours) == len(theirs) >= 2
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=2e-5)
    assert ours[0] != pytest.approx(theirs[1], rel=2e-3)


def test_alpaca_trains_as_a_recipe_written_by_hand(tmp_path: Path) -> None:
    """Example E on four processes, tensor 2 and two stages, beside one process."""
    instructions, prompts = alpaca(tmp_path)
    model = tmp_path / "model"
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, **SIZES)
    LlamaForCausalLM(config).save_pretrained(model)
    tree = yaml.safe_load(example("mindspore-e").read_text())
    tree["parallel_config"] |= {"model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2}
    tree["lr_schedule"]["learning_rate"] = 1e-3
    tree["pretrained_model_dir"] = str(model)
    tree["model"]["model_config"]["compute_dtype"] = "float32"
    loader = tree["train_dataset"]["data_loader"]
    loader |= {"path": "json", "data_files": str(instructions)}
    loader["handler"][0]["n"] = 10
    for handler in loader["handler"][1:]:
        handler["seq_length"] = ROW
    del tree["callbacks"][1], tree["train_dataset_task"]
    given = {"model__tokenizer": str(TOKENIZER), "launch__device": "cpu"}
    given |= {"checkpoint__every_steps": None, "export__huggingface": False}
    outcome, recipe = converted(tmp_path, tree, None, tool="mindspore", **given)
    assert not outcome.refused, outcome.lines()
    by_hand = {
        "model": {"name_or_path": str(model), "tokenizer": str(TOKENIZER), "dtype": "float32"},
        "data": {"train": str(prompts), "sequence_length": ROW, "shuffle": False},
        "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "lr_schedule": {"type": "constant", "warmup_ratio": 0.0},
        "training": {"epochs": 1, "global_batch_size": 2, "max_grad_norm": 1.0},
        "checkpoint": {"every_steps": None},
        "export": {"huggingface": False},
        "launch": {"device": "cpu"},
        "seed": 42,
    }
    del recipe["output_dir"]
    there = trained(recipe, tmp_path / "there")
    require_equal(there, trained(by_hand, tmp_path / "here"))


def rows_of(folder: Path, tokens: int) -> Path:
    """Eight rows of so many tokens."""
    rows = folder / "rows.jsonl"
    ids = [[(7 * i * i + 3 * k + k * k) % 512 for k in range(tokens)] for i in range(8)]
    rows.write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in ids))
    return rows


SMALL = {
    "seq_length": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 4,
    "num_heads": 8,
    "n_kv_heads": 4,
    "vocab_size": 512,
    "compute_dtype": "float32",
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
ONE = {
    **dict.fromkeys(("model_parallel", "pipeline_stage", "fine_grain_interleave"), 1),
    **dict.fromkeys(("seq_split_num", "micro_batch_num"), 1),
    "use_seq_parallel": False,
    **dict.fromkeys(("offset", "pipeline_scheduler", "layers_per_stage")),
}


@pytest.mark.parametrize(
    ("name", "degrees", "again", "kept"),
    [
        (
            "mindspore-b",
            {"model_parallel": 4, "pipeline_stage": 2},
            {"select_recompute": [1, 0], "select_comm_recompute": [1, 0]},
            {"fine_grain_interleave": 2},
        ),
        (
            "mindspore-c",
            {"model_parallel": 2, "pipeline_stage": 4},
            {"select_comm_recompute": {r".*\.norm": [1, 1, 0, 0]}},
            {"seq_split_num": 8, "pipeline_scheduler": "seqpipe"},
        ),
    ],
)
def test_stages_of_eight_train_as_one_process(
    name: str,
    degrees: dict[str, int],
    again: dict[str, Any],
    kept: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Examples B and C on eight processes, with copies by turns and in eight chunks, beside one."""
    tree = yaml.safe_load(example(name).read_text())
    tree["parallel_config"] |= {**degrees, "micro_batch_num": 4}
    tree["recompute_config"] |= again
    tree["lr_schedule"] |= {"type": "ConstantWarmUpLR", "learning_rate": 1e-3}
    config = tree["model"]["model_config"]
    config |= {**SMALL, "offset": 0, "use_attn_mask_compression": False}
    for key in ("multiple_of", "ffn_dim_multiplier"):
        config.pop(key, None)
    given = {"data__train": str(rows_of(tmp_path, 64)), "launch__device": "cpu"}
    given |= {"data__shuffle": False, "training__epochs": 1}
    given |= {"checkpoint__every_steps": None, "export__huggingface": False}
    outcome, recipe = converted(tmp_path, tree, None, tool="mindspore", **given)
    assert not outcome.refused, outcome.lines()
    parallel = recipe["parallel_config"]
    assert parallel.items() >= (degrees | kept | {"use_seq_parallel": True}).items()
    eight = trained(recipe, tmp_path / "eight")
    words = [f"parallel_config.{key}={json.dumps(value)}" for key, value in ONE.items()]
    words += ["memory.gradient_checkpointing=false", "memory.recompute=auto"]
    require_equal(eight, trained(recipe, tmp_path / "one", *words))


def test_a_hybrid_of_eight_trains_as_one_process(tmp_path: Path) -> None:
    """Example D on eight processes, in whole rows beside it."""
    tree = yaml.safe_load(example("mindspore-d").read_text())
    tree["parallel_config"] |= {"context_parallel": 8, "ulysses_degree_in_cp": 4}
    given = {"data__train": str(rows_of(tmp_path, 64)), "data__sequence_length": 64}
    given["launch__device"] = "cpu"
    given |= {"checkpoint__every_steps": None, "export__huggingface": False}
    outcome, recipe = converted(tmp_path, tree, None, tool="mindspore", **given)
    assert not outcome.refused, outcome.lines()
    assert recipe["parallel_config"]["context_parallel_algo"] == "hybrid_cp"
    eight = trained(recipe, tmp_path / "eight")
    words = [f"parallel_config.{key}=1" for key in ("context_parallel", "ulysses_degree_in_cp")]
    require_equal(eight, trained(recipe, tmp_path / "one", *words))
