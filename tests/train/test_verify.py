"""`verify` on two processes: every layout equal, every injected fault seen, a model cut to fit."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import write_recipe
from tests.support.models import make_documents, make_model
from tests.support.multimodal import make_checkpoint
from tests.support.ranks import spawn
from tests.support.runs import VOCABULARY, job_of, small_recipe
from uspft.families import ModelShape, read_shape
from uspft.planner.memory.formula import USABLE_SHARE
from uspft.prepare.host import CONFIGS
from uspft.prepare.make_verify_job import sizes_of
from uspft.verify.gradients import GradientFile
from uspft.verify.inject import FAULTS
from uspft.verify.work import GRADIENTS

ROW = 64
LENGTHS = [40, 24, 64, 33, 31, 64, 50, 14]
CASES: dict[str, tuple[str, str, int, list[str]]] = {
    "packed": ("float32", "best_fit", 3, ["ulysses2", "planned2"]),
    "single": ("float32", "none", 1, ["ring2", "pipeline2"]),
    "bfloat16": ("bfloat16", "best_fit", 2, ["data2"]),
    "adapter": ("float32", "best_fit", 3, ["ring2"]),
    "experts": ("float32", "best_fit", 2, ["ring2"]),
}
"""(compute type, packing, ZeRO stage, the layouts that each fault is tried in)."""
MODELS: dict[str, dict[str, Any]] = {
    "single": {"add_tokens": ["<a>", "<b>"], "overrides": {"vocab_size": VOCABULARY + 2}},
    "adapter": {"adapter": {"rank": 4}},
    "experts": {"adapter": {"rank": 4, "target_parameters": ["mlp.experts.down_proj"]}},
}
"""What else the model of a case has."""
MEMORY: dict[str, dict[str, Any]] = {"single": {"attention_heads": 1}}
"""What saves memory in a case."""
FOLDERS = {"adapter": "multimodal", "experts": "experts"}
"""The model of a case: one with a state inside a multimodal checkpoint, and one that is divided by
experts."""


def verify_job(case: str, folder: Path, fault: str | None) -> Any:
    """The first step of a case, under all layouts of two processes; collective."""
    from uspft.verify.work import VerifyJob

    dtype, packing, stage, _ = CASES[case]
    recipe = small_recipe(
        folder / FOLDERS.get(case, "model"),
        folder / "d.jsonl",
        ROW,
        model={"dtype": dtype, **MODELS.get(case, {})},
        data={"packing": packing},
        parallel_config={"expert_parallel": dist.get_world_size() if case == "experts" else 1},
        training={"steps": 3, "global_batch_size": 2, "max_grad_norm": 0.5},
        deepspeed={"zero_optimization": {"stage": stage}},
        memory=MEMORY.get(case, {}),
    )
    job = job_of(recipe, folder / case)
    return VerifyJob(job, (), 1, folder / case, with_plain=True, inject=fault)


def alone(rank: int, folder: Path) -> None:
    from uspft.verify.ranks import run_reference

    for case in CASES:
        work = verify_job(case, folder, None)
        of_many = work.job.recipe.parallel_config.model_copy(update={"expert_parallel": 2})
        reference = replace(work, job=work.under(of_many)).alone()
        run_reference(reference, torch.device("cpu"))


def together(rank: int, folder: Path) -> dict[tuple[str, str | None], tuple[bool, str]]:
    """(case, fault) → whether the verdict is as it must be, and the table."""
    from uspft.planner.ways import candidates
    from uspft.prepare.known import Known
    from uspft.prepare.layout_findings import layout_findings
    from uspft.prepare.make_verify_job import with_layers
    from uspft.verify.ranks import run_layouts
    from uspft.verify.report import Report
    from uspft.verify.work import LAYOUTS, PLAIN, REFERENCE, results

    found = {}
    for case, fault in product(CASES, [None, *FAULTS]):
        work = verify_job(case, folder, fault)
        every = candidates(work.job.recipe, 2, lambda r, at: layout_findings(r, at, None))
        layouts = [one for one in every if one.name in CASES[case][3]]
        (folder / case / LAYOUTS).unlink(missing_ok=True)
        dist.barrier()
        shape = read_shape(work.job.here.model, CONFIGS)
        assert isinstance(shape, ModelShape)
        layouts = [with_layers(work.job.recipe, one, Known(shape=shape)) for one in layouts]
        work = replace(work, layouts=tuple(one.parallel for one in layouts))
        run_layouts(work, torch.device("cpu"), lambda line: None)
        if rank == 0:
            (reference,), (plain,) = (results(folder / case / name) for name in (REFERENCE, PLAIN))
            pairs = list(zip(layouts, results(folder / case / LAYOUTS), strict=True))
            facts = {"dtype": CASES[case][0]}
            report = Report.of(facts, (reference.measured, plain), pairs, fault)
            found[case, fault] = report.ok and len(pairs) == len(CASES[case][3]), report.text()
    return found


def test_each_fault_is_caught_in_every_layout_and_nothing_without_one(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen2", heads=4, kv_heads=2)
    make_checkpoint(tmp_path / "multimodal", "qwen3_5")
    make_model(tmp_path / "experts", "mixtral", kv_heads=2)
    make_documents(tmp_path / "d.jsonl", LENGTHS, masked=[0.0, 0.9, 0.4])
    spawn(1, alone, tmp_path)
    gradients = GradientFile(tmp_path / "adapter" / GRADIENTS)
    assert gradients.names and all(gradients.read(name).norm() > 0 for name in gradients.names)
    answers = spawn(2, together, tmp_path)[0]
    assert set(answers) == set(product(CASES, [None, *FAULTS])) and len(answers) == 25
    missed = {case: text for case, (ok, text) in answers.items() if not ok}
    assert not missed, "\n".join(f"{case}\n{text}" for case, text in missed.items())


def holds_one_layer() -> None:
    """Make this machine's memory what one process needs for a model of one layer."""
    import uspft.prepare.make_verify_job as preparing
    from uspft.model.hf_config import model_config

    def pretended(recipe: Any) -> int:
        config = model_config(recipe.model, recipe.data.sequence_length)
        shape = read_shape(recipe.model, CONFIGS)
        assert isinstance(shape, ModelShape)
        sizes = sizes_of(recipe, config, shape, with_plain=True)
        return int(sizes.memory_bytes(1) / USABLE_SHARE) + 1

    preparing.memory_here = pretended


