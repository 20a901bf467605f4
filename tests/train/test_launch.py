"""Whole runs, one through launch.sh: numbers, files, and what happens when something dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import living, living_ranks, records, start
from tests.support.models import Documents, make_documents, make_model, reference
from uspft.checkpoint.folder import Checkpoint
from uspft.config import dump, load
from uspft.written import is_of_a_run

PACKED = [[60, 36], [96], [50, 46], [91, 5]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("launch")
    make_model(folder / "model", "qwen2", heads=4, kv_heads=2)
    return folder, make_documents(folder / "d.jsonl", list(chain(*PACKED)), masked=[0.0, 0.9, 0.4])


def recipe(setting: tuple[Path, Documents], **blocks: Any) -> dict[str, Any]:
    folder, data = setting
    base: dict[str, Any] = {
        "model": {"name_or_path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(data.path), "sequence_length": 96, "shuffle": False},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 1.0},
        "lr_schedule": {"type": "constant", "warmup_ratio": 0.0},
        "training": {"steps": 2, "global_batch_size": 2, "max_grad_norm": 0.5},
        "checkpoint": {"every_steps": None},
        "launch": {"device": "cpu"},
    }
    return {key: {**base.get(key, {}), **blocks.get(key, {})} for key in {**base, **blocks}}


def documents_of(setting: tuple[Path, Documents], steps: int) -> list[list[Any]]:
    """The documents of each step, which takes two rows."""
    waiting = iter(setting[1].documents)
    rows = [[next(waiting) for _ in row] for row in PACKED]
    return [[rows[0] + rows[1], rows[2] + rows[3]][step % 2] for step in range(steps)]


STEPS = 25
"""So many that a run can be stopped among them."""
RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
OPEN = ("parallel_config.context_parallel=2", "training.micro_batch_size=auto")
OPEN = (*OPEN, "launch.processes=2")
"""What a recipe of two processes says that leaves all else to the planner."""
NEEDED = ("bash", "cat", "dirname", "env", "readlink", "sha256sum")
HIDDEN = ("c++", "g++", "gcc", "cc", "clang", "ninja", "git", "nvcc")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Python and a shell, and neither a compiler, nor ninja, nor git; what is
    compiled would be in the folder `built`."""
    tools, built = tmp_path / "bin", tmp_path / "built"
    for folder in (tools, built):
        folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found, name
        (tools / name).symlink_to(found)
    for name in ("CC", "CXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(built))
    monkeypatch.setenv("PATH", str(tools))
    assert [name for name in HIDDEN if shutil.which(name)] == []


@pytest.mark.usefixtures("bare")
def test_metrics_and_model_are_those_of_one_process(
    setting: tuple[Path, Documents], tmp_path: Path
) -> None:
    zero, logging = {"zero_optimization": {"stage": "auto"}}, {"report": False}
    given = recipe(setting, deepspeed=zero, logging=logging) | {"parallel_config": "auto"}
    process = start(given, tmp_path, *OPEN)
    out, err = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert "\nhardware: cpu (shipped figures): " in out
    assert list((tmp_path / "built").iterdir()) == []
    want = reference(setting[0] / "model", documents_of(setting, 2), rate=1e-3, clip=0.5)
    for record, loss, norm, targets in zip(
        records(tmp_path), want.losses, want.grad_norms, want.targets, strict=True
    ):
        assert record["loss"] == pytest.approx(loss, rel=1e-5)
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert record["target_tokens"] == targets
        assert record["tokens"] == 2 * 96  # a row counts once, however many ranks share it
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out/hf")
    for name, value in model.state_dict().items():
        if name in want.end:
            moved = (want.end[name] - want.start[name]).norm()
            assert (value - want.end[name]).norm() <= 2e-3 * moved, name
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "recipe.yaml",
        "metrics.jsonl",
        "environment.json",
        "hf",
        "logs",
    }
    assert "each row shared by" in out and "done: loss" in out
    resolved = (tmp_path / "out/recipe.yaml").read_text()
    lines = [line.strip() for line in resolved.splitlines()]
    kept = [line for line in lines if not line.startswith("#")]
    assert [line for line in kept if "auto" in line] == ["resume: auto"]
    again = load(tmp_path / "out/recipe.yaml").recipe
    assert [line.strip() for line in dump(again).splitlines()] == kept
    said = "by the documents of the run's first rows, "
    assert f"\nauto: {said}" in out and "\nauto: parallel_config.data_parallel: 1, since " in out
    assert f"# auto, {said}" in " ".join(lines) and "# auto: 1, since " in " ".join(lines)
    assert again.parallel_config.context_parallel == 2 and len(lines) > len(kept) + 4
    environment = json.loads((tmp_path / "out/environment.json").read_text())
    assert environment["versions"]["torch"] and environment["git_commit"] is None


