"""Gradients that cross ranks in bfloat16 take half the bytes, and are rounded once on the way.

The truth is the same run with float32, which other tests hold to one process. Each stage on two
ranks, two passes where the stage can sum them; one spawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.models import Documents, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, held, prepared, small_recipe

ROW = 32
STAGES = (0, 1, 2, 3)
TYPES = ("float32", "bfloat16")
LEAST = 64
"""Elements of a transfer that is no count."""
ROUNDED = 2.0**-8
"""The largest relative error of a number in bfloat16, and so of one that was rounded once."""


class Crossing(TorchDispatchMode):
    """The bytes of what is reduced over ranks, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::") and "reduce" in name:
            taken = args[1] if "scatter" in name else args[0]
            for x in tree_leaves(taken):
                if isinstance(x, torch.Tensor) and x.numel() >= LEAST:
                    kind = str(x.dtype).removeprefix("torch.")
                    self.bytes[kind] = self.bytes.get(kind, 0) + x.numel() * x.element_size()
        return func(*args, **(kwargs or {}))


def work(rank: int, folder: Path, data: Documents) -> dict[tuple[int, str], Any]:
    """By stage and type: bytes reduced, the step's result, and Adam's first moments after it."""
    found = {}
    for stage in STAGES:
        for kind in TYPES:
            recipe = small_recipe(
                folder / "model",
                data.path,
                ROW,
                model={"dtype": "bfloat16"},
                deepspeed={"zero_optimization": {"stage": stage}},
                training={"global_batch_size": 4 if stage else 2, "max_grad_norm": 1e6},
                memory={"gradient_reduction": kind},
            )
            run = prepared(recipe, folder / f"{stage}-{kind}")
            with Crossing() as crossing:
                result = run.engine.step(run.loader.batches(1), 1e-3, False)
            if stage:
                assert accumulated_in(run.engine.deepspeed.optimizer) == torch.float32
            found[stage, kind] = crossing.bytes, result, held(run.engine, "exp_avg")
            close(run)
    return found


def accumulated_in(optimizer: Any) -> torch.dtype:
    """The type that a DeepSpeed optimizer sums the gradients of passes in."""
    names = ("gradient_accumulation_dtype", "grad_acc_dtype")
    (found,) = {getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    assert isinstance(found, torch.dtype)
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("reduction")
    make_model(folder / "model", "llama", heads=4, kv_heads=2)
    data = make_documents(folder / "d.jsonl", [32, 20, 31, 32], masked=[0.0, 0.9, 0.4])
    return spawn(2, work, folder, data)[0]


@pytest.mark.parametrize("stage", STAGES)
def test_half_the_bytes_and_one_rounding(answers: Any, stage: int) -> None:
    (sent, whole, moments), (less, rounded, others) = (answers[stage, kind] for kind in TYPES)
    assert sent.keys() == {"float32"} and less.get("bfloat16") == sent["float32"] // 2
    assert less.get("float32", 0) == 0
    assert rounded.loss == whole.loss
    assert rounded.grad_norm == pytest.approx(whole.grad_norm, rel=ROUNDED)
    off = torch.cat([(others[name] - value).flatten() for name, value in moments.items()])
    every = torch.cat([value.flatten() for value in moments.values()])
    error = float(off.norm() / every.norm())
    assert error < ROUNDED, error
    assert error > 0 or stage == 0, "nothing was rounded"
