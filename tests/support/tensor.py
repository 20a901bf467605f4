"""Runs whose matrices are split over ranks: their cases and recipes, what each gives, and one
process of transformers beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.launch import records_in
from tests.support.models import (
    Documents,
    Reference,
    make_documents,
    make_model,
    mismatch,
    reference,
)
from tests.support.pairwise import pairwise
from tests.support.rows import PACKED_ROWS, PLAIN_ROWS, ROW, row_documents
from tests.support.runs import close, held, prepared, run_recipe, small_recipe
from tests.support.stages import ZERO
from uspft.tensor.parts import Part

Data = dict[bool, Documents]
"""By whether rows are packed."""

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


def make_setting(folder: Path, models: Mapping[str, dict[str, Any]] = MODELS) -> Data:
    """Make the models in a folder, and the data by whether its rows are packed."""
    for name, kind in models.items():
        make_model(folder / name, **kind)
    rows = {False: PLAIN_ROWS, True: PACKED_ROWS}
    return {
        packed: make_documents(folder / f"{packed}.jsonl", list(chain(*rows[packed])), masked=share)
        for packed, share in ((False, [0.0, 0.9, 0.4]), (True, [0.0, 0.95, 0.3]))
    }


def recipe(case: Case, folder: Path, data: Data, **blocks: dict[str, Any]) -> dict[str, Any]:
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


def trained(rank: int, every: Sequence[Case], folder: Path, data: Data) -> dict[Case, Any]:
    """What each case gave, and how many elements of it this rank held of every parameter."""
    found = {}
    for number, case in enumerate(every):
        sizes: dict[str, tuple[int, int]] = {}

        def see(run: Any, sizes: dict[str, tuple[int, int]] = sizes) -> None:
            for name, parameter in run.engine.named.items():
                count = getattr(parameter, "ds_numel", parameter.numel())
                sizes[name] = count, Part.whole(run.engine.part_of(name).shape).count

        output = folder / f"run-{dist.get_world_size()}-{len(every)}-{number}"
        found[case] = run_recipe(recipe(case, folder, data), output, before=see), sizes
    return found


def wanted(case: Case, setting: tuple[Path, Data], steps: int = STEPS) -> Reference:
    """The same steps of one process."""
    folder, data = setting
    rows = row_documents(data, case.packed)[: 2 * steps]
    each = [list(chain(*rows[i : i + 2])) for i in range(0, 2 * steps, 2)]
    return reference(folder / case.model, each, rate=RATE, clip=CLIP)


def step_under_each(
    rank: int, every: Sequence[Case], output: Path, folder: Path, data: Data
) -> Any:
    """Train one step under each case, from the checkpoint of the one before, and export the end."""
    from uspft.training.loop import train

    for number, case in enumerate(every, 1):
        blocks = {
            "training": {"steps": number},
            "checkpoint": {"every_steps": 1},
            "export": {"huggingface": number == len(every)},
        }
        run = prepared(recipe(case, folder, data, **blocks), output, resume=number > 1)
        assert run.first_step == number - 1
        train(run, lambda: False)
        end = held(run.engine)
        close(run)
    return end if rank == 0 else None


def require_one_run(end: Any, output: Path, case: Case, setting: tuple[Path, Data]) -> None:
    """Require that four steps of `step_under_each` are those of one process, and that transformers
    reads their export."""
    from transformers import AutoModelForCausalLM

    records = [line for line in records_in(output / "metrics.jsonl") if "loss" in line]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert not mismatch((records, end), wanted(case, setting, steps=4))
    net = AutoModelForCausalLM.from_pretrained(output / "hf", dtype=torch.float32)
    exported = dict(net.named_parameters())
    assert exported.keys() == end.keys()
    assert all(torch.equal(exported[name], end[name]) for name in end)
