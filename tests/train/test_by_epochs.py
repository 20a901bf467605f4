"""A run that saves and evaluates by epochs: killed and gone on in another layout, it does so in the
same steps and with the same losses."""

from __future__ import annotations

import shutil
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.launch import records_in
from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe

RANKS, ROW, BATCH, EPOCHS, DIED_AFTER = 2, 32, 3, 2.5, 3
RING = {"context_parallel": RANKS, "context_parallel_algo": "ring_cp"}
LENGTHS = [20, 5, 16, 17, 4, 17, 27, 14, 18, 10, 15, 13]


def recipe(folder: Path, data: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    return small_recipe(
        folder / "model",
        data,
        ROW,
        data={"eval": str(data), "packing": "best_fit", "shuffle": True},
        parallel_config=parallel,
        deepspeed={"zero_optimization": {"stage": 1 if parallel else 3}},
        training={"epochs": EPOCHS, "global_batch_size": BATCH, "eval_every_epochs": 1},
        checkpoint={"every_steps": None, "every_epochs": 0.5, "keep_last": None},
    )


def work(rank: int, folder: Path, data: Path) -> list[int]:
    """Return the rows of each epoch. The run "wrong" goes on as if all had those of the first."""
    from uspft.data.rows import stream

    stream.WINDOW_SAMPLES = 4  # few samples are packed together, so that epochs differ in rows
    found: list[int] = []

    def rows(run: Any) -> None:
        found[:] = [run.loader.stream.rows_in_epoch(epoch) for epoch in range(3)]

    run_recipe(recipe(folder, data, RING), folder / "straight", before=rows)
    counted = stream.RowStream.steps_of_ends
    for name in ("resumed", "wrong"):
        dist.barrier()
        if dist.get_rank() == 0:
            gone = [f"step-{step:08d}" for step in range(DIED_AFTER + 1, 99)]
            shutil.copytree(
                folder / "straight", folder / name, ignore=shutil.ignore_patterns("hf", *gone)
            )
        dist.barrier()
        if name == "wrong":

            def alike(_: Any, epochs: float, batch: int, steps: int) -> tuple[int, ...]:
                rows = (ceil(number * epochs * found[0]) for number in range(1, 9))
                return tuple(step for row in rows if (step := ceil(row / batch)) <= steps)

            stream.RowStream.steps_of_ends = alike  # type: ignore[method-assign,assignment]
        try:
            run_recipe(recipe(folder, data, {}), folder / name, resume=True)
        finally:
            stream.RowStream.steps_of_ends = counted  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("epochs")
    make_model(folder / "model", "llama", heads=4, kv_heads=2)
    data = make_documents(folder / "d.jsonl", LENGTHS, masked=[0.0, 0.5]).path
    return folder, spawn(RANKS, work, folder, data)[0]


def ends(rows: list[int], each: Fraction) -> list[int]:
    """The steps in which intervals of `each` epochs end, counted row by row."""
    found: dict[int, None] = {}
    done, row = Fraction(0), 0
    for in_epoch in rows:
        for _ in range(in_epoch):
            row, before = row + 1, done
            done += Fraction(1, in_epoch)
            if done // each > before // each and before < EPOCHS:
                found[ceil(Fraction(row, BATCH))] = None
    return [*found]


def saved(folder: Path) -> list[int]:
    return sorted(int(one.name[5:]) for one in (folder / "checkpoints").glob("step-*"))


def of(folder: Path, key: str) -> dict[int, float]:
    return {one["step"]: one[key] for one in records_in(folder / "metrics.jsonl") if key in one}


def test_it_saves_and_evaluates_where_epochs_and_their_halves_end(
    ran: tuple[Path, list[int]],
) -> None:
    folder, rows = ran
    assert len(set(rows)) > 1, "the data does not tell epochs from one another"
    last = ceil(Fraction(rows[0] + rows[1] + ceil(rows[2] / 2), BATCH))
    losses = of(folder / "straight", "loss")
    assert list(losses) == list(range(1, last + 1))
    saves = ends(rows, Fraction(1, 2))
    assert saved(folder / "straight") == saves and len(saves) == 5 and saves[-1] == last
    assert DIED_AFTER in saves[:-2]
    assert list(of(folder / "straight", "eval_loss")) == sorted({*ends(rows, Fraction(1)), last})


def test_killed_and_in_another_layout_it_is_the_same(ran: tuple[Path, list[int]]) -> None:
    folder, _ = ran
    straight, resumed, wrong = (folder / name for name in ("straight", "resumed", "wrong"))
    assert saved(resumed) == saved(straight)
    for key in ("loss", "grad_norm", "eval_loss", "target_tokens"):
        assert of(resumed, key) == pytest.approx(of(straight, key), rel=2e-5), key
    assert saved(wrong) != saved(straight), "seen to fail: ends by the rows of the first epoch"
