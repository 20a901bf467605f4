"""A small model whose weights, gradients and optimizer are far more than its rows, and what is
predicted of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models import VOCABULARY, make_documents
from tests.support.runs import small_recipe
from uspft.config.recipe import Recipe
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.planner.memory import zero
from uspft.planner.memory.formula import Memory, memory_of
from uspft.planner.memory.zero import LAID_FLAT
from uspft.planner.options import options_of
from uspft.prepare.host import CONFIGS

ROW = 4  # few tokens: activations are hardly seen
BUCKET = {"reduce_bucket_size": 160_300}
"""What the gradients of the head and of a layer just fill."""
LAYERS = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 34_000,
    "stage3_max_reuse_distance": 400_000,
    "stage3_max_live_parameters": 300_000,
}
"""Of a layer's 147,712: as much as DeepSpeed's own bounds are of a layer of 7B."""
LORA = {"adapter": {"type": "lora", "rank": 64}}
HEADS: dict[str, dict[str, Any]] = {
    "small": {},
    "large": {"vocab_size": 6000},
    "tied": {"vocab_size": 6000, "tie_word_embeddings": True},
}
"""Vocabularies: the large ones' table has as many parameters as five layers."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Case(NamedTuple):
    zero: dict[str, Any]
    reduction: str = "float32"
    dtype: str = "bfloat16"
    trained: dict[str, Any] | None = None
    flat: int = int(LAID_FLAT)
    """The elements of gradients that DeepSpeed lays flat at once."""
    passes: int = 1
    """Micro-batches of a rank in a step."""
    head: str = "small"

    def recipe(self, folder: Path) -> dict[str, Any]:
        return small_recipe(
            folder / self.head,
            folder / "d.jsonl",
            ROW,
            model={"dtype": self.dtype, **(self.trained or {})},
            memory={"gradient_reduction": self.reduction},
            deepspeed={"zero_optimization": self.zero},
            training={"steps": 2, "global_batch_size": 2 * self.passes},
        )

    def predicted(self, folder: Path) -> Memory:
        """What a rank of two needs."""
        recipe, layout = Recipe.model_validate(self.recipe(folder)), Layout(data=2)
        shape = read_shape(recipe.model, CONFIGS)
        assert isinstance(shape, ModelShape)
        with patch.object(zero, "LAID_FLAT", self.flat):
            return memory_of(shape, layout, ROW, options=options_of(recipe, layout))


def make_inputs(folder: Path, layers: int) -> None:
    """Write a model of so many layers with each head, and documents."""
    for name, own in HEADS.items():
        config = LlamaConfig(**SIZES | own, num_hidden_layers=layers)
        LlamaForCausalLM(config).save_pretrained(folder / name)
    make_documents(folder / "d.jsonl", [ROW] * 8, masked=[0.0])


def apart(
    found: dict[str, int], predicted: dict[str, int], slack: int = 0
) -> dict[str, tuple[int, int]]:
    """What is predicted and counted of cases where these are over two percent and the slack, in
    bytes, apart."""
    pairs = {name: (predicted[name], counted) for name, counted in found.items()}
    return {n: (a, b) for n, (a, b) in pairs.items() if not b or abs(a - b) > 0.02 * b + slack}
