"""Runs that switch by the command, and lose a rank at a switch: what is said, and that they go on
to what one process gives, through evaluation and export."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.evaluation import alone
from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import living, records, write_recipe
from tests.support.models import Documents, make_documents, make_model, mismatch, reference
from tests.support.stages import ZERO
from uspft.checkpoint.folder import Checkpoint

ROW, STEPS, BATCH, RATE, CLIP = 48, 4, 4, 1e-3, 0.5
LENGTHS = [48, 9, 20, 5, 7, 31, 12, 24, 40, 3, 22, 16, 18, 45, 6, 11]
"""Each step has rows of both layouts."""
KILLED, AT_STEP = 1, 3
ZEROS = {"in_place": "zero3 whole", "move": "zero1"}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents, Documents]:
    folder = tmp_path_factory.mktemp("killed")
    make_model(folder / "model", "qwen3", heads=4, kv_heads=2)
    train = make_documents(folder / "d.jsonl", LENGTHS, masked=[0.0, 0.9, 0.4])
    return folder, train, make_documents(folder / "e.jsonl", [30, 48, 17], masked=[0.2])


def recipe(switching: str, setting: tuple[Path, Documents, Documents]) -> dict[str, Any]:
    folder, train, evaluated = setting
    strategies = [{"max_length": ROW // 2}, {"max_length": ROW, "model_parallel": 2}]
    return {
        "model": {"name_or_path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "train": str(train.path),
            "eval": str(evaluated.path),
            "sequence_length": ROW,
            "shuffle": False,
        },
        "parallel_config": {"strategies": strategies, "switching": switching},
        "deepspeed": {"zero_optimization": ZERO[ZEROS[switching]]},
        "optimizer": {"learning_rate": RATE, "weight_decay": 1.0},
        "lr_schedule": {"type": "constant", "warmup_ratio": 0.0},
        "training": {
            "steps": STEPS,
            "global_batch_size": BATCH,
            "max_grad_norm": CLIP,
            "eval_every_steps": 2,
        },
        "checkpoint": {"every_steps": 1},
        "launch": {"device": "cpu"},
    }


def loses_a_rank(switching: str, mark: Path) -> None:
    """Have one rank of this process's command die in the middle of a step, between two layouts.

    Where weights move it dies among their transfers, when gradients of one layout are already with
    their owners; else after the last row of one layout, and before the first of the other.
    """
    from uspft.engine.zero import ZeroEngine
    from uspft.switching.move import switch
    from uspft.switching.move.moving import MovingEngine

    engine = MovingEngine if switching == "move" else ZeroEngine
    take, forward, shift = engine.step, ZeroEngine.forward, switch.shift
    steps = 0
    seen: list[int] = []
    """Of the step, the tensor degrees of micro-batches, or the transfers so far."""

    def dies() -> None:
        if steps == AT_STEP and os.environ["RANK"] == str(KILLED):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def step(*given: Any, **more: Any) -> Any:
        nonlocal steps
        steps += 1
        seen.clear()
        return take(*given, **more)

    def between_rows(engine: Any, batch: Any, scales: Any) -> Any:
        seen.append(batch.world.layout.tensor)
        if len(set(seen)) == 2:
            dies()
        return forward(engine, batch, scales)

    def among_transfers(*given: Any) -> Any:
        seen.append(0)
        if len(seen) == 3:  # weights were fetched and gradients given, and the next are fetched
            dies()
        return shift(*given)

    engine.step = step  # type: ignore[method-assign, assignment]
    if switching == "move":
        switch.shift = among_transfers
    else:
        ZeroEngine.forward = between_rows  # type: ignore[method-assign]


@pytest.mark.parametrize("switching", ZEROS)
def test_a_run_that_lost_a_rank_at_a_switch_goes_on_to_what_one_process_gives(
    setting: tuple[Path, Documents, Documents], tmp_path: Path, switching: str
) -> None:
    mark, path = tmp_path / "died", write_recipe(recipe(switching, setting), tmp_path)
    process = Forked([str(path)], tmp_path, before=partial(loses_a_rank, switching, mark))
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1 and mark.exists(), err
    assert time.time() - mark.stat().st_mtime < 30 and not living(tmp_path)
    assert f"rank {KILLED} failed: killed (SIGKILL)" in err and err.count(" failed: ") == 1
    before = tmp_path / f"out/checkpoints/step-{AT_STEP - 1:08d}"
    said = f"saved step {AT_STEP - 1} in {before}; the same command goes on"
    assert err.strip().splitlines()[-1] == said
    assert Checkpoint.open(before).step == AT_STEP - 1
    assert "loss" in records(tmp_path)[-2] and "eval_loss" in records(tmp_path)[-1]

    again = Forked([str(path)], tmp_path)
    _, err = again.communicate(timeout=HANG_SECONDS)
    assert (again.returncode, err) == (0, "")
    found = records(tmp_path)
    assert {"resumed_from_step": AT_STEP - 1} in found
    steps = [record for record in found if "loss" in record]
    assert [record["step"] for record in steps] == [*range(1, STEPS + 1)]
    names = [part["name"] for record in steps for part in record["strategies"] if part["rows"]]
    assert names == ["data2", "tensor2"] * STEPS
    assert all(("switch_seconds" in record) == (switching == "move") for record in steps)

    folder, train, evaluated = setting
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/hf", dtype=torch.float32)
    end = dict(model.named_parameters())
    documents = [train.documents[at : at + BATCH] for at in range(0, STEPS * BATCH, BATCH)]
    want = reference(folder / "model", documents, rate=RATE, clip=CLIP)
    assert mismatch((steps, end), want) == []
    (last,) = [one["eval_loss"] for one in found if "eval_loss" in one and one["step"] == STEPS]
    loss_sum, targets = alone(folder / "model", end, evaluated.documents)
    assert last == pytest.approx(loss_sum / targets, rel=1e-6)
