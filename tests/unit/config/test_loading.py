"""Unknown keys, keys of other tools, those that uspft derives, features that come later; and null
on the command line: a key's default, or null where that is a value of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.problems import BASE, lines
from uspft.config import Recipe, RecipeError, load
from uspft.config.loading import mappings
from uspft.config.messages import choices
from uspft.config.other_tools import table_of
from uspft.config.reference import blocks, keys

DERIVED = {
    row.key.removeprefix("deepspeed."): row.to
    for row in table_of("deepspeed").rows.values()
    if row.key.startswith("deepspeed.") and row.key.count(".") == 1 and row.to
    if row.key.removeprefix("deepspeed.") not in mappings()["deepspeed"]
}
"""DeepSpeed's own keys that follow from the recipe, and the key that rules each."""
NAMES = {
    "parallel_config: {context_paralel: 2}": "r.yaml:2: parallel_config.context_paralel: "
    "unknown key `context_paralel`; did you mean `context_parallel`?",
    "Seed: 2": "r.yaml:2: Seed: unknown key `Seed`; did you mean `seed`?",
    "steps: 3": "r.yaml:2: steps: unknown key `steps`; it belongs to `training.steps`",
    "every_steps: 3": "r.yaml:2: every_steps: unknown key `every_steps`; "
    "it belongs to `checkpoint.every_steps` or `logging.every_steps`",
    "training.steps: 3": "r.yaml:2: training.steps: unknown key `training.steps`; "
    "dots are for the command line: write `steps` below `training`",
    "deepspeed: {zero_optimization.stage: 3}": "r.yaml:2: deepspeed.zero_optimization.stage: "
    "unknown key `zero_optimization.stage`; "
    "dots are for the command line: write `stage` below `deepspeed.zero_optimization`",
    "stage: 3": "r.yaml:2: stage: unknown key `stage`; "
    "it belongs to `deepspeed.zero_optimization.stage`",
    "per_device_train_batch_size: 1": "r.yaml:2: per_device_train_batch_size: "
    "unknown key `per_device_train_batch_size`; here it is `training.micro_batch_size`; rows of "
    "one forward of a replica; the whole step's are `training.global_batch_size`",
    "optimizer: {lr: 1}": "r.yaml:2: optimizer.lr: unknown key `lr`; "
    "here it is `optimizer.learning_rate`",
    "training: {num_train_epochs: 1}": "r.yaml:2: training.num_train_epochs: "
    "unknown key `num_train_epochs`; here it is `training.epochs`",
    "memory: {foo: 1}": "r.yaml:2: memory.foo: unknown key `foo`; known here: "
    "gradient_checkpointing, recompute, attention_heads, offload_activations, gradient_reduction, "
    "loss_tile_tokens, mlp_tile_tokens",
    "parallel_config: {recompute: attention}": "r.yaml:2: parallel_config.recompute: unknown key "
    "`recompute`; it belongs to `memory.recompute`",
    "recompute: attention": "r.yaml:2: recompute: unknown key `recompute`; "
    "it belongs to `memory.recompute`",
}


@pytest.mark.parametrize("text", NAMES)
def test_an_unknown_key_is_told_where_it_belongs(tmp_path: Path, text: str) -> None:
    assert lines(tmp_path, text) == [NAMES[text]]


def test_a_required_key_written_with_a_dot_is_one_problem(tmp_path: Path) -> None:
    wrong = BASE.replace("training: {steps: 3, ", "training.steps: 3\ntraining: {")
    assert wrong != BASE
    (line,) = lines(tmp_path, "seed: 1", wrong)
    assert line.endswith("write `steps` below `training`")


def test_a_misspelt_required_key_is_one_problem(tmp_path: Path) -> None:
    wrong = BASE.replace("sequence_length", "max_seq_length")
    assert lines(tmp_path, "seed: 1", wrong) == [
        "base.yaml:2: data.max_seq_length: unknown key `max_seq_length`; "
        "here it is `data.sequence_length`"
    ]
    assert lines(tmp_path, "seed: 1", BASE.replace("training:", "trainning:")) == [
        "base.yaml:3: trainning: unknown key `trainning`; did you mean `training`?"
    ]


def test_the_table_of_derived_keys_names_keys_that_exist() -> None:
    known = {f"{at}.{key}" if at else key for at, keys in mappings().items() for key in keys}
    known.add("model.adapter")
    assert {ours for ours in DERIVED.values() if ours not in known} == set()
    assert len(DERIVED) == 30


ASKED = {
    "model": {
        "trust_remote_code: true": "code from the hub",
    },
}


