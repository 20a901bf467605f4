"""Whole runs of models with layers that have a state: which there are, and their recipes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.models import Documents
from tests.support.pairwise import pairwise
from tests.support.rows import ROW
from tests.support.runs import small_recipe
from tests.support.stages import ZERO

STEPS, RATE, CLIP, EPS, SEED = 2, 1e-3, 0.5, 1e-6, 7
ROWS = 2
"""Of a step."""
LORA = {"type": "lora", "rank": 4, "alpha": 6.0}
MODELS: dict[str, dict[str, Any]] = {
    "uneven": {
        "kind": "qwen3_5_text",
        "kv_heads": 2,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
    },
    "olmo": {"kind": "olmo_hybrid", "kv_heads": 2},
    "next": {"kind": "qwen3_next", "kv_heads": 2},
    "experts": {"kind": "qwen3_5_moe_text", "kv_heads": 2},
}
ROUTED = ("next", "experts")
"""In bfloat16 a router may choose otherwise."""
TARGETS = {
    "uneven": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj"],
    "olmo": ["q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "o_proj"],
    "next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj"],
    "experts": ["in_proj_qkv", "in_proj_z", "out_proj", "v_proj"],
}
"""The projections that adapters stand beside."""
LAYOUTS: dict[int, tuple[tuple[int, int, int], ...]] = {
    4: ((2, 1, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2), (1, 2, 2), (1, 2, 1)),
    6: ((3, 1, 1), (3, 2, 1), (3, 1, 2)),
    8: ((2, 2, 2), (4, 2, 1), (4, 1, 2), (2, 2, 1)),
}
"""By ranks, context and tensor degrees and stages; replicas of the data are what is left."""
ULYSSES: dict[str, dict[int, int | None]] = {
    "ulysses_cp": {2: None, 3: None, 4: None},
    "ring_cp": {2: None, 3: None, 4: None},
    "allgather_cp": {2: None, 3: None, 4: None},
    "planned_cp": {2: 1, 3: 1, 4: 2},
    "hybrid_cp": {4: 2},
}
"""By algorithm and context degree the Ulysses degree, where it is the recipe's."""
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "kept": {"memory": {"gradient_checkpointing": False}},
    "nothing": {"memory": {"recompute": "nothing"}},
    "exchange": {"memory": {"recompute": "exchange"}},
    "attention": {"memory": {"recompute": "attention", "mlp_tile_tokens": 5}},
    "host": {"memory": {"offload_activations": "cpu"}},
    "tokens": {"parallel_config": {"use_seq_parallel": True}},
    "adapter": {"model": {"adapter": LORA}},
    "groups": {"memory": {"attention_heads": 1, "mlp_tile_tokens": 5, "recompute": "attention"}},
    "chunks": {"parallel_config": {"seq_split_num": 3}},
}
STAGES = ("zero1", "zero2", "zero3 whole")


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    layout: tuple[int, int, int]
    algorithm: str
    zero: str
    packed: bool
    option: str
    dtype: str = "float32"

    @property
    def is_legal(self) -> bool:
        context, tensor, stages = self.layout
        if context > 1 and context not in ULYSSES[self.algorithm]:
            return False
        if self.model in ROUTED and self.dtype == "bfloat16":
            return False
        if self.option == "tokens" and tensor == 1:
            return False
        if self.option == "chunks" and (stages == 1 or context > 1):
            return False
        exchanges = self.algorithm in ("ulysses_cp", "hybrid_cp") or (
            self.algorithm == "planned_cp" and context == 4
        )
        return self.option != "exchange" or (context > 1 and exchanges)


def cases(ranks: int) -> list[Case]:
    """Every pair of two traits."""
    factors = (
        tuple(MODELS),
        LAYOUTS[ranks],
        tuple(ULYSSES),
        STAGES,
        (True, False),
        tuple(OPTIONS),
        ("float32", "bfloat16"),
    )
    found = pairwise(*factors, legal=lambda traits: Case(*traits).is_legal)
    return [Case(*traits) for traits in found]


FEW = {
    4: [
        Case("uneven", (2, 2, 1), "planned_cp", "zero1", True, "tokens"),
        Case("olmo", (1, 2, 2), "ring_cp", "zero3 whole", True, "nothing"),
        Case("uneven", (1, 2, 2), "ring_cp", "zero1", True, "chunks"),
        Case("uneven", (4, 1, 1), "hybrid_cp", "zero2", True, "exchange"),
        Case("uneven", (2, 2, 1), "ring_cp", "zero3 whole", True, "adapter"),
        Case("next", (2, 1, 2), "ring_cp", "zero1", True, "host"),
        Case("experts", (2, 1, 1), "allgather_cp", "zero2", False, "attention"),
        Case("next", (2, 2, 1), "planned_cp", "zero3 whole", True, "tokens"),
        Case("uneven", (2, 2, 1), "ulysses_cp", "zero2", True, "kept", "bfloat16"),
        Case("uneven", (2, 2, 1), "ring_cp", "zero3 whole", True, "groups"),
        Case("next", (4, 1, 1), "hybrid_cp", "zero2", True, "groups"),
        Case("olmo", (2, 1, 2), "ulysses_cp", "zero1", False, "groups"),
    ],
    6: [Case("olmo", (3, 2, 1), "planned_cp", "zero1", True, "attention")],
}
"""By ranks the runs of the suite: each algorithm, model, option and stage."""


def recipe(
    case: Case, folder: Path, data: dict[bool, Documents], **blocks: dict[str, Any]
) -> dict[str, Any]:
    """The recipe of a case; blocks win."""
    context, tensor, stages = case.layout
    parallel: dict[str, Any] = {"model_parallel": tensor, "pipeline_stage": stages}
    if stages > 1:
        parallel["layers_per_stage"] = [1] * stages
    if context > 1:
        parallel |= {"context_parallel": context, "context_parallel_algo": case.algorithm}
        if ulysses := ULYSSES[case.algorithm][context]:
            parallel["ulysses_degree_in_cp"] = ulysses
    base: dict[str, dict[str, Any]] = {
        "model": {"dtype": case.dtype},
        "data": {"packing": "best_fit" if case.packed else "none"},
        "parallel_config": parallel,
        "deepspeed": {"zero_optimization": ZERO[case.zero]},
        "optimizer": {"eps": EPS},
        "training": {"steps": STEPS, "global_batch_size": ROWS, "max_grad_norm": CLIP},
    }
    for more in (OPTIONS[case.option], blocks):
        for block, keys in more.items():
            base[block] = {**base.get(block, {}), **keys}
    if case.option == "adapter":
        base["model"]["adapter"] = {**LORA, "target_modules": TARGETS[case.model]}
    return {"seed": SEED} | small_recipe(folder / case.model, data[case.packed].path, ROW, **base)
