"""Gradients are read where an engine keeps them, before they are clipped, whatever the optimizer.

They are known, and come in two micro-batches on two ranks; clipping would make them 60 times
smaller. One spawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.known import CLIP, TRAINED, alive, gradient, recipe, shards, values
from tests.support.ranks import spawn
from uspft.layout import Layout
from uspft.mesh import Groups

DATA, TENSOR = Layout(data=2), Layout(mesh_columns=2)
AWAY: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
PLAIN = "no moments"
CASES: dict[str, tuple[Layout, str, str, dict[str, Any]]] = {
    **{
        f"{zero} {t}": (DATA, zero, t, {})
        for zero in ("zero0", "zero1", "zero2", "zero3", "zero3 whole")
        for t in ("float32", "bfloat16")
    },
    **{
        f"{zero} {t} away": (DATA, zero, t, AWAY)
        for zero in ("zero1", "zero2", "zero3 whole")
        for t in ("float32", "bfloat16")
    },
    **{
        f"{zero} {PLAIN}": (DATA, zero, "float32", {})
        for zero in ("zero0", "zero1", "zero2", "zero3 whole")
    },
    "zero0 tensor": (TENSOR, "zero0", "float32", {}),
    "zero3 tensor": (TENSOR, "zero3 whole", "bfloat16", {}),
    "moving": (DATA, "zero1", "float32", {}),
}
ROUNDED = {"float32": 1e-6, "bfloat16": 2.0**-7}
"""What a gradient may be off by, of its size."""


@contextmanager
def without_moments(name: str) -> Iterator[None]:
    """Where a case says so, an optimizer that keeps nothing of a gradient."""
    made = lambda decayed, plain, _: torch.optim.SGD([*decayed, *plain], lr=1e-3)  # noqa: E731
    if PLAIN in name:
        with patch("uspft.engine.zero.adamw", made):
            yield
    else:
        yield


def work(rank: int, folder: Path) -> dict[str, tuple[float, dict[str, Tensor], Any]]:
    """By case: the norm, each gradient as it was seen, and Adam's first moments after the step."""
    from uspft.engine.state import on_first_rank
    from uspft.parameters.source import FolderWeights
    from uspft.verify.gradients import show_gradients

    groups, found = Groups(), {}
    for name, (layout, zero, dtype, block) in CASES.items():
        setting, seen = recipe(zero, dtype, **block), dict[str, Tensor]()
        with without_moments(name):
            one = alive(
                setting, shards(layout), groups, FolderWeights(folder), moves=name == "moving"
            )
            see = lambda of, value, seen=seen: seen.update({of: value.clone()})  # noqa: E731
            result = one.step(1, look=lambda one=one, see=see: show_gradients(one.engine, see))
        moments = None
        if PLAIN not in name:
            with on_first_rank(one.engine, TRAINED, "exp_avg") as read:
                moments = {of: read(of).clone() for of in TRAINED} if read else None
        found[name] = result.grad_norm, seen, moments
        one.engine.close()
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gradients")
    save_file(values(), folder / "model.safetensors")
    return spawn(2, work, folder)


def off(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[n] - want[n]).norm() / want[n].norm()) for n in want)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name: str, answers: list[dict[str, Any]]) -> None:
    dtype = CASES[name][2]
    (norm, seen, moments), other = answers[0][name], answers[1][name]
    assert off(seen, {name: gradient(name, 1) for name in TRAINED}) < ROUNDED[dtype]
    assert other[1] == {}, "one rank sees them"
    assert norm > 50 * CLIP, "clipping must be active"
    if moments is not None:
        clipped = 0.1 * CLIP / norm
        assert off({n: value / clipped for n, value in moments.items()}, seen) < 1e-5


def test_a_wrong_gradient_would_be_seen(answers: list[dict[str, Any]]) -> None:
    seen = answers[0]["zero1 float32"][1]
    assert off(seen, {name: gradient(name, 2) for name in TRAINED}) > 1
    name = "layers.2.up.weight"
    assert off(seen, {**seen, name: 1.01 * seen[name]}) > 5e-3 > ROUNDED["bfloat16"] / 2
