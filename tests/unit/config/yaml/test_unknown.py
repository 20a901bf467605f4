"""Unknown keys, keys of other tools, keys that uspft derives, features that come later."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.problems import BASE, lines
from uspft.config.available import LATER
from uspft.config.others import table_of
from uspft.config.yaml.unknown import KEYS

DERIVED = {
    row.key.removeprefix("deepspeed."): row.to
    for row in table_of("deepspeed").rows.values()
    if row.key.startswith("deepspeed.") and row.key.count(".") == 1 and row.to
    if row.key.removeprefix("deepspeed.") not in KEYS["deepspeed"]
}
"""DeepSpeed's own keys that follow from the recipe, and the key that rules each."""
NAMES = {
    "parallel_config: {context_paralel: 2}": "r.yaml:2: parallel_config.context_paralel: "
    "unknown key `context_paralel`; did you mean `context_parallel`?",
    "Seed: 2": "r.yaml:2: Seed: unknown key `Seed`; did you mean `seed`?",
    "steps: 3": "r.yaml:2: steps: unknown key `steps`; it belongs to `training.steps`",
    "every_steps: 3": "r.yaml:2: every_steps: unknown key `every_steps`; "
    "it belongs to `checkpoint.every_steps` or `logging.every_steps`",
    "stage: 3": "r.yaml:2: stage: unknown key `stage`; "
    "it belongs to `deepspeed.zero_optimization.stage`",
    "per_device_train_batch_size: 1": "r.yaml:2: per_device_train_batch_size: "
    "unknown key `per_device_train_batch_size`; here it is `training.micro_batch_size`; rows of "
    "one forward of a replica; the whole step's are `training.global_batch_size`",
    "optimizer: {lr: 1}": "r.yaml:2: optimizer.lr: unknown key `lr`; "
    "here it is `optimizer.learning_rate`",
    "training: {num_train_epochs: 1}": "r.yaml:2: training.num_train_epochs: "
    "unknown key `num_train_epochs`; here it is `training.epochs`; a whole number",
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
    known = {f"{at}.{key}" if at else key for at, keys in KEYS.items() for key in keys}
    known.add("model.adapter")
    assert {ours for ours in DERIVED.values() if ours not in known} == set()
    assert len(DERIVED) == 30


ASKED = {
    "parallel_config": {
        "fine_grain_interleave: 2": "interleaving a layer's work",
        "seq_split_num: 2": "sending parts of a row through a pipeline",
        "strategies: [{max_length: 4k, seq_split_num: 2}]": (
            "sending parts of a row through a pipeline"
        ),
        "strategies: [{max_length: 4k, fine_grain_interleave: 2}]": "interleaving a layer's work",
    },
    "model": {
        "trust_remote_code: true": "code from the hub",
    },
    "logging": {
        "report: true": "the report",
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
    assert features == {later.feature for later in LATER}
    assert len(LATER) == 4
    both = "seq_split_num: 2, strategies: [{max_length: 4k, seq_split_num: 2}]"
    (line,) = lines(tmp_path, f"parallel_config: {{{both}}}")
    assert line.endswith("write `seq_split_num: 1` and write `seq_split_num: 1`")


def test_deepspeed_keys_that_the_recipe_rules_are_refused_by_name(tmp_path: Path) -> None:
    for key, ours in DERIVED.items():
        assert lines(tmp_path, f"deepspeed: {{{key}: 1}}") == [
            f"r.yaml:2: deepspeed.{key}: uspft derives `{key}`; leave it out: `{ours}` rules it"
        ]
