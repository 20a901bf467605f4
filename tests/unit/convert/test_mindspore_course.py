"""How long a run of MindSpore Transformers is: by its schedule, its epochs, or the command line."""

from __future__ import annotations

from pathlib import Path

from tests.support.mindspore import converted, line_of, with_blocks

WARM = {"warmup_ratio": 0.079, "learning_rate": 1e-5}


def test_the_command_line_says_the_length(tmp_path: Path) -> None:
    """Epochs go where it names steps; a warm-up's share is rounded down, as there."""
    tree = with_blocks(lr_schedule=WARM)
    values = converted(tmp_path, tree).values
    assert values["training.epochs"] == 2 and values["lr_schedule.warmup_ratio"] == 0.079
    outcome = converted(tmp_path, tree, training__steps=50)
    assert "training.epochs" not in outcome.values
    assert outcome.values["lr_schedule.warmup_steps"] == 3
    assert "`training.steps` of the command line" in line_of(outcome, "runner_config.epochs")
    longer = with_blocks(lr_schedule={**WARM, "total_steps": 100})
    values = converted(tmp_path, longer, training__epochs=1).values
    assert values["training.epochs"] == 1 and "training.steps" not in values


def test_a_run_that_stops_before_its_schedule(tmp_path: Path) -> None:
    tree = with_blocks(lr_schedule={**WARM, "total_steps": 100}, runner_config={"stop_step": 7})
    values = converted(tmp_path, tree).values
    assert (values["training.steps"], values["training.stop_step"]) == (100, 7)
    tree["runner_config"]["stop_step"] = 0
    assert "training.stop_step" not in converted(tmp_path, tree).values
