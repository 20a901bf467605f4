"""What a rank holds of weights, gradients and optimizer at its most, counted in a run's own engine,
beside what is predicted: every stage, all but 0 with the optimizer's state on the host too, in both
types, with an adapter and with frozen parameters. Stage 3 on the device: test_zero3_state.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.ranks import spawn
from tests.support.runs import run_recipe
from tests.support.zero_state import BUCKET, LORA, Case, apart, make_inputs

CPU = {"device": "cpu"}
WHOLE = {**BUCKET, "stage3_param_persistence_threshold": 0}
FEW = {
    "0, wide, frozen": Case({"stage": 0}, "float32", "float32", {"freeze": ["mlp", "embed"]}),
    "1, lora": Case({"stage": 1, **BUCKET}, trained=LORA),
    "1, away, halves": Case({"stage": 1, **BUCKET, "offload_optimizer": CPU}, "bfloat16"),
    "2, wide": Case({"stage": 2, **BUCKET}, dtype="float32"),
    "2, away": Case({"stage": 2, **BUCKET, "offload_optimizer": CPU}),
    "3, away": Case({"stage": 3, **WHOLE, "offload_optimizer": CPU}, gathers=False),
}
MORE = {
    "0": Case({"stage": 0}),
    "1": Case({"stage": 1, **BUCKET}),
    "1, wide": Case({"stage": 1, **BUCKET}, dtype="float32"),
    "1, away": Case({"stage": 1, **BUCKET, "offload_optimizer": CPU}),
    "2": Case({"stage": 2, **BUCKET}),
    "2, halves": Case({"stage": 2, **BUCKET}, "bfloat16"),
    "2, frozen": Case({"stage": 2, **BUCKET}, trained={"freeze": ["mlp"]}),
}


def storages() -> dict[int, Any]:
    """All storages that tensors of this process lie in, by address; not those that only a graph
    keeps, which are activations, nor those of shapes alone."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    every = [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]
    return {storage.data_ptr(): storage for storage in every}


@contextmanager
def looked_at(
    look: Callable[[], None], *, in_backward: bool, gathers: bool = True
) -> Iterator[None]:
    """Look where a backward has ended: before gradients are reduced, or during that, where they are
    reduced in the backward; and in the update, or there alone."""
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import dist

    def looking(plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            look()
            return plain(*args, **kwargs)

        return call

    where = [(Optimizer, "reduce_gradients"), (DeepSpeedEngine, "allreduce_gradients")]
    where += [(BF16_Optimizer, "update_hp_grads")]
    where += [(dist, "all_reduce"), (dist, "reduce")] if in_backward else []
    where += [(torch.optim.AdamW, "step")]
    where = where if gathers else where[-1:]
    with ExitStack() as stack:
        for owner, method in where:
            stack.enter_context(patch.object(owner, method, looking(getattr(owner, method))))
        yield


def work(rank: int, cases: dict[str, Case], folder: Path) -> dict[str, int]:
    found = {}
    for name, case in cases.items():
        before, most = storages(), 0  # held: an address is not given to another meanwhile

        def look(before: dict[int, Any] = before) -> None:
            nonlocal most
            now = [one.nbytes() for key, one in storages().items() if key not in before]
            most = max(most, sum(now))

        with looked_at(look, in_backward=case.zero["stage"] == 2, gathers=case.gathers):
            run_recipe(case.recipe(folder), folder / name)
        found[name] = most
    return found


@pytest.mark.parametrize("cases", [FEW, pytest.param(MORE, marks=pytest.mark.full)])
def test_state_is_predicted_within_two_percent(cases: dict[str, Case], tmp_path: Path) -> None:
    make_inputs(tmp_path, layers=2)
    predicted = {}
    for name, case in cases.items():
        need = case.predicted(tmp_path)
        gathered = 0 if case.gathers else need.parts["gathered"]
        predicted[name] = need.state_bytes + need.host_bytes - gathered
    assert apart(spawn(2, work, cases, tmp_path)[0], predicted) == {}
