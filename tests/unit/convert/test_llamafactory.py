"""What LLaMA-Factory's keys mean: each value, the recipe's, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.converted import at, converted

BASE: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "finetuning_type": "full",
    "dataset": "talks",
    "dataset_dir": ".",
    "cutoff_len": 4096,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
}
INFO = {
    "talks": {"file_name": "talks.jsonl", "formatting": "sharegpt"},
    "more": {"hf_hub_url": "org/more", "num_samples": 50},
    "pairs": {"hf_hub_url": "org/pairs", "ranking": True},
}
MEANING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the zigzag ring is the default": (
        {"sequence_parallel_size": 4},
        {
            "parallel_config.context_parallel": 4,
            "parallel_config.context_parallel_algo": "ring_cp",
            "training.global_batch_size": 2 * 3 * (8 // 4),
        },
    ),
    "all are gathered": (
        {"sequence_parallel_size": 2, "sequence_parallel_mode": "llama3"},
        {"parallel_config.context_parallel_algo": "allgather_cp"},
    ),
    "LoRA is the default": (
        {"finetuning_type": None, "lora_rank": 4},
        {"model.adapter.rank": 4, "model.adapter.alpha": 8, "model.adapter.target_modules": None},
    ),
    "names between commas": (
        {"finetuning_type": "lora", "lora_target": "q_proj, v_proj"},
        {"model.adapter.target_modules": ["q_proj", "v_proj"]},
    ),
    "the last answer": ({"mask_history": True}, {"data.train_on": "last"}),
    "prompts too": ({"train_on_prompt": True}, {"data.train_on": "all"}),
    "not packed": ({}, {"data.packing": "none", "data.overlong": "truncate"}),
    "packed": ({"packing": True}, {"data.packing": "best_fit"}),
    "texts are cut into rows": (
        {"stage": "pt", "packing": None},
        {"data.packing": "best_fit", "data.overlong": "split"},
    ),
    "weights of sets": (
        {"dataset": "talks,more", "mix_strategy": "interleave_over", "interleave_probs": "0.7,0.3"},
        {
            "data.train": [
                {
                    "path": "talks.jsonl",
                    "format": "messages",
                    "fields": {"messages": "conversations"},
                    "weight": 0.7,
                },
                {"path": "org/more", "format": "messages", "max_samples": 50, "weight": 0.3},
            ]
        },
    ),
    "the factor follows": (
        {"rope_scaling": "llama3"},
        {"model.rope_scaling.rope_type": "llama3", "model.rope_scaling.low_freq_factor": 1.0},
    ),
    "the routers' loss": (
        {"moe_aux_loss_coef": 0.01},
        {"model.overrides": {"router_aux_loss_coef": 0.01, "output_router_logits": True}},
    ),
    "in the file's order": ({"train_sampling_strategy": "sequential"}, {"data.shuffle": False}),
    "bfloat16 throughout": ({"pure_bf16": True}, {"model.dtype": "bfloat16"}),
    "nothing is made again": (
        {"disable_gradient_checkpointing": True},
        {"memory.gradient_checkpointing": False},
    ),
    "their defaults": (
        {"per_device_train_batch_size": None, "gradient_accumulation_steps": None},
        {
            "training.global_batch_size": 8 * 8,
            "training.epochs": 3,
            "optimizer.learning_rate": 5e-5,
            "lr_schedule.type": "linear",
            "memory.gradient_checkpointing": True,
        },
    ),
}


def one(folder: Path, keys: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What the base with other keys gives."""
    (folder / "dataset_info.json").write_text(json.dumps(INFO))
    return converted(folder, {**BASE, **keys}, tool="llamafactory")


@pytest.mark.parametrize("name", MEANING)
def test_a_key_means_here_what_it_means_there(name: str, tmp_path: Path) -> None:
    keys, wanted = MEANING[name]
    outcome, recipe = one(tmp_path, keys)
    assert recipe, outcome.lines()
    for source in recipe["data"]["train"]:
        source["path"] = source["path"].removeprefix(f"{tmp_path}/")
    assert {key: at(recipe, key) for key in wanted} == wanted


TOLD: dict[str, tuple[dict[str, Any], str]] = {
    "a line break behind answers": ({"template": "qwen"}, "trains there and not here"),
    "the routers' loss of each batch": (
        {"moe_aux_loss_coef": 0.01},
        "as many times as a step has batches",
    ),
    "rows cut from texts": ({"stage": "pt"}, "which see one another"),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_trains_otherwise_there_is_told(name: str, tmp_path: Path) -> None:
    keys, what = TOLD[name]
    outcome, _ = one(tmp_path, keys)
    assert sum(what in str(remark) for remark in outcome.remarks) == 1, outcome.lines()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "preferences": ({"stage": "dpo"}, "write sft or pt"),
    "a set of preferences": ({"dataset": "pairs"}, "a set of preferences"),
    "no such set": ({"dataset": "none"}, "lacks; add data.train=FILE"),
    "no such folder": ({"dataset_dir": "elsewhere"}, "put it there, or add data.train=FILE"),
    "another method": ({"finetuning_type": "freeze"}, "`model.freeze` names"),
    "another ring": ({"sequence_parallel_mode": "stripe"}, "write zigzag-ring, llama3 or ulysses"),
    "another optimizer": ({"use_galore": True}, "AdamW is the only optimizer"),
    "numbers of sets": (
        {"mix_strategy": "interleave_under", "interleave_probs": "0.5,0.5"},
        "has 2 numbers for 1 sets",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_remedy(name: str, tmp_path: Path) -> None:
    keys, remedy = REFUSED[name]
    outcome, _ = one(tmp_path, keys)
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "refused"]
    assert any(remedy in line for line in lines), outcome.lines()
