"""The order in which a shift's transfers are started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from uspft.comm import Group, collectives


@pytest.mark.parametrize(
    ("device", "started"),
    [
        ("cpu", [[("irecv", 12)], [("irecv", 11)], [("isend", 11)], [("isend", 12)]]),
        ("meta", [[("irecv", 12), ("isend", 11)], [("irecv", 11), ("isend", 12)]]),
    ],
)
def test_gloo_hears_of_all_receives_before_anything_leaves(
    device: str, started: list[list[tuple[str, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[list[tuple[str, int]]] = []

    def start(operations: list[tuple[str, int]]) -> list[object]:
        log.append(operations)
        return []

    torch_distributed = SimpleNamespace(
        irecv="irecv",
        isend="isend",
        P2POp=lambda way, tensor, peer, group: (way, peer),
        batch_isend_irecv=start,
    )
    monkeypatch.setattr(collectives, "dist", torch_distributed)
    x = torch.zeros(3, device=device)
    moves = [collectives.Move(x, x, 1), collectives.Move(x[:0], x[:0], 1)]
    collectives.shift([*moves, collectives.Move(x, x, 2)], Group(None, (10, 11, 12), 0), "ring")
    assert log == started
