"""Runs whose matrices are split over ranks: which there are, and their recipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

from tests.support.models import Documents, make_documents, make_model
from tests.support.pairwise import pairwise
from tests.support.rows import PACKED_ROWS, PLAIN_ROWS, ROW
from tests.support.runs import small_recipe
from tests.support.stages import ZERO

STEPS, RATE, CLIP = 2, 1e-3, 0.5
UNEVEN = {"linear_num_key_heads": 5, "linear_num_value_heads": 10}
"""Heads of layers with a state, which ranks have unequal numbers of."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "heads": 8, "kv_heads": 2},
    "qwen2": {"kind": "qwen2", "heads": 4, "kv_heads": 2},
    "qwen3": {"kind": "qwen3", "heads": 8, "kv_heads": 2},
    "mistral": {"kind": "mistral", "sliding_window": 11},
    "phi3": {"kind": "phi3", "heads": 8, "kv_heads": 2},
    "olmo2": {"kind": "olmo2", "heads": 8, "kv_heads": 2},
    "smollm3": {"kind": "smollm3", "heads": 4, "kv_heads": 1},
    "granite": {"kind": "granite"},
    "gemma2": {"kind": "gemma2", "heads": 4, "kv_heads": 2},
    "gemma3_text": {"kind": "gemma3_text", "heads": 8, "kv_heads": 2},
    "gemma4_text": {"kind": "gemma4_text", "heads": 8, "kv_heads": 2},
    "qwen3_5_text": {"kind": "qwen3_5_text", "heads": 8, "kv_heads": 2, **UNEVEN},
    "olmo_hybrid": {"kind": "olmo_hybrid", "heads": 8, "kv_heads": 2, **UNEVEN},
}
"""A model of every dense family. On 4 ranks most have fewer key-value heads; 97 tokens of the
vocabulary divide by none."""
ON_EIGHT = ("qwen2", "phi3", "smollm3")
ALGORITHMS = ("ulysses_cp", "ring_cp", "planned_cp")
LAYOUTS = {4: ((2, 1), (2, 2)), 8: ((4, 2), (4, 1), (2, 2))}
"""By ranks, tensor and context degrees; at least two ranks hold the same part of every matrix."""


@dataclass(frozen=True)
class Case:
    """One run. tokens: whether they are split between matrices."""

    model: str
    layout: tuple[int, int]
    zero: str
    packed: bool
    tokens: bool

    @property
    def checkpointed(self) -> bool:
        return list(ZERO).index(self.zero) % 2 == self.packed

    @property
    def parallel(self) -> dict[str, Any]:
        tensor, context = self.layout
        found: dict[str, Any] = {"model_parallel": tensor, "use_seq_parallel": self.tokens}
        if context > 1:
            name = ALGORITHMS[list(MODELS).index(self.model) % len(ALGORITHMS)]
            found |= {"context_parallel": context, "context_parallel_algo": name}
        return found


def cases(ranks: int, *, full: bool = False) -> list[Case]:
    """Every model once (on eight ranks each kind of shared heads), its traits those that were met
    least; full: every pair of all traits, and all of LLaMA's."""
    factors = LAYOUTS[ranks], tuple(ZERO), (False, True), (False, True)
    if full:
        found = [Case(*case) for case in pairwise(tuple(MODELS), *factors)]
        of_llama = [Case("llama", *case) for case in product(*factors)]
        return list(dict.fromkeys([*found, *of_llama]))
    met: Counter[Any] = Counter()
    found = []
    for model in MODELS:
        if ranks == 8 and model not in ON_EIGHT:
            continue
        rest = min(product(*factors), key=lambda traits: _familiarity(traits, met))
        met.update(_traits(rest))
        found.append(Case(model, *rest))
    return found


def _traits(rest: tuple[Any, ...]) -> list[Any]:
    single = list(enumerate(rest))
    return single + [(one, other) for one in single for other in single if one < other]


def _familiarity(rest: tuple[Any, ...], met: Counter[Any]) -> tuple[int, int]:
    counts = [met[trait] for trait in _traits(rest)]
    return sum(counts[: len(rest)]), sum(counts)


def make_setting(
    folder: Path, models: Mapping[str, dict[str, Any]] = MODELS
) -> dict[bool, Documents]:
    """Make the models in a folder, and the data by whether its rows are packed."""
    for name, kind in models.items():
        make_model(folder / name, **kind)
    rows = {False: PLAIN_ROWS, True: PACKED_ROWS}
    return {
        packed: make_documents(folder / f"{packed}.jsonl", list(chain(*rows[packed])), masked=share)
        for packed, share in ((False, [0.0, 0.9, 0.4]), (True, [0.0, 0.95, 0.3]))
    }


def recipe(
    case: Case, folder: Path, data: dict[bool, Documents], **blocks: dict[str, Any]
) -> dict[str, Any]:
    """The recipe of a case; blocks win."""
    base: dict[str, dict[str, Any]] = {
        "data": {"packing": "best_fit" if case.packed else "none"},
        "parallel_config": case.parallel,
        "deepspeed": {"zero_optimization": ZERO[case.zero]},
        "training": {"steps": STEPS, "global_batch_size": 2, "max_grad_norm": CLIP},
        "memory": {"gradient_checkpointing": case.checkpointed},
    }
    merged = {key: {**base.get(key, {}), **blocks.get(key, {})} for key in {**base, **blocks}}
    return small_recipe(folder / case.model, data[case.packed].path, ROW, **merged)