def test_what_is_not_available_is_refused_as_a_whole(tmp_path: Path) -> None:
    features = set()
    for block, asked in ASKED.items():
        for text, feature in asked.items():
            (line,) = lines(tmp_path, f"{block}: {{{text}}}")
            assert line.startswith(f"r.yaml:2: {block}."), line
            assert f": {feature} is not available yet; " in line, line
            features.add(feature)
    assert len(features) == 1


def test_deepspeed_keys_that_the_recipe_rules_are_refused_by_name(tmp_path: Path) -> None:
    for key, ours in DERIVED.items():
        assert lines(tmp_path, f"deepspeed: {{{key}: 1}}") == [
            f"r.yaml:2: deepspeed.{key}: uspft derives `{key}`; leave it out: `{ours}` rules it"
        ]


SET = """\
seed: 7
optimizer: {learning_rate: 1}
data: {packing: none, shuffle: false}
checkpoint: {every_steps: 5}
parallel_config: {exchange_stages: null, use_seq_parallel: false, model_parallel: 4}
deepspeed: {zero_optimization: {stage: 3, reduce_bucket_size: 5, overlap_comm: true}}
model: {overrides: {a: 1}, adapter: {rank: 4, target_modules: [q_proj]}}
"""


def loaded(folder: Path, *words: str) -> Recipe:
    (folder / "base.yaml").write_text(BASE)
    (folder / "r.yaml").write_text(f"base: [base.yaml]\n{SET}")
    return load(folder / "r.yaml", words).recipe


def value_of(recipe: Any, path: str) -> Any:
    for name in path.split("."):
        recipe = recipe[name] if isinstance(recipe, dict) else getattr(recipe, name)
    return recipe


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("seed", 7, 42),
        ("optimizer.learning_rate", 1.0, 1e-5),
        ("data.packing", "none", "best_fit"),
        ("data.shuffle", False, True),
        ("parallel_config.model_parallel", 4, 1),
        ("deepspeed.zero_optimization.stage", 3, 1),
        ("checkpoint.every_steps", 5, None),
        ("deepspeed.zero_optimization.overlap_comm", True, None),
        ("model.overrides.a", 1, None),
    ],
)
def test_null_is_the_default_or_null_where_that_is_allowed(
    tmp_path: Path, path: str, before: Any, after: Any
) -> None:
    assert value_of(loaded(tmp_path), path) == before
    assert value_of(loaded(tmp_path, f"{path}=null"), path) == after
    assert value_of(loaded(tmp_path, f"{path}=null", f"{path}={before}".lower()), path) == before


def test_a_key_of_deepspeed_and_a_block_are_taken_out(tmp_path: Path) -> None:
    key = "deepspeed.zero_optimization.reduce_bucket_size=null"
    zero = loaded(tmp_path, key).deepspeed.zero_optimization
    assert zero == {"stage": 3, "overlap_comm": True}
    assert loaded(tmp_path, "deepspeed=null").deepspeed.zero_optimization == {"stage": 1}
    assert loaded(tmp_path, "optimizer={learning_rate: null}").optimizer.learning_rate == 1e-5
    assert loaded(tmp_path, "model.adapter=null").model.adapter is None


def test_what_has_no_default_is_missing_and_unmappings_stay_unknown(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"r.yaml:4: data.sequence_length: is missing"):
        loaded(tmp_path, "data.sequence_length=null")
    with pytest.raises(RecipeError, match=r"command line: sed: unknown key `sed`"):
        loaded(tmp_path, "sed=null")


def test_null_in_a_file_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("base: [r.yaml]\nseed: null\n")
    loaded(tmp_path)
    with pytest.raises(RecipeError, match=r"own.yaml:2: seed: expected a whole number"):
        load(tmp_path / "own.yaml")


def test_every_key_takes_null_on_the_command_line(tmp_path: Path) -> None:
    taken_out = 0
    default = loaded(tmp_path)
    for at, kind in blocks().items():
        for key in keys(kind, at):
            if "[]" in key.path or key.required or key.path == "base" or at == "model.adapter":
                continue
            word = f"{key.path}=null"
            expected = None if None in choices(key.node) else key.default
            taken_out += None not in choices(key.node)
            if key.path in ("model.name_or_path", "training.steps", "lr_schedule.warmup_ratio"):
                continue  # null there asks for another key
            if key.path == "output_dir":
                expected = default.output_dir
            assert value_of(loaded(tmp_path, word), key.path) == expected, word
    assert taken_out >= 35