def test_verify_as_a_user_runs_it(tmp_path: Path) -> None:
    """In bfloat16, with a model of two layers where one process can hold one."""
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
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.jsonl").write_text("kept\n")
    words = ["verify", str(write_recipe(tree, tmp_path)), "--steps=2"]
    verify = Forked(words, tmp_path, before=holds_one_layer)
    said, err = verify.communicate(timeout=HANG_SECONDS)
    assert verify.returncode == 0, err
    assert "first 1 of 2 layers" in said and "equal: 7 of 7 layouts" in said
    found = json.loads((tmp_path / "out/verify/verify.json").read_text())
    assert found["verdict"] == "equal" and found["layers"] == {"kept": 1, "of": 2}
    tried = [one for one in found["layouts"] if one["verdict"] != "not tried"]
    left = {one["name"] for one in found["layouts"] if one not in tried}
    assert left == {"pipeline2", "pipeline2x2"}, "of one layer"
    names = [one["name"] for one in tried]
    assert names[0] == "allgather2" and set(names[1:]) == {
        "data2",
        "ulysses2",
        "ring2",
        "planned2",
        "tensor2",
        "tensor2-tokens",
    }
    for one in [found["plain_transformers"], *tried]:
        assert one["verdict"] == "equal" and one["wrong"] == []
        groups = one["gradient_differences"]
        assert set(groups) == {"embedding", "head", "attention", "mlp", "norm"}
        exact = one["name"] == "data2"  # sums in the same order
        assert all(
            (group["value"] > 0 or exact) and group["value"] < 0.5 for group in groups.values()
        )
    assert all(len(one["losses"]) == 2 for one in tried)
    assert {entry.name for entry in (tmp_path / "out").iterdir()} == {"metrics.jsonl", "verify"}
    assert not list((tmp_path / "out/verify").glob("*gradients*"))
