"""`verify` on two processes: every layout equal, every injected fault seen, a model cut to fit."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import job_of, small_recipe
from uspft.verify.depth import USABLE, sizes_of
from uspft.verify.faults import FAULTS

ROW = 64
LENGTHS = [40, 24, 64, 33, 31, 64, 50, 14]
INJECTED: dict[str, list[str]] = {
    "packed": ["whole rows, data 2", "ulysses_cp 2", "planned_cp 2"],
    "single": ["ring_cp 2"],
}
"""By rows, of several documents or of one, the layouts that each fault is tried in."""


def parallel(name: str) -> dict[str, Any]:
    algorithm, _, rest = name.partition(" ")
    if rest.startswith("rows"):
        return {"data_parallel": 2, "context_parallel": 1}
    ulysses = {"ulysses_cp": 2}.get(algorithm, 1)
    found = {"context_parallel_algo": algorithm, "ulysses_degree_in_cp": ulysses}
    return {"data_parallel": 1, "context_parallel": 2, "exchange_stages": None, **found}


def work(rank: int, folder: Path) -> dict[tuple[str, str | None], Any]:
    """(rows, fault) → plain transformers' result and each layout's, as a report of them."""
    from uspft.commands.examine import layout_findings
    from uspft.config import ParallelBlock
    from uspft.verify.gradients import GradientWriter
    from uspft.verify.job import GRADIENTS, LAYOUTS, VerifyJob
    from uspft.verify.layouts import candidates
    from uspft.verify.plain import plain
    from uspft.verify.ranks import run_layouts
    from uspft.verify.report import Report
    from uspft.verify.result import results

    device, found = torch.device("cpu"), {}
    for rows, fault in product(INJECTED, [None, *FAULTS]):
        packing = "best_fit" if rows == "packed" else "none"
        recipe = small_recipe(
            folder / "model",
            folder / "d.jsonl",
            ROW,
            data={"packing": packing},
            training={"steps": 3, "global_batch_size": 2, "max_grad_norm": 0.5},
            deepspeed={"zero_optimization": {"stage": 3 if rows == "packed" else 1}},
        )
        output = folder / f"{rows}-{fault}"
        job = job_of(recipe, output)
        blocks = tuple(ParallelBlock.model_validate(parallel(name)) for name in INJECTED[rows])
        verify = VerifyJob(job, blocks, 1, output, inject=fault)
        if rank == 0:
            writer = GradientWriter(output / GRADIENTS)
            truth = plain(verify.under(blocks[0]), device, writer.add)
            writer.close()
        dist.barrier()
        run_layouts(verify, device, lambda line: None)
        if rank == 0:
            named = {
                one.name: one
                for one in candidates(job.recipe, 2, lambda r, at: layout_findings(r, at, None))
            }
            layouts = [named[name] for name in INJECTED[rows]]
            pairs = list(zip(layouts, results(output / LAYOUTS), strict=True))
            report = Report.of({"dtype": "float32"}, (truth, None), pairs, fault)
            found[rows, fault] = report.ok, report.text()
    return found


@pytest.mark.timeout(600)
def test_each_fault_is_caught_in_every_layout_and_nothing_without_one(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen2", heads=4, kv_heads=2)
    make_documents(tmp_path / "d.jsonl", LENGTHS, masked=[0.0, 0.9, 0.4])
    answers = spawn(2, work, tmp_path)[0]
    assert set(answers) == set(product(INJECTED, [None, *FAULTS])) and len(answers) == 10
    missed = {case: text for case, (ok, text) in answers.items() if not ok}
    assert not missed, "\n".join(f"{case}\n{text}" for case, text in missed.items())


@pytest.mark.timeout(600)
def test_verify_as_a_user_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16, with a model of two layers where one process can hold one."""
    import uspft.commands.verify as command
    from uspft.__main__ import main
    from uspft.model.config import model_config

    make_model(tmp_path / "model", "qwen2", heads=4, kv_heads=2)
    make_documents(tmp_path / "d.jsonl", LENGTHS, masked=[0.0, 0.9, 0.4])
    tree = small_recipe(
        tmp_path / "model",
        tmp_path / "d.jsonl",
        ROW,
        model={"dtype": "bfloat16"},
        data={"packing": "best_fit"},
        parallel_config={"context_parallel": 2, "context_parallel_algo": "allgather_cp"},
        training={"steps": 2, "global_batch_size": 2},
        launch={"device": "cpu", "processes": 2},
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), **tree}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def pretended(recipe: Any) -> int:
        sizes = sizes_of(
            recipe, model_config(recipe.model, recipe.data.sequence_length), with_plain=True
        )
        return int(sizes.need_bytes(1) / USABLE) + 1

    monkeypatch.setattr(command, "memory_here", pretended)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.jsonl").write_text("kept\n")
    assert main(["verify", str(path), "--steps=2"]) == 0
    said = capfd.readouterr().out
    assert "first 1 of 2 layers" in said and "equal: 5 layouts" in said
    found = json.loads((tmp_path / "out/verify/verify.json").read_text())
    assert found["verdict"] == "equal" and found["layers"] == {"kept": 1, "of": 2}
    names = [one["name"] for one in found["layouts"]]
    assert names[0] == "allgather_cp 2" and set(names[1:]) == {
        "whole rows, data 2",
        "ulysses_cp 2",
        "ring_cp 2",
        "planned_cp 2",
    }
    for one in [found["plain_transformers"], *found["layouts"]]:
        assert one["verdict"] == "equal" and one["wrong"] == []
        groups = one["gradient_differences"]
        assert set(groups) == {"embedding", "head", "attention", "mlp", "norm"}
        exact = one["name"] == "whole rows, data 2"  # sums in the same order
        assert all(
            (group["value"] > 0 or exact) and group["value"] < 0.5 for group in groups.values()
        )
    assert all(len(one["losses"]) == 2 for one in found["layouts"])
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == {"metrics.jsonl", "verify"}
    assert not list((tmp_path / "out/verify").glob("*gradients*"))
