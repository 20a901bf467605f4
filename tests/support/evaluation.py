"""Runs that evaluate, by layout, stage and sets; and the evaluation of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers

from tests.support.mesh import on_mesh
from tests.support.models import KINDS, Documents, make_documents, make_model
from tests.support.runs import small_recipe
from tests.support.stages import ZERO

RANKS, ROW, STEPS = 4, 48, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "ulysses 4": {"context_parallel": 4, "context_parallel_algo": "ulysses_cp"},
    "ulysses 2": {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"},
    "ring 4": {"context_parallel": 4, "context_parallel_algo": "ring_cp"},
    "ring 2": {"context_parallel": 2, "context_parallel_algo": "ring_cp"},
    "hybrid 2 × 2": {
        "context_parallel": 4,
        "context_parallel_algo": "hybrid_cp",
        "ulysses_degree_in_cp": 2,
    },
    "allgather 4": {"context_parallel": 4, "context_parallel_algo": "allgather_cp"},
    "planned 2 × 2": {
        "context_parallel": 4,
        "context_parallel_algo": "planned_cp",
        "ulysses_degree_in_cp": 2,
    },
    "planned 2": {
        "context_parallel": 2,
        "context_parallel_algo": "planned_cp",
        "ulysses_degree_in_cp": 1,
    },
    "tensor 2": {"model_parallel": 2, "use_seq_parallel": True},
    "mesh 2 × 1": on_mesh(2, 1),
}
"""By name the `parallel_config`; what it leaves of four processes are replicas."""
SETS: dict[str, tuple[list[int], list[float]]] = {
    "few": ([48, 20, 33], [0.0, 0.9, 0.4]),
    "many": ([31, 17, 48, 20, 28, 40, 8], [0.0, 0.95, 1.0, 0.3]),
    "sparse": ([40], [0.93]),
}
"""Lengths and masks: fewer rows than replicas, rows that they do not divide, ranks without targets;
a document without any."""
MODELS: dict[str, dict[str, Any]] = {
    **{name: KINDS[name] for name in ("llama-8-2", "qwen2-6-2-mixed")},
    "states": {"kind": "qwen3_5_text", "kv_heads": 2},
}
TOLERANCE = 1e-6
Weights = dict[str, torch.Tensor]


class Case(NamedTuple):
    """One run; rows: eval_micro_batch_size."""

    layout: str
    zero: str
    sets: tuple[str, ...]
    packed: bool
    rows: int | None
    checkpointing: bool
    model: str

    @property
    def is_legal(self) -> bool:
        return self.model != "states" or "mesh" not in self.layout


def memory_of(case: Case) -> dict[str, Any]:
    """What saves memory in a run: layers run again, those that can with groups of heads."""
    groups = case.checkpointing and "mesh" not in case.layout and case.model in KINDS
    return {"gradient_checkpointing": case.checkpointing} | (
        {"attention_heads": 1} if groups else {}
    )


def recipe(case: Case, folder: Path, **blocks: Any) -> dict[str, Any]:
    paths = [str(folder / f"{name}.jsonl") for name in case.sets]
    base: dict[str, Any] = {
        "data": {"packing": "best_fit" if case.packed else "none", "eval": paths},
        "parallel_config": LAYOUTS[case.layout],
        "deepspeed": {"zero_optimization": ZERO[case.zero]},
        "training": {
            "steps": STEPS,
            "global_batch_size": 3,
            "eval_every_steps": 1,
            "eval_micro_batch_size": case.rows,
        },
        "memory": memory_of(case),
    }
    merged = {key: {**base.get(key, {}), **blocks.get(key, {})} for key in {**base, **blocks}}
    return small_recipe(folder / case.model, folder / "train.jsonl", ROW, **merged)


def make_setting(folder: Path) -> tuple[Path, dict[str, Documents]]:
    """A folder with models, training data and evaluation sets; each set's documents."""
    for name, kind in MODELS.items():
        make_model(folder / name, **kind)
    make_documents(folder / "train.jsonl", [48, 31, 17, 20, 28, 45], masked=[0.0, 0.3])
    sets = {
        name: make_documents(folder / f"{name}.jsonl", lengths, masked=masked)
        for name, (lengths, masked) in SETS.items()
    }
    return folder, sets


def alone(model: Path, weights: Weights, documents: list[Any]) -> tuple[float, int]:
    """Cross-entropy summed over the documents' targets, each alone in one process; their number."""
    net = transformers.AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager", dtype=torch.float32
    ).eval()
    missing, unexpected = net.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    found, count = 0.0, 0
    for ids, labels in documents:
        with torch.no_grad():
            logits = net(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        found += F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
        count += sum(label != -100 for label in labels[1:])
    return found, count


def wanted(case: Case, weights: Weights, setting: tuple[Path, dict[str, Documents]]) -> Any:
    folder, sets = setting
    return {name: alone(folder / case.model, weights, sets[name].documents) for name in case.sets}


def mismatch(record: dict[str, Any], want: dict[str, tuple[float, int]]) -> list[str]:
    """What differs by more than 1e-6, over all sets and in each."""
    sums, counts = zip(*want.values(), strict=True)
    pairs = {"all": (record["eval_loss"], record["eval_target_tokens"], sum(sums), sum(counts))}
    perplexities = {"all": record["eval_perplexity"]}
    for title, one in record.get("eval_sets", {}).items():
        name = Path(title).stem
        pairs[name] = (one["loss"], one["target_tokens"], *want[name])
        perplexities[name] = one["perplexity"]
    found = []
    for name, (loss, targets, loss_sum, count) in pairs.items():
        if targets != count:
            found.append(f"{name}: {targets} targets, not {count}")
        expected = torch.tensor(loss_sum / count, dtype=torch.float64)
        if not abs(loss - expected) <= TOLERANCE * expected:
            found.append(f"{name}: loss {loss}, not {expected}")
        if not abs(perplexities[name] - expected.exp()) <= 10 * TOLERANCE * expected.exp():
            found.append(f"{name}: perplexity {perplexities[name]}")
    if set(pairs) != {"all", *(want if len(want) > 1 else ())}:
        found.append(f"sets {sorted(pairs)}")
    return found
