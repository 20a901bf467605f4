"""`strategies: auto` by the command: chosen from the data, written out, and gone on from."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import records
from tests.support.models import make_documents, make_model

ROW = 256


def recipe(folder: Path, lengths: list[int], **training: Any) -> dict[str, Any]:
    """A recipe on two processes whose layouts are left to the lengths."""
    make_model(folder / "model", "llama", heads=4, kv_heads=2)
    return {
        "model": {"name_or_path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "train": str(make_documents(folder / "d.jsonl", lengths, masked=[0.0]).path),
            "sequence_length": ROW,
            "packing": "none",
        },
        "parallel_config": {"strategies": "auto"},
        "training": {"global_batch_size": 8, **training},
        "checkpoint": {"every_steps": 1},
        "export": {"huggingface": False},
        "launch": {"device": "cpu", "processes": 2},
    }


def test_a_tail_is_switched_and_gone_on_from_both_recipes(tmp_path: Path) -> None:
    random = Random(3)
    short = [max(2, min(60, int(random.lognormvariate(2.5, 0.8)))) for _ in range(60)]
    given = recipe(tmp_path, [*short, ROW, ROW - 9], steps=1)
    out, err = (process := Forked.start(given, tmp_path)).communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, err
    said = next(line for line in out.splitlines() if line.startswith("strategies: "))
    assert said.startswith(
        "strategies: several layouts, since by the lengths of the data switching"
    )
    written = yaml.safe_load((tmp_path / "out/recipe.yaml").read_text())
    listed = written["parallel_config"]["strategies"]
    assert len(listed) > 1 and listed[-1]["max_length"] == ROW
    assert written["parallel_config"]["switching"] in ("in_place", "move")
    (first,) = records(tmp_path)
    assert sum(each["rows"] for each in first["strategies"]) == first["rows"] == 8
    assert len(first["strategies"]) == len(listed) and first["tokens"] < 8 * ROW

    given["training"]["steps"] = 2
    again = Forked.start(given, tmp_path)
    out, err = again.communicate(timeout=HANG_SECONDS)
    assert again.returncode == 0, err
    assert "strategies: several layouts, since by the lengths of the data the checkpoint has" in out
    written["training"]["steps"] = 3
    third = Forked.start(written, tmp_path)
    out, err = third.communicate(timeout=HANG_SECONDS)
    assert third.returncode == 0, err
    steps = [record["step"] for record in records(tmp_path) if "step" in record]
    assert steps == [1, 2, 3] and "step-00000002" in out


def test_rows_that_all_are_full_run_in_one_layout(tmp_path: Path) -> None:
    given = recipe(tmp_path, [ROW] * 12, epochs=1)
    out, err = (process := Forked.start(given, tmp_path)).communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, err
    assert "strategies: one layout, since by the lengths of the data " in out
    written = yaml.safe_load((tmp_path / "out/recipe.yaml").read_text())["parallel_config"]
    assert written["strategies"] is None and written["switching"] is None
    assert [one["rows"] for one in records(tmp_path)] == [8, 4]
    assert all("strategies" not in one for one in records(tmp_path))
