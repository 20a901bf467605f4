"""What ranks verify: the recipe without extras, and the group of each of a model's parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from uspft.config import dump, load
from uspft.verify.work import group_of, without_extras


@pytest.mark.parametrize(
    "compares",
    ["training: {patience: 2}", "checkpoint: {keep_best: true, every_epochs: 1}", ""],
)
def test_ranks_can_read_a_recipe_without_its_evaluations(tmp_path: Path, compares: str) -> None:
    """Seen to fail: `patience` and `keep_best` are refused where nothing is evaluated."""
    (tmp_path / "all.yaml").write_text(
        "model: {name_or_path: x}\ndata: {train: a, eval: b, sequence_length: 8}\n"
        "training: {steps: 4, global_batch_size: 1, eval_every_epochs: 0.5}\n"
    )
    (tmp_path / "asked.yaml").write_text(f"base: [all.yaml]\n{compares}\n")
    asked = load(tmp_path / "asked.yaml").recipe
    (tmp_path / "ranks.yaml").write_text(dump(without_extras(asked)))
    assert load(tmp_path / "ranks.yaml").recipe.training.eval_every_epochs is None


def test_parameters_have_groups() -> None:
    names = {
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        "model.layers.0.self_attn.q_proj.bias": "attention",
        "model.layers.0.self_attn.q_norm.weight": "norm",
        "model.layers.1.mlp.experts.gate_up_proj": "mlp",
        "base_model.model.layers.0.self_attn.q_proj.lora_A.default.weight": "adapter",
        "something": "other",
    }
    assert {name: group_of(name) for name in names} == names
