"""Every key of the contract: its default, its type, its message; and the way back to YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from uspft.config import RecipeError, dump, load
from uspft.config.loading import mappings
from uspft.config.recipe import ParallelBlock, Recipe
from uspft.config.reference import blocks, keys

KEYS = mappings()
GOOD = """\
model: {name_or_path: org/name}
data: {train: x.jsonl, sequence_length: 4k}
training: {steps: 3, global_batch_size: 2}
"""

# The contract's example, without what is not available yet.
EXAMPLE = """\
base: [../configs/zero/zero3.yaml]
output_dir: outputs/my-run
seed: 42
model:
  name_or_path: Qwen/Qwen3-8B
  config: null
  tokenizer: null
  dtype: bfloat16
  attention: auto
  rope_scaling: null
  overrides: {}
  adapter: null
  freeze: []
  trust_remote_code: false
data:
  train: data/x.jsonl
  eval: null
  eval_fraction: null
  format: auto
  fields: {}
  sequence_length: 128k
  packing: best_fit
  overlong: error
  train_on: assistant
  on_bad_sample: error
  chat_template: null
  shuffle: true
  workers: 2
  cache_dir: null
parallel_config:
  data_parallel: auto
  model_parallel: 1
  use_seq_parallel: false
  context_parallel: 8
  context_parallel_algo: hybrid_cp
  ulysses_degree_in_cp: 4
  exchange_stages: auto
  tensor_parallel_algo: megatron
  tensor_mesh: auto
  tensor_slices: auto
  pipeline_stage: 1
  micro_batch_num: auto
  pp_interleave_num: 1
  seq_split_num: 1
  fine_grain_interleave: 1
  strategies: null
  switching: auto
  pipeline_scheduler: auto
  pipeline_interleave: auto
  layers_per_stage: null
  offset: null
deepspeed:
  zero_optimization: {stage: 3}
optimizer: {type: adamw, learning_rate: 1e-5, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1}
lr_schedule: {type: cosine, warmup_ratio: 0.03, min_learning_rate: 0.0}
training:
  steps: 1000
  global_batch_size: 32
  micro_batch_size: 1
  max_grad_norm: 1.0
  max_bad_steps: 0
  max_norm_spike: null
  objective: causal
  eval_every_steps: null
  patience: null
  eval_micro_batch_size: null
  debug: false
memory:
  gradient_checkpointing: true
  recompute: auto
  offload_activations: none
  gradient_reduction: float32
  loss_tile_tokens: auto
  mlp_tile_tokens: none
