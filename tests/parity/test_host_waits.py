"""No layer makes the host wait for the device: steps of deeper models ask it no more often."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import Documents, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, small_recipe
from tests.support.waits import counted_waits

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


def waits(
    rank: int, folder: Path, data: Documents, names: tuple[str, ...], careless: bool
) -> dict[str, list[Counter[str]]]:
    """For each layout, what the first step and the next ask of the device, at each depth.

    careless: as if attention looked at a value in each layer.
    """
    hook = import_module("uspft.model.attention")
    if careless:
        attend = hook.attend_once

        def looking(
            memory: Any, layer: int, run: Any, inputs: tuple[torch.Tensor, ...], **options: Any
        ) -> Any:
            assert inputs[0].flatten()[0].item() == inputs[0].flatten()[0].item()
            return attend(memory, layer, run, inputs, **options)

        hook.attend_once = looking  # type: ignore[attr-defined]
    found = {}
    for name in names:
        found[name] = [_waits_of(folder, data, name, depth) for depth in DEPTHS]
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


@pytest.mark.timeout(600)
def test_a_layer_asks_the_device_nothing(inputs: tuple[Path, Documents]) -> None:
    for found in spawn(2, waits, *inputs, tuple(LAYOUTS), False):
        assert found.keys() == LAYOUTS.keys()
        for name, (shallow, deep) in found.items():
            assert shallow == deep, name
            assert sum(deep.values()) > 0, "a step's loss is read, at least"


def test_a_layer_that_looks_is_seen(inputs: tuple[Path, Documents]) -> None:
    for found in spawn(2, waits, *inputs, ("ring",), True):
        shallow, deep = (sum(one.values()) for one in found["ring"])
        assert deep - shallow >= 2 * (DEPTHS[1] - DEPTHS[0])
