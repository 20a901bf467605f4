"""A whole run of the command with two evaluation sets: what is read, said and written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.support.evaluation import alone
from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import records
from tests.support.models import make_documents, make_model

LINE = re.compile(
    r"evaluation after step (\d+): loss (\d+\.\d{4})  perplexity \d+\.\d{4}  ([\d,]+) tokens"
    r"  \(\S+/(\w+)\.jsonl \d+\.\d{4}, \S+/(\w+)\.jsonl \d+\.\d{4}\)"
    r"(?:  best so far|  best \d+\.\d{4} after step \d+)?"
)


def recipe_of(folder: Path, train: Path, sets: list[Path]) -> dict[str, Any]:
    return {
        "model": {"name_or_path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "train": str(train),
            "eval": [str(path) for path in sets],
            "sequence_length": 96,
            "on_bad_sample": "skip",
        },
        "parallel_config": {"context_parallel": 2, "context_parallel_algo": "planned_cp"},
        "deepspeed": {"zero_optimization": {"stage": 3}},
        "training": {"steps": 3, "global_batch_size": 2, "eval_every_steps": 2},
        "launch": {"device": "cpu"},
    }


def test_a_run_evaluates_and_says_so(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3", heads=4, kv_heads=2)
    data = make_documents(tmp_path / "train.jsonl", [60, 36, 96, 50], masked=[0.0, 0.9, 0.4])
    with data.path.open("a") as file:
        file.write('{"input_ids": [1, 2\n{"input_ids": "1 2"}\n')
    sets = {
        "few": make_documents(tmp_path / "few.jsonl", [96], masked=[0.8]),
        "many": make_documents(tmp_path / "many.jsonl", [10, 90, 30, 64, 31], masked=[0.0, 0.5]),
    }
    recipe = recipe_of(tmp_path, data.path, [found.path for found in sets.values()])
    process = Forked.start(recipe, tmp_path)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, err) == (0, "")
    lines = out.splitlines()
    for name, found in sets.items():
        count = len(found.documents)
        told = f"evaluation data {found.path}: {count} sample{'s' * (count != 1)}, "
        assert told in out, name
    shown = [match for line in lines if (match := LINE.fullmatch(line))]
    assert [(match[1], match[4], match[5]) for match in shown] == [
        ("2", "few", "many"),
        ("3", "few", "many"),
    ]
    assert sum(line.startswith("evaluation: loss ") for line in lines) == 1
    assert sum(line.startswith("done: loss ") for line in lines) == 1
    read, *written = records(tmp_path)
    assert read == {"data": {"read": 6, "kept": 4, "dropped": {"cannot be used": 2}}}
    assert "data: 2 samples that cannot be used, skipped" in out
    assert f"data: {data.path}:5: broken JSON (" in out and f"data: {data.path}:6: input_ids" in out
    assert [("loss" in record, record["step"]) for record in written] == [
        (True, 1),
        (True, 2),
        (False, 2),
        (True, 3),
        (False, 3),
    ]
    assert [f"{written[at]['eval_loss']:.4f}" for at in (2, 4)] == [match[2] for match in shown]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/hf", dtype=torch.float32)
    documents = [document for found in sets.values() for document in found.documents]
    loss_sum, targets = alone(tmp_path / "model", dict(model.state_dict()), documents)
    assert written[4]["eval_loss"] == pytest.approx(loss_sum / targets, rel=1e-6)
    assert written[4]["eval_target_tokens"] == targets

    resolved = yaml.safe_load((tmp_path / "out/recipe.yaml").read_text())
    assert [source["path"] for source in resolved["data"]["eval"]] == recipe["data"]["eval"]
    (tmp_path / "again").mkdir()
    again = Forked.start(resolved, tmp_path / "again", f"output_dir={tmp_path}/again/out")
    assert again.wait(HANG_SECONDS) == 0, again.communicate()
    keys = ("step", "eval_loss", "eval_sets")
    ends = [
        [[r.get(key) for key in keys] for r in found if "eval_loss" in r]
        for found in (written, records(tmp_path / "again"))
    ]
    assert ends[0] == ends[1]