checkpoint: {every_steps: 500, keep_last: 2, keep_best: false, overlap: false, resume: auto}
export: {huggingface: true}
logging: {every_steps: 1, tensorboard: false, wandb: null, mlflow: null, report: true}
launch: {processes: auto, device: auto, restarts: 0, min_hosts: null}
"""
# Keys that the example does not write out: alternatives to keys that it does, and pass-through.
NOT_IN_EXAMPLE = {
    "training.epochs": None,
    "training.eval_every_epochs": None,
    "checkpoint.every_epochs": None,
    "lr_schedule.warmup_steps": None,
    "deepspeed.aio": None,
    "deepspeed.comms_logger": None,
    "deepspeed.flops_profiler": None,
    "deepspeed.wall_clock_breakdown": False,
}


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def contract_keys() -> list[str]:
    """Every key of the recipe outside lists, `base` aside."""
    top = [
        key for key in KEYS[""] if key not in Recipe.model_fields or key in ("output_dir", "seed")
    ]
    blocks = [key for key in KEYS[""] if key not in top]
    return [*top, *(f"{block}.{key}" for block in blocks for key in KEYS[block])]


def value_of(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def test_the_contract_has_this_many_keys() -> None:
    keys = contract_keys()
    assert len(keys) == len(set(keys)) == 109
    assert {at: len(names) for at, names in KEYS.items()} == {
        "": 14,
        "model": 11,
        "model.adapter": 6,
        "data": 16,
        "data.train[]": 9,
        "data.eval[]": 9,
        "parallel_config": 23,
        "parallel_config.strategies[]": 17,
        "deepspeed": 5,
        "deepspeed.aio": 6,
        "deepspeed.comms_logger": 5,
        "deepspeed.flops_profiler": 7,
        "deepspeed.zero_optimization": 52,
        "deepspeed.zero_optimization.offload_param": 6,
        "deepspeed.zero_optimization.offload_optimizer": 10,
        "deepspeed.zero_optimization.zenflow": 9,
        "deepspeed.zero_optimization.leaf_module": 3,
        "optimizer": 5,
        "lr_schedule": 8,
        "training": 14,
        "memory": 7,
        "checkpoint": 6,
        "export": 1,
        "logging": 5,
        "logging.wandb": 12,
        "logging.mlflow": 5,
        "launch": 6,
    }


def test_the_contracts_example_loads_and_its_values_are_the_defaults(tmp_path: Path) -> None:
    write(tmp_path, "deepspeed: {zero_optimization: {stage: 2}}\n", "configs/zero/zero3.yaml")
    example = load(write(tmp_path, EXAMPLE, "recipes/e.yaml")).recipe
    default = load(write(tmp_path, GOOD)).recipe
    assert example.data.sequence_length == 131072
    assert example.deepspeed.zero_optimization == {"stage": 3}
    own = {"output_dir", "model.name_or_path", "data.train", "data.sequence_length"}
    own |= {"training.steps", "training.global_batch_size", "deepspeed.zero_optimization"}
    own |= {f"parallel_config.{key}" for key in ("context_parallel", "context_parallel_algo")}
    own |= {"parallel_config.ulysses_degree_in_cp"}
    for key in contract_keys():
        if key not in own:
            assert value_of(example, key) == value_of(default, key), key
    for key, value in NOT_IN_EXAMPLE.items():
        assert value_of(default, key) == value
    assert default.output_dir == Path("outputs/r")
    assert default.deepspeed.zero_optimization == {"stage": 1}
    degrees = default.parallel_config
    assert (degrees.context_parallel, degrees.context_parallel_algo) == (1, None)


WRONG = [-7.25, {"zzz": [1]}, [[[]]], True, "", None, "\0", "0o7", 10**30, "10k", [1], 4.0]


@pytest.mark.parametrize("key", contract_keys())
def test_a_wrong_value_is_one_problem_that_names_key_and_line(tmp_path: Path, key: str) -> None:
    write(tmp_path, GOOD, "good.yaml")
    refused = 0
    for value in WRONG:
        names = key.split(".")
        text = "base: [good.yaml]\n\n"
        text += "".join("  " * depth + f"{name}:\n" for depth, name in enumerate(names[:-1]))
        text += "  " * (len(names) - 1) + f"{names[-1]}: {json.dumps(value)}\n"
        line = 2 + len(names)
        file = write(tmp_path, text)
        try:
            load(file)
        except RecipeError as error:
            refused += 1
            assert len(error.problems) == 1, (value, str(error))
            problem = error.problems[0]
            inside = problem.key == key or problem.key.startswith((f"{key}.", f"{key}["))
            assert inside, (value, str(problem))
            assert problem.where == f"{file}:{line}", (value, str(problem))
            assert problem.what and problem.remedy and "\n" not in str(problem)
    assert refused >= 5


@pytest.mark.parametrize("block", [key for key in KEYS[""] if key in KEYS])
@pytest.mark.parametrize("value", [5, [1], "text", None])
def test_a_block_that_is_no_mapping_is_one_problem(tmp_path: Path, block: str, value: Any) -> None:
    write(tmp_path, GOOD, "good.yaml")
    file = write(tmp_path, f"base: [good.yaml]\n{block}: {json.dumps(value)}\n")
    with pytest.raises(RecipeError) as caught:
        load(file)
    (problem,) = caught.value.problems
    assert str(problem).startswith(f"{file}:2: {block}: expected a mapping of keys, got ")


def test_sources_are_normalised(tmp_path: Path) -> None:
    text = GOOD.replace("x.jsonl", "[a.jsonl, {path: org/set, split: train, format: text}]")
    first, second = load(write(tmp_path, text)).recipe.data.train
    assert (first.path, first.split, first.format, first.weight) == ("a.jsonl", None, None, None)
    assert (second.path, second.split, second.format) == ("org/set", "train", "text")
    text = GOOD.replace("x.jsonl", "[{split: train}, {path: x, forma: text}, 3]")
    with pytest.raises(RecipeError) as caught:
        load(write(tmp_path, text))
    assert [str(p).rpartition("r.yaml:")[2] for p in caught.value.problems] == [
        "2: data.train[1].forma: unknown key `forma`; did you mean `format`?",
        "2: data.train[0].path: is missing and has no default; write `path`",
        "2: data.train[2]: expected a mapping of keys, got 3; "
        "indent its keys below it, or leave it out",
    ]


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "lr_schedule: {warmup_steps: 4, type: linear}\n",
        "checkpoint: {every_steps: null, resume: 'null'}\n",
        "deepspeed: {zero_optimization: {stage: 3, offload_param: {device: cpu}}}\n",
        "memory: {loss_tile_tokens: 4k}\noutput_dir: '1e-5'\n",
        "parallel_config: {context_parallel: 2, context_parallel_algo: ring_cp}\nseed: 0\n",
        "optimizer: {betas: [0, 0.5], learning_rate: 1, eps: 1e-30}\n",
    ],
)
def test_what_dump_writes_load_reads_back(tmp_path: Path, extra: str) -> None:
    odd = "model: {name_or_path: '010', tokenizer: \"ö: #\\n x\", "
    odd += "overrides: {a: 1.0, b: 1, c: '3', d: [null, true, 'true'], e: {'1': x}, f: '1e5'}, "
    odd += "rope_scaling: {rope_type: yarn, factor: 2}}\n"
    recipe = load(write(tmp_path, odd + "".join(GOOD.splitlines(True)[1:]) + extra)).recipe
    text = dump(recipe)
    again = load(write(tmp_path, text, "again.yaml")).recipe
    assert again == recipe
    assert dump(again) == text
    later = {key.path for at, kind in blocks().items() for key in keys(kind, at) if key.later}
    assert len(later) == 1
    for key in contract_keys():
        assert (key.split(".")[-1] + ":" in text) == (key not in later), key


def test_a_recipe_cannot_change(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, GOOD)).recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3
    with pytest.raises(ValueError, match="Extra inputs"):
        ParallelBlock.model_validate({"no_such_key": 1})
