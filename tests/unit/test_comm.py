"""The order in which a shift's transfers start; what is started and never waited for; and how long
collectives wait, with a real wait in the tests of the launcher."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from uspft import comm
from uspft.comm import (
    Group,
    Move,
    deadline,
    expect_gather,
    expect_parts,
    shift,
    start_gather,
    start_sum_parts,
    sum_over,
)


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
    monkeypatch.setattr(comm, "dist", torch_distributed)
    x = torch.zeros(3, device=device)
    moves = [Move(x, x, 1), Move(x[:0], x[:0], 1)]
    shift([*moves, Move(x, x, 2)], Group(None, (10, 11, 12), 0), "ring")
    assert log == started


def test_what_is_expected_is_received_before_any_of_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    torch_distributed = SimpleNamespace(
        irecv="irecv",
        isend="isend",
        P2POp=lambda way, tensor, peer, group: f"{way} {tensor.shape[0]}",
        batch_isend_irecv=lambda operations: log.extend(operations) or [],
    )
    monkeypatch.setattr(comm, "dist", torch_distributed)
    group, x = Group(None, (10, 11), 0), torch.zeros(4, 3)
    of_gather, of_parts = expect_gather(x, 4, group), expect_parts(x, 2, group)
    start_gather(x, group, "tensor", of_gather)
    start_sum_parts(x, group, "tensor", of_parts)
    assert log == ["irecv 4", "irecv 2", "isend 4", "isend 2"]
    several, elsewhere = Group(None, (10, 11, 12), 0), x.to("meta")
    assert expect_gather(x, 4, several) is expect_gather(elsewhere, 4, group) is None
    assert expect_parts(elsewhere, 2, group) is None


def shifted(x: torch.Tensor, group: Group, kind: str) -> Callable[[], object]:
    """Both ways round the ring, as one function that waits."""
    moves = [Move(x, torch.zeros_like(x), offset) for offset in (1, -1)]
    waits = shift(moves, group, kind)
    return lambda: [wait() for wait in waits]


STARTS = {"shift": shifted, "gather": start_gather, "sum of parts": start_sum_parts}
"""All that `uspft.comm` starts and does not wait for itself."""


class Works:
    """What stands for torch.distributed: operations that note how often each was waited for."""

    isend, irecv = "isend", "irecv"

    def __init__(self) -> None:
        self.waited: list[int] = []

    def P2POp(self, *operation: Any, **more: Any) -> object:
        return operation

    def started(self, *given: Any, **more: Any) -> Any:
        number = len(self.waited)
        self.waited.append(0)

        def wait() -> None:
            self.waited[number] += 1

        return SimpleNamespace(wait=wait)

    def batch_isend_irecv(self, operations: list[object]) -> list[Any]:
        return [self.started() for _ in operations]

    all_gather_into_tensor = reduce_scatter_tensor = started


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", STARTS)
def test_the_books_are_open_until_all_that_was_started_was_waited_for(
    name: str, ranks: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = Works()
    monkeypatch.setattr(comm, "dist", works)
    group, x = Group(None, tuple(range(ranks)), 1), torch.zeros(6, device=device)

    for waits in (True, False):
        works.waited.clear()
        wait = STARTS[name](x, group, "tensor")
        assert works.waited and not any(works.waited), f"{name} waits before it is asked to"
        if waits:
            wait()
            left = [n for n, count in enumerate(works.waited) if count != 1]
            assert not left, f"of {name}, operations {left} of {len(works.waited)} not waited for"
            assert group.books.close()
        else:
            del wait
            with pytest.raises(RuntimeError, match=r"not waited for: .*tensor.*, on rank 1"):
                group.books.close()
            group.books.close()  # it was told


def hasty(rank: int, name: str) -> tuple[str, float]:
    """What the books of a rank say where the first of two uses what comes before it is there."""
    group = Group(dist.group.WORLD, (0, 1), rank)
    for _ in range(2):
        wait = STARTS[name](torch.full((1 << 16,), float(rank)), group, "ring")
        if rank:
            wait()
        del wait
        summed = sum_over(torch.ones(3), group, "tensor")
    try:
        group.books.close()
        return "", float(summed.sum())
    except RuntimeError as error:
        return str(error), float(summed.sum())


@pytest.mark.parametrize("name", STARTS)
def test_a_skipped_wait_is_an_error_that_names_it_and_no_hang(name: str) -> None:
    (told, summed), other = spawn(2, hasty, name)
    assert summed == 6.0 and other == ("", 6.0)
    assert "not waited for: " in told and "ring from rank 1 and to rank 1, on rank 0" in told


MINUTES = 0.7


def test_the_first_step_has_three_times_as_long() -> None:
    assert deadline(10) == timedelta(minutes=10)
    assert deadline(10, first_step=True) == timedelta(minutes=30)


def trained(rank: int, folder: Path, data: Path) -> list[Any]:
    """When the loop sets a limit: the steps on record by then, and which."""
    recipe = small_recipe(folder / "model", data, 32, launch={"timeout_minutes": MINUTES})
    loop: Any = import_module("uspft.training.loop")
    seen: list[Any] = []
    steps: list[int] = []

    def before(run: Any) -> None:
        step = run.engine.step
        run.engine.step = lambda *given, **more: (step(*given, **more), steps.append(1))[0]

    loop.set_deadline = lambda limit: seen.append((len(steps), limit))
    run_recipe(recipe, folder / "out", before=before)
    return [seen, len(steps)]


def test_the_limit_is_shorter_from_the_second_step_on(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    data = make_documents(tmp_path / "d.jsonl", [32, 20], masked=[0.0]).path
    ((seen, steps),) = spawn(1, trained, tmp_path, data)
    assert seen == [(1, timedelta(minutes=MINUTES))] and steps == 3
