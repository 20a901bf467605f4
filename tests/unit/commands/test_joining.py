"""How a rank joins the others: what only a GPU run asks torch.distributed for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.faults.launched import two_free_ports
from uspft.commands import joining
from uspft.config.problems import RunFailed

LIMIT = timedelta(minutes=30)


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

    class Store:
        def __init__(self, *place: Any, timeout: timedelta) -> None:
            asked.update(place=place, meet=timeout)

        def set_timeout(self, limit: timedelta) -> None:
            asked.update(later=limit)

    def init(backend: str, **options: Any) -> None:
        asked.update(backend=backend, **options)

    monkeypatch.setattr("torch.distributed.TCPStore", Store)
    monkeypatch.setattr("torch.distributed.init_process_group", init)
    place = {"MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    at = torch.device(device)
    rank = at.index or 0
    joining.join({**place, "RANK": str(rank), "WORLD_SIZE": str(world)}, at, LIMIT)
    assert asked["backend"] == backend and asked["place"] == ("::1", 29500, world, rank == 0)
    assert (asked["rank"], asked["world_size"]) == (rank, world)
    assert asked["device_id"] == (at if bound else None)
    assert asked["meet"] < asked["later"] == asked["timeout"] == LIMIT


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_say_where(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MEET_SECONDS", 1.5)
    port = two_free_ports()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = {**place, "RANK": str(rank), "WORLD_SIZE": "2"}
    with pytest.raises(RunFailed, match=f"the 2 ranks did not meet at 127.0.0.1, port {port}"):
        joining.join(own, torch.device("cpu"), LIMIT)
    assert not dist.is_initialized()
