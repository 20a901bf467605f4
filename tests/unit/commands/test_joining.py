"""How a rank joins the others: what only a GPU run asks torch.distributed for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from uspft.commands import joining


@pytest.mark.parametrize(
    ("device", "world", "backend", "bound"),
    [
        ("cpu", 2, "gloo", False),
        ("cuda:1", 2, "cpu:gloo,cuda:nccl", True),
        ("cuda:0", 1, "cpu:gloo,cuda:nccl", False),
    ],
)
def test_a_device_is_bound_where_there_are_others(
    device: str, world: int, backend: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def init(backend: str, **options: Any) -> None:
        asked.update(backend=backend, **options)

    monkeypatch.setattr("torch.distributed.init_process_group", init)
    place = {"MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    at = torch.device(device)
    joining.join({**place, "RANK": str(at.index or 0), "WORLD_SIZE": str(world)}, at)
    assert asked["backend"] == backend and asked["init_method"] == "tcp://[::1]:29500"
    assert (asked["rank"], asked["world_size"]) == (at.index or 0, world)
    assert asked["device_id"] == (at if bound else None)
