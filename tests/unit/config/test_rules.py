"""Rules between keys, inside DeepSpeed's block too, and every problem at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.problems import BASE, lines, load_over
from uspft.config import rules
from uspft.config.problems import Finding
from uspft.config.recipe import Recipe
from uspft.config.rules import RULES, broken


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    text = """\
model: {dtype: bf16, config: c, trust_remote_code: true}
data: {packing: best, sequence_length: "4k"}
sead: 1
parallel_config: {context_parallel: 4}
lr_schedule: {min_learning_rate: 1}
training: {epochs: 1, steps: 10k}
deepspeed: {zero_optimization: {stage: 1, offload_param: {device: cpu}}}"""
    assert lines(tmp_path, text, BASE.replace("sequence_length: 4k", "format: text")) == [
        "r.yaml:2: model.dtype: unknown value `bf16`; did you mean `bfloat16`? "
        "Allowed: float32 | bfloat16",
        "r.yaml:2: model.trust_remote_code: code from the hub is not available yet; write false",
        "r.yaml:2: model.config: is set together with `model.name_or_path`, and only one of them "
        "names the model; keep one and write null for the other",
        "r.yaml:3: data.packing: unknown value `best`; did you mean `best_fit`? "
        "Allowed: none | best_fit",
        "r.yaml:4: sead: unknown key `sead`; did you mean `seed`?",
        "r.yaml:5: parallel_config.context_parallel_algo: is missing, and context_parallel is 4; "
        "write ulysses_cp, ring_cp, hybrid_cp, allgather_cp or planned_cp",
        "r.yaml:6: lr_schedule.min_learning_rate: is 1, above optimizer.learning_rate: 1e-05; "
        "write at most 1e-05",
        "r.yaml:7: training.steps: expected a whole number of at least 1 or null, "
        'got the string "10k"; write 10000 or 10240',
        "r.yaml:8: deepspeed.zero_optimization.offload_param: needs ZeRO stage 3, "
        "and the stage is 1; write stage: 3, or leave it out",
    ]


def test_what_is_required(tmp_path: Path) -> None:
    assert lines(tmp_path, "seed: 1", "seed: 2\ndata: {format: text}\n") == [
        "r.yaml:1: training.global_batch_size: is missing and has no default; "
        "write the rows of one optimizer step, such as 32",
        "r.yaml:1: model.name_or_path: is missing, and so is `model.config`; "
        "write a Hugging Face folder or hub id, or model.config",
        "r.yaml:1: training.steps: is missing, and so is `training.epochs`; "
        "write one of them, such as steps: 1000",
        "base.yaml:2: data.train: is missing and has no default; "
        "write a file, a folder, a glob, a hub id, or a list of them",
        "base.yaml:2: data.sequence_length: is missing and has no default; "
        "write the tokens of a row, such as 4096 or 128k",
    ]


CP = "parallel_config: {context_parallel: 6, context_parallel_algo: %s}"
DATA = "data: {train: [{path: a, weight: 2}, {path: b%s}], sequence_length: 8, format: text%s}"
EVAL = "%s\ndata: {eval_fraction: 0.1}"
COMBINATIONS = {
    DATA % ("", ""): "data.train[1].weight: is missing, and other sources have one; write one for "
    "each source, or for none",
    DATA % (", weight: 1", ", eval: c, eval_fraction: 0.1"): "data.eval_fraction: is 0.1, and "
    "data.eval names what is evaluated on; keep one and write null for the other",
    "training: {eval_every_steps: 5}": "training.eval_every_steps: is 5, and there is no "
    "`data.eval`; write data.eval or data.eval_fraction, or null here",
    "launch: {min_hosts: 2}": "launch.min_hosts: is 2, and with launch.restarts 0 a run never "
    "starts again; write launch.restarts too, or null here",
    "training: {patience: 3}": "training.patience: is 3, and there is nothing to evaluate on; "
    "write data.eval or data.eval_fraction, or null here",
    "checkpoint: {keep_best: true}": "checkpoint.keep_best: is true, and there is nothing to "
    "evaluate on; write data.eval or data.eval_fraction, or false here",
    EVAL % "checkpoint: {keep_best: true}": "checkpoint.keep_best: is true, and the only "
    "evaluation is that of the last step; write training.eval_every_steps, such as 100, or false "
    "here",
    "training: {epochs: 2}": "training.epochs: is set together with `training.steps`, "
    "and only one of them ends the run; keep one and write null for the other",
    "checkpoint: {every_steps: 500, every_epochs: 0.5}": "checkpoint.every_epochs: is set "
    "together with `checkpoint.every_steps`, and only one of them can rule; "
    "keep one and write null for the other",
    EVAL % "training: {eval_every_steps: 0.5, eval_every_epochs: 1}": "training.eval_every_epochs: "
    "is set together with `training.eval_every_steps`, and only one of them can rule; "
    "keep one and write null for the other",
    "training: {eval_every_epochs: 1}": "training.eval_every_epochs: is 1.0, and there is no "
    "`data.eval`; write data.eval or data.eval_fraction, or null here",
    "lr_schedule: {warmup_steps: 3, warmup_ratio: 0.1}": "lr_schedule.warmup_steps: is set "
    "together with `lr_schedule.warmup_ratio`, and only one of them can rule; "
    "keep one and write null for the other",
    "lr_schedule: {warmup_initial: 1}": "lr_schedule.warmup_initial: is 1, above "
    "optimizer.learning_rate: 1e-05; write at most 1e-05",
    "lr_schedule: {cycles: 2}": "lr_schedule.cycles: is 2, and lr_schedule.type is cosine; "
    "leave it out, or write type: cosine_restarts",
    "lr_schedule: {type: wsd, power: 2}": "lr_schedule.power: is 2, and lr_schedule.type is wsd; "
    "leave it out, or write type: polynomial",
    "lr_schedule: {type: wsd, decay_ratio: 0.9, warmup_ratio: 0.2}": "lr_schedule.decay_ratio: "
    "is 0.9, and with warmup_ratio 0.2 more than all steps; write shares of at most 1 together",
    "model: {name_or_path: null, config: {hidden_size: 64}}": "model.config: has no "
    "`model_type`; write model_type: llama, qwen2 or another family",
    "training: {stop_step: 2000}": "training.stop_step: is 2,000, after the last of "
    "training.steps: 3; write at most 3, or null",
    "lr_schedule: {warmup_ratio: null}": "lr_schedule.warmup_ratio: is null, and so is "
    "`lr_schedule.warmup_steps`; write 0.0 for no warm-up",
    CP % "hybrid_cp": "parallel_config.ulysses_degree_in_cp: is missing, and "
    "context_parallel_algo is hybrid_cp; write one of 1, 2, 3, 6",
    CP % "hybrid_cp, ulysses_degree_in_cp: 4": "parallel_config.ulysses_degree_in_cp: is 4, "
    "which does not divide context_parallel: 6; write one of 1, 2, 3, 6",
    CP % "ulysses_cp, ulysses_degree_in_cp: 2": "parallel_config.ulysses_degree_in_cp: is 2, "
    "and with ulysses_cp it is 6; leave it out, or write context_parallel_algo: "
    "hybrid_cp or planned_cp",
    CP % "ring_cp, ulysses_degree_in_cp: 2": "parallel_config.ulysses_degree_in_cp: is 2, "
    "and with ring_cp it is 1; leave it out, or write context_parallel_algo: "
    "hybrid_cp or planned_cp",
    CP % "ulyses_cp": "parallel_config.context_parallel_algo: unknown value `ulyses_cp`; "
    "did you mean `ulysses_cp`? Allowed: ulysses_cp | ring_cp | hybrid_cp | allgather_cp | "
    "planned_cp | colossalai_cp | auto or null",
    "model: {dtype: float16}\nlaunch: {device: cpu}": "model.dtype: unknown value "
    "`float16`; it needs a loss scale, and no GPU has run it here: write float32 | bfloat16",
    CP % "auto, ulysses_degree_in_cp: 4": "parallel_config.ulysses_degree_in_cp: is 4, "
    "which does not divide context_parallel: 6; write one of 1, 2, 3, 6",
    "parallel_config: {model_parallel: auto, tensor_parallel_algo: meshslice, "
    "tensor_mesh: [2, 2]}": "parallel_config.tensor_mesh: is [2, 2], 4 ranks, and model_parallel "
    "is auto; write model_parallel: 4, or auto here",
    "parallel_config: 8": "parallel_config: expected a mapping of keys, got 8; "
    "write auto, or its keys below it",
    "parallel_config: {context_parallel: 4, context_parallel_algo: ring_cp, exchange_stages: 2}": (
        "parallel_config.exchange_stages: is 2, and only planned_cp has it; "
        "write auto, or leave it out"
    ),
    "model: {attention: flash_attn_2}\nlaunch: {device: cpu}": "model.attention: is flash_attn_2, "
    "a GPU kernel, and launch.device is cpu; write auto or torch",
    "model: {attention: flash_attn_2, dtype: float32}": "model.attention: is flash_attn_2, which "
    "has no float32, and model.dtype is float32; write auto or torch, or dtype: bfloat16",
    "model: {rope_scaling: {type: yarn, factor: 2}}": "model.rope_scaling: has `type`, whose key "
    "is `rope_type`; write rope_type: yarn",
    "memory: {gradient_checkpointing: false, recompute: attention}": "memory.recompute: is "
    "attention, and memory.gradient_checkpointing is false; "
    "write auto, or gradient_checkpointing: true",
    "memory: {gradient_checkpointing: false, offload_activations: cpu}": (
        "memory.offload_activations: is cpu, and memory.gradient_checkpointing is false; "
        "write none, or gradient_checkpointing: true"
    ),
    "memory: {attention_heads: 2, recompute: exchange}": "memory.recompute: is exchange, and "
    "memory.attention_heads is 2: each group of heads is exchanged again in the backward; write "
    "auto, nothing or attention",
    "memory: {gradient_reduction: bfloat16}\nmodel: {dtype: float32}": "memory.gradient_reduction: "
    "is bfloat16, and model.dtype is float32; write float32, or model.dtype: bfloat16",
    "memory: {mlp_tile_tokens: 0}": "memory.mlp_tile_tokens: is 0, out of range; "
    "write a whole number of tokens (such as 4096 or 128k) of at least 1 or auto or none",
    "memory: {loss_tile_tokens: 0}": "memory.loss_tile_tokens: is 0, out of range; "
    "write a whole number of tokens (such as 4096 or 128k) of at least 1 or auto or none",
    "model: {rope_scaling: {factor: 2}}": "model.rope_scaling: has no `rope_type`; "
    "write {rope_type: yarn, factor: 4.0} or null",
    "model: {rope_scaling: {rope_type: [yarn]}}": "model.rope_scaling.rope_type: expected one of "
    "default | linear | dynamic | yarn | longrope | llama3, got a list; write default | linear | "
    "dynamic | yarn | longrope | llama3",
    "model: {rope_scaling: {rope_type: yarm, factor: 2}}": "model.rope_scaling.rope_type: unknown "
    "value `yarm`; did you mean `yarn`? "
    "Allowed: default | linear | dynamic | yarn | longrope | llama3",
    "model: {rope_scaling: {rope_type: linear, factor: 2, beta_fast: 1}}": "model.rope_scaling."
    "beta_fast: unknown key `beta_fast`; known here: rope_type, rope_theta, factor",
    "model: {rope_scaling: {rope_type: longrope, short_factor: [1], long_factor: [0]}}": (
        "model.rope_scaling.long_factor[0]: is 0, out of range; write a number above 0"
    ),
    "model: {rope_scaling: {rope_type: longrope, short_factor: [1]}}": (
        "model.rope_scaling.long_factor: is missing and has no default; write `long_factor`"
    ),
    "model: {rope_scaling: {rope_type: yarn, factor: 0.5}}": "model.rope_scaling.factor: "
    "is 0.5, out of range; write a number of at least 1",
}


@pytest.mark.parametrize("text", COMBINATIONS)
def test_a_wrong_combination_is_one_problem(tmp_path: Path, text: str) -> None:
    assert lines(tmp_path, text) == [f"r.yaml:2: {COMBINATIONS[text]}"]


FINE = [
    DATA % (", weight: 1", ", eval_fraction: 0.1"),
    "training: {steps: null, epochs: 2}",
    EVAL % "training: {patience: 1, eval_every_steps: 5}\ncheckpoint: {keep_best: true}",
    EVAL % "training: {patience: 1, eval_every_epochs: 5}\ncheckpoint: {every_epochs: 1}",
    "model: {name_or_path: null, config: c.json}",
    "model: {name_or_path: null, config: {model_type: llama, hidden_size: 64}}",
    "lr_schedule: {warmup_steps: 0}",
    "lr_schedule: {warmup_ratio: null, warmup_steps: 5}",
    "lr_schedule: {min_learning_rate: 1e-5}",
    "lr_schedule: {type: cosine_restarts, cycles: 3}",
    "lr_schedule: {type: polynomial, power: 0.5}",
    "lr_schedule: {type: wsd, decay_ratio: 0.2}",
    "training: {stop_step: 2}",
    "training: {max_grad_norm: null}",
    CP % "ulysses_cp, ulysses_degree_in_cp: 6",
    CP % "ring_cp, ulysses_degree_in_cp: 1",
    CP % "hybrid_cp, ulysses_degree_in_cp: 3",
    CP % "planned_cp, exchange_stages: 2",
    CP % "colossalai_cp",
    "parallel_config: {context_parallel_algo: hybrid_cp}",
    "parallel_config: {context_parallel_algo: ring_cp, ulysses_degree_in_cp: 4}",
    "model: {rope_scaling: {rope_type: default}}",
    "memory: {gradient_checkpointing: false, recompute: auto}",
    "model: {rope_scaling: {rope_type: llama3, factor: 8, low_freq_factor: 1, "
    "high_freq_factor: 4, original_max_position_embeddings: 8192}}",
]


def test_colossalai_cp_is_the_all_gather(tmp_path: Path) -> None:
    recipe = load_over(tmp_path, CP % "colossalai_cp")
    assert recipe.parallel_config.context_parallel_algo == "allgather_cp"


@pytest.mark.parametrize("text", FINE)
def test_a_right_combination_loads(tmp_path: Path, text: str) -> None:
    load_over(tmp_path, text)


def test_a_rule_that_reads_a_faulty_key_is_not_asked() -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": "x"},
            "data": {"train": "x", "sequence_length": 8},
            "training": {"steps": 1, "global_batch_size": 1, "eval_every_steps": 5},
            "parallel_config": {
                "context_parallel": 4,
                "context_parallel_algo": "planned_cp",
                "ulysses_degree_in_cp": 3,
            },
        }
    )
    assert [key for key, _, _ in broken(recipe, set())] == [
        "parallel_config.ulysses_degree_in_cp",
        "training.eval_every_steps",
    ]
    assert broken(recipe, {"parallel_config.ulysses_degree_in_cp", "data"}) == []
    assert len(RULES) == 28


ZERO, STAGE = "deepspeed.zero_optimization", "deepspeed.zero_optimization.stage"


@pytest.mark.parametrize(
    ("reads", "noted"),
    [
        (lambda zero: zero["stage"], STAGE),
        (lambda zero: "stage" in zero, STAGE),
        (lambda zero: zero.get("stage"), STAGE),
        (lambda zero: [*zero.items()], ZERO),
        (lambda zero: [*zero.values()], ZERO),
        (lambda zero: {**zero}, ZERO),
        (len, ZERO),
        (lambda zero: zero == {}, ZERO),
    ],
)
def test_however_a_rule_reads_a_mapping_it_has_read_it(
    reads: Callable[[Mapping[str, Any]], object], noted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": "x"},
            "data": {"train": "x", "sequence_length": 8},
            "training": {"steps": 1, "global_batch_size": 1},
            "deepspeed": {"zero_optimization": {"stage": 2}},
        }
    )

    def rule(recipe: Recipe) -> Iterator[Finding]:
        reads(recipe.deepspeed.zero_optimization)
        yield "key", "what", "remedy"

    monkeypatch.setattr(rules, "RULES", (rule,))
    assert broken(recipe, {"deepspeed.aio"}) == [("key", "what", "remedy")]
    assert broken(recipe, {noted}) == broken(recipe, {STAGE}) == []


def test_a_rule_is_silent_only_about_what_it_has_read_of_a_fault(tmp_path: Path) -> None:
    """A fault that a rule did not look at hides nothing; one that it did is told alone."""
    text = "parallel_config: {seq_split_num: 2, switching: word, pipeline_stage: %s}"
    keys = [line.split(": ")[1] for line in lines(tmp_path, text % 1)]
    assert keys == ["parallel_config.switching", "parallel_config.seq_split_num"]
    keys = [line.split(": ")[1] for line in lines(tmp_path, text % 0)]
    assert keys == ["parallel_config.pipeline_stage", "parallel_config.switching"]
    text = "deepspeed: {zero_optimization: {stage: 0, round_robin_gradients: 3}}\n"
    text += "parallel_config: {expert_parallel: 2}"
    keys = [line.split(": ")[1] for line in lines(tmp_path, text)]
    assert keys == ["deepspeed.zero_optimization.round_robin_gradients"]


DEEPSPEED = {
    "zero_optimisation: {}": ".zero_optimisation: unknown key `zero_optimisation`; "
    "did you mean `zero_optimization`?",
    "zero_optimization: {reduce_buket_size: 5}": ".zero_optimization.reduce_buket_size: "
    "unknown key `reduce_buket_size`; did you mean `reduce_bucket_size`?",
    "zero_optimization: {stage: 4}": ".zero_optimization.stage: is 4, out of range; "
    "write a whole number from 0 to 3 or auto",
    "zero_optimization: true": ".zero_optimization: expected a mapping, got true; "
    "write zero_optimization: {stage: …}",
    "zero_optimization: {stage: 1, leaf_module: 3}": ".zero_optimization.leaf_module: "
    "expected a mapping, got 3; write leaf_module: {classes: …}",
    "zero_optimization: {stage: 0, offload_optimizer: {device: cpu}}": ".zero_optimization."
    "offload_optimizer: needs ZeRO stage 1, and the stage is 0; "
    "write stage: 1 or more, or leave it out",
    "zero_optimization: {stage: 3, offload_param: {device: nvme}}": ".zero_optimization."
    "offload_param.nvme_path: is missing, and device is nvme; write a folder on the NVMe disk",
    "zero_optimization: {offload_optimizer: {device: cpu, ratio: 0.5}}": ".zero_optimization."
    "offload_optimizer.ratio: is 0.5, and below 1 needs DeepSpeed's own Adam, which a compiler has "
    "to build; write 1.0, or leave it out",
    "zero_optimization: {legacy_stage1: true}": ".zero_optimization.legacy_stage1: "
    "is set, and DeepSpeed has no more what it asks for; leave it out",
    "zero_optimization: {zenflow: {topk_ratio: 0.1}}": ".zero_optimization.zenflow: "
    "is set, and updates some weights by gradients of earlier steps: a step is not one process's; "
    "leave it out",
    "zero_optimization: {stage3_module_granularity_threshold: 9}": ".zero_optimization."
    "stage3_module_granularity_threshold: is set, and DeepSpeed may take the whole model for one "
    "module, whose embedding, layers and head are called one by one; leave it out",
    "zero_optimization: {leaf_module: {classes: [Linear]}}": ".zero_optimization.leaf_module: "
    "is set, and DeepSpeed may take a module's gradients before they have come: they are lost; "
    "leave it out",
    "zero_optimization: {offload_optimizer: {devise: cpu}}": ".zero_optimization."
    "offload_optimizer.devise: unknown key `devise`; did you mean `device`?",
    "zero_optimization: {cpu_offload: true, offload_optimizer: {}}": ".zero_optimization."
    "cpu_offload: says the same as `offload_optimizer`; keep `offload_optimizer`",
    "zero_optimization: {cpu_offload_use_pin_memory: true}": ".zero_optimization."
    "cpu_offload_use_pin_memory: is deprecated, and DeepSpeed ignores it; "
    "write offload_optimizer.pin_memory",
    "zero_optimization: {compute_grad_norm: false}": ".zero_optimization.compute_grad_norm: "
    "is false, but gradients are clipped by their norm and the norm is logged; leave it out",
    "aio: {block_sise: 4}": ".aio.block_sise: unknown key `block_sise`; "
    "did you mean `block_size`?",
}  # fmt: skip


@pytest.mark.parametrize("text", DEEPSPEED)
def test_deepspeeds_block_is_checked_to_the_leaves(tmp_path: Path, text: str) -> None:
    assert lines(tmp_path, f"deepspeed: {{{text}}}") == [f"r.yaml:2: deepspeed{DEEPSPEED[text]}"]


def test_zero_fields_come_under_their_documented_names(tmp_path: Path) -> None:
    text = "deepspeed: {zero_optimization: {stage: 3, prefetch_bucket_size: 5e7, "
    text += "cpu_offload_param: true, cpu_offload: false, offload_optimizer: {device: cpu}}}"
    assert load_over(tmp_path, text).deepspeed.zero_optimization == {
        "stage": 3,
        "stage3_prefetch_bucket_size": 50_000_000,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    }
