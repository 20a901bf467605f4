"""What a checkpoint and an export of a live engine hold: each parameter once, or nothing new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, save_checkpoint, small_recipe
from uspft.__main__ import main
from uspft.checkpoint.checksums import checksum_of
from uspft.checkpoint.folder import Checkpoint, CheckpointError, newest

RANKS = 2


def work(rank: int, folder: Path, data: Path) -> str:
    """Train a step and export it; then save a checkpoint of which a part goes before it is named.

    Returns what rank 0 is told of that one.
    """
    from uspft.training.loop import train

    recipe = small_recipe(
        folder / "model",
        data,
        32,
        training={"steps": 1},
        parallel_config={"context_parallel": RANKS, "context_parallel_algo": "ring_cp"},
        checkpoint={"every_steps": 1},
        export={"huggingface": True},
    )
    run = prepared(recipe, folder / "out")
    train(run, lambda: False)

    def loses(model: Path) -> None:
        (model.parent / "part-00001-00000.safetensors").unlink()

    told = ""
    try:
        save_checkpoint(run.engine, folder / "out", 2, loses, run.job.identity)
    except CheckpointError as error:
        told = str(error)
        dist.barrier()  # the last of those in there, which it has not come to
    close(run)
    return told


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("saved")
    make_model(folder / "model", "qwen3", heads=4, kv_heads=2)
    data = make_documents(folder / "d.jsonl", [30, 32], masked=[0.0]).path
    return folder, spawn(RANKS, work, folder, data)


def test_a_part_that_is_not_there_is_an_error_and_latest_stays(
    saved: tuple[Path, list[str]],
) -> None:
    folder, told = saved
    checkpoints = folder / "out/checkpoints"
    assert "lacks part-00001-00000.safetensors, or some of it: output_dir must lie on" in told[0]
    assert told[1] == ""
    assert (checkpoints / "latest").read_text() == "step-00000001\n"
    assert not (checkpoints / "step-00000002").exists()
    found = newest(folder / "out")
    assert found.checkpoint and found.checkpoint.step == 1 and found.damaged == []


def test_a_tied_head_is_written_once(saved: tuple[Path, list[str]]) -> None:
    """By a run, into its checkpoint and its export, and by the command."""
    folder, _ = saved
    want = set(load_file(folder / "model/model.safetensors"))
    assert "model.embed_tokens.weight" in want and "lm_head.weight" not in want
    assert json.loads((folder / "model/config.json").read_text())["tie_word_embeddings"]
    state = json.loads((folder / "out/checkpoints/step-00000001/state.json").read_text())
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    assert set(state["files"]) == {f"{kind}/{name}" for kind in kinds for name in want}
    assert main(["export", str(folder / "out"), f"to={folder / 'again'}"]) == 0
    for place in (folder / "out/hf", folder / "again"):
        assert json.loads((place / "config.json").read_text())["tie_word_embeddings"]
        with safe_open(place / "model.safetensors", "pt") as held:
            assert sorted(held.keys()) == sorted(want), place


def test_every_file_of_a_checkpoint_has_its_checksum(saved: tuple[Path, list[str]]) -> None:
    folder = saved[0] / "out/checkpoints/step-00000001"
    state = Checkpoint.open(folder).state
    files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert {"model/config.json", *map("part-0000{}-00000.safetensors".format, range(2))} <= files
    assert files == {*state["checksums"], "state.json"} == {*state["sizes"], "state.json"}
    assert state["checksums"] == {name: checksum_of(folder / name) for name in state["checksums"]}