def test_sigterm_saves_and_the_next_run_goes_on_as_if_nothing_had_happened(
    setting: tuple[Path, Documents], tmp_path: Path
) -> None:
    """From the recipe that it has left, by the numbers of one process."""
    runs = recipe(setting, parallel_config=RING, training={"steps": STEPS})
    process = Forked.start(runs, tmp_path)
    metrics = tmp_path / "out/metrics.jsonl"
    _wait_for(lambda: metrics.exists() and len(records(tmp_path)) >= 3, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, err
    assert not living(tmp_path)
    stopped = records(tmp_path)[-1]["step"]
    assert stopped < STEPS
    assert (tmp_path / "out/checkpoints/latest").read_text() == f"step-{stopped:08d}\n"
    again = Forked.start(yaml.safe_load((tmp_path / "out/recipe.yaml").read_text()), tmp_path)
    out, err = again.communicate(timeout=HANG_SECONDS)
    assert again.returncode == 0, err
    assert f"going on from {tmp_path}/out/checkpoints/step-{stopped:08d}" in out
    steps = [r for r in records(tmp_path) if "loss" in r]
    assert {"resumed_from_step": stopped} in records(tmp_path)
    want = reference(setting[0] / "model", documents_of(setting, STEPS), rate=1e-3, clip=0.5)
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert [r["loss"] for r in steps] == pytest.approx(want.losses, rel=1e-3)
    assert [r["grad_norm"] for r in steps] == pytest.approx(want.grad_norms, rel=1e-2)


def test_a_finished_run_says_so_and_exports_from_its_checkpoint(
    setting: tuple[Path, Documents], tmp_path: Path
) -> None:
    runs = recipe(setting, checkpoint={"every_steps": 1, "keep_last": 1})
    process = Forked.start(runs, tmp_path)
    assert process.wait(HANG_SECONDS) == 0, process.communicate()
    assert [p.name for p in (tmp_path / "out/checkpoints").glob("step-*")] == ["step-00000002"]
    again = Forked.start(runs, tmp_path)
    out, _ = again.communicate(timeout=HANG_SECONDS)
    assert again.returncode == 0
    assert "all 2 steps are done" in out and "checkpoint.resume=never" in out
    (tmp_path / "out/hf").rename(tmp_path / "lost")  # as if it had died before the export
    assert Forked.start(runs, tmp_path).wait(HANG_SECONDS) == 0
    assert (tmp_path / "out/hf/model.safetensors").exists()
    place = [f"output_dir={tmp_path / 'other'}", f"checkpoint.resume={tmp_path / 'out'}"]
    assert Forked.start(runs, tmp_path, *place).wait(HANG_SECONDS) == 0
    assert (tmp_path / "other/hf/model.safetensors").exists()
    assert is_of_a_run(tmp_path / "other")  # whose own exports the next run may replace
    anew = Forked.start(runs, tmp_path, "checkpoint.resume=never")
    assert anew.wait(HANG_SECONDS) == 0
    assert list((tmp_path / "out").glob("earlier-*/checkpoints/step-00000002/state.json"))

    from uspft.__main__ import main

    assert main(["export", str(tmp_path / "out"), f"to={tmp_path / 'exported'}"]) == 0
    ends = [
        AutoModelForCausalLM.from_pretrained(tmp_path / place).state_dict()
        for place in ("out/hf", "exported")
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_run_that_goes_on_keeps_its_export_until_the_new_one_is_whole(
    setting: tuple[Path, Documents], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    runs = recipe(setting, checkpoint={"every_steps": 1, "keep_last": 1})

    def run(*words: str) -> str:
        process = Forked.start(runs, tmp_path, *words)
        said, err = process.communicate(timeout=HANG_SECONDS)
        assert (process.returncode, err) == (0, "")
        assert not (out / ".exports-outdated").exists()
        return said

    def exported(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "hf").iterdir()}

    run()
    first = exported(out)
    killed = Forked.start(runs, tmp_path, "training.steps=100000")
    _wait_for(lambda: records(tmp_path)[-1].get("step", 0) > 3, killed)
    killed.kill()
    killed.wait(HANG_SECONDS)
    _wait_for(lambda: not living(tmp_path))
    assert exported(out) == first and not list(out.glob("earlier-*"))
    # All that is asked for now is done, and the export is of an earlier step.
    done = max(int(path.name.removeprefix("step-")) for path in out.glob("checkpoints/step-*"))
    assert f"all {done} steps are done" in run(f"training.steps={done}")
    newest = Checkpoint.open(out / f"checkpoints/step-{done:08d}")
    weights = load_file(out / "hf/model.safetensors")
    assert all(torch.equal(v, newest.tensor("weight", name)) for name, v in weights.items())
    (aside,) = out.glob("earlier-*")
    assert exported(aside) == first
    said = run(f"training.steps={done + 1}")
    (place,) = set(out.glob("earlier-*")) - {aside}
    assert f"what was exported before is now in {place}" in said
    assert load_file(place / "hf/model.safetensors").keys() == weights.keys()
    assert f": {done + 1:,} steps on" in (out / "hf/README.md").read_text()


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(
    setting: tuple[Path, Documents], tmp_path: Path
) -> None:
    runs = recipe(setting, parallel_config=RING, optimizer={"learning_rate": 1e30})
    process = Forked.start(runs, tmp_path)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert err.count(" failed: ") == 1
    assert "step 2, rows 2 to 3" in err and "nothing was updated" in err
    assert [record["step"] for record in records(tmp_path)] == [1]


def test_a_killed_rank_ends_the_run_and_is_named(
    setting: tuple[Path, Documents], tmp_path: Path
) -> None:
    runs = recipe(setting, parallel_config=RING, training={"steps": 100_000})
    process = Forked.start(runs, tmp_path)
    _wait_for(
        lambda: (tmp_path / "out/metrics.jsonl").exists() and len(records(tmp_path)) >= 1, process
    )
    os.kill(living_ranks(tmp_path)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert "rank 1" in err and "killed" in err
    assert not living(tmp_path)


def _wait_for(true: Any, process: Any = None) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not true():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
