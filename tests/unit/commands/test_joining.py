"""How a rank joins the others: what only a GPU run asks torch.distributed for."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.faults.launched import two_free_ports
from tests.support.ranks import spawn
from uspft.commands import joining
from uspft.commands.joining import require_shared
from uspft.config import Fault
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


def look(rank: int, folders: list[list[Path]]) -> list[str]:
    """Four ranks as two hosts of two; what each case said."""
    joining.SEEN_SECONDS = 0.5
    host, local = divmod(rank, 2)
    own: dict[str, str] = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": str(host),
        "LOCAL_RANK": str(local),
    }
    told = []
    for case in folders:
        try:
            require_shared(case[host], own)
            told.append("")
        except Fault as fault:
            ((key, what, remedy),) = fault.findings
            assert key == "output_dir" and "share" in remedy
            told.append(what)
    return told


def test_what_each_host_sees(tmp_path: Path) -> None:
    for name in ("one", "a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one, link, a, b = (tmp_path / name for name in ("one", "link", "a", "b"))
    answers: Any = spawn(4, look, [[one, one], [one, link], [a, b], [one, tmp_path / "gone"]])
    for same, linked, apart, gone in answers:
        assert same == linked == ""
        assert "is not one folder for all hosts: host 0 sees nothing there of what host 1" in apart
        assert "gone/.host-1-" in gone and "cannot be written: No such file" in gone
    assert not [path for path in tmp_path.rglob(".host-*")]


def test_one_host_looks_at_nothing() -> None:
    require_shared(Path("/nowhere"), {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize("name", ["SEEN_SECONDS", "LOOK_SECONDS"])
def test_the_file_system_is_given_time(name: str) -> None:
    assert (joining.SEEN_SECONDS, joining.LOOK_SECONDS) == (60.0, 0.2), name
