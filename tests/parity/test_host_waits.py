"""No layer makes the host wait for the device: steps of deeper models ask it no more often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import Documents, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, small_recipe

aten = torch.ops.aten
ASKS = {
    "aten._local_scalar_dense",  # item, bool, int, float of a tensor
    "aten.nonzero",
    "aten.masked_select",
    "aten.equal",
    "aten.is_nonzero",
    "aten._unique2",
    "aten.repeat_interleave",
}
"""Operations whose result, or its shape, the host reads."""
TAKES = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.cpu: "cpu"}
"""Methods that copy to the host, and on CPU run no operation."""


class _Asked(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is aten.index.Tensor and any(
            x is not None and x.dtype is torch.bool for x in args[1]
        )
        if str(func.overloadpacket) in ASKS or by_mask:
            self._found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class _Taken(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TAKES:
            self._found[TAKES[func]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count inside the `with` block, by operation, how often the host would wait for a GPU."""
    found: Counter[str] = Counter()
    with _Asked(found), _Taken(found):
        yield found


ROW = 64
LAYOUTS: dict[str, dict[str, Any]] = {
    "ulysses": {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"},
    "ring": {"context_parallel": 2, "context_parallel_algo": "ring_cp"},
    "allgather": {"context_parallel": 2, "context_parallel_algo": "allgather_cp"},
    "planned": {
        "context_parallel": 2,
        "context_parallel_algo": "planned_cp",
        "ulysses_degree_in_cp": 1,
    },
    "whole": {},
    "megatron": {"model_parallel": 2, "use_seq_parallel": True},
    "meshslice": {"model_parallel": 2, "tensor_parallel_algo": "meshslice"},
}
DEPTHS = (1, 3)


SOME = ("ring", "planned", "megatron", "meshslice")
CARELESS = "careless"
"""A ring whose attention looks at a value in each layer."""


def waits(
    rank: int, folder: Path, data: Documents, names: tuple[str, ...]
) -> dict[str, list[Counter[str]]]:
    """For each layout, what the second step asks of the device at each depth."""
    found = {name: [_waits_of(folder, data, name, depth) for depth in DEPTHS] for name in names}
    if "ring" in names:
        with pytest.MonkeyPatch.context() as patch:
            hook = import_module("uspft.model.attention")
            attend = hook.attend_once

            def looking(
                memory: Any, layer: int, run: Any, inputs: tuple[torch.Tensor, ...], **options: Any
            ) -> Any:
                assert inputs[0].flatten()[0].item() == inputs[0].flatten()[0].item()
                return attend(memory, layer, run, inputs, **options)

            patch.setattr(hook, "attend_once", looking)
            found[CARELESS] = [_waits_of(folder, data, "ring", depth) for depth in DEPTHS]
    return found


def _waits_of(folder: Path, data: Documents, name: str, depth: int) -> Counter[str]:
    random = {"name_or_path": None, "config": str(folder / "model")}
    recipe = small_recipe(
        folder,
        data.path,
        ROW,
        model=random | {"overrides": {"num_hidden_layers": depth}},
        parallel_config=LAYOUTS[name],
        deepspeed={"zero_optimization": {"stage": 1}},
        training={"steps": 2, "global_batch_size": 2},
    )
    run = prepared(recipe, folder / f"{name}-{depth}")
    run.engine.step(run.loader.batches(1), 1e-3, False)
    with counted_waits() as found:
        run.engine.step(run.loader.batches(2), 1e-3, False)
    close(run)
    return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("waits")
    make_model(folder / "model", "llama", heads=4, kv_heads=2)
    return folder, make_documents(folder / "d.jsonl", [ROW, 40, 50, 20], masked=[0.0])


@pytest.mark.parametrize(
    "names",
    [SOME, pytest.param(tuple(LAYOUTS.keys() - set(SOME)), marks=pytest.mark.full)],
    ids=["some", "others"],
)
def test_a_layer_asks_the_device_nothing(
    inputs: tuple[Path, Documents], names: tuple[str, ...]
) -> None:
    for found in spawn(2, waits, *inputs, names):
        looks = found.pop(CARELESS, None)
        assert found.keys() == set(names)
        for name, (shallow, deep) in found.items():
            assert shallow == deep, name
            assert sum(deep.values()) > 0, "a step's loss is read, at least"
        if looks:
            shallow_looks, deep_looks = (sum(one.values()) for one in looks)
            assert deep_looks - shallow_looks >= 2 * (DEPTHS[1] - DEPTHS[0])
        assert bool(looks) == ("ring" in names)
