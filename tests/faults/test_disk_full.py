"""A disk that is full in training, saving and export: what is said, what stays, how it goes on.

The output folder is a small tmpfs, filled to the last byte when the run comes to that moment.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import living, records, write_recipe
from tests.support.models import make_documents, make_model
from tests.support.runs import small_recipe
from uspft.checkpoint.folder import newest

STEPS, AT_STEP = 3, 2
SIZE = "48m"
"""Enough for three checkpoints and an export; the rest is filled."""
MOMENTS = {
    "training": "of step 2 cannot be written",  # its record, or where that fits its checkpoint
    "saving": "the checkpoint of step 2 cannot be written",
    "export": "the trained model cannot be written",
}


def fill(disk: Path) -> None:
    """Write until nothing more fits."""
    block = bytes(1 << 16)
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(block):
                pass
        except OSError:
            pass


def fills(disk: Path, moment: str) -> None:
    """Have the disk be full from a moment of the run on."""
    from uspft.checkpoint import save
    from uspft.metrics import Journal
    from uspft.training import loop

    def at(inner: Callable[..., Any], number: int) -> Callable[..., Any]:
        times = 0

        def call(*given: Any, **more: Any) -> Any:
            nonlocal times
            times += 1
            if times == number:
                fill(disk)
            return inner(*given, **more)

        return call

    if moment == "training":  # the first step's record and that of its save come before
        Journal.write = at(Journal.write, 3)  # type: ignore[method-assign]
    elif moment == "saving":
        save.Save.__init__ = at(save.Save.__init__, AT_STEP)  # type: ignore[method-assign]
    else:
        loop.export_run = at(loop.export_run, 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs needs the right to mount")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk-full")
    make_model(folder / "model", "llama")
    make_documents(folder / "d.jsonl", [32] * STEPS, masked=[0.0])
    return folder


def start(
    models: Path, folder: Path, out: Path, before: Callable[[], None] | None = None
) -> tuple[int, str]:
    recipe = small_recipe(
        models / "model",
        models / "d.jsonl",
        32,
        training={"steps": STEPS},
        checkpoint={"every_steps": 1, "keep_last": 2},
        export={"huggingface": True},
    )
    path = write_recipe({**recipe, "output_dir": str(out)}, folder)
    process = Forked([str(path)], folder, before=before, XDG_CACHE_HOME=str(models / "cache"))
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode is not None and not living(folder)
    return process.returncode, err


@pytest.fixture(scope="module")
def undisturbed(models: Path) -> tuple[list[float], bytes]:
    code, err = start(models, models, models / "out")
    assert code == 0, err
    return outcome(models / "out")


def outcome(out: Path) -> tuple[list[float], bytes]:
    losses = [one["loss"] for one in records(out.parent) if "loss" in one]
    return losses, (out / "hf/model.safetensors").read_bytes()


@pytest.mark.parametrize("moment", MOMENTS)
def test_it_is_said_and_with_room_the_run_goes_on(
    models: Path,
    undisturbed: tuple[list[float], bytes],
    disk: Path,
    tmp_path: Path,
    moment: str,
) -> None:
    out = disk / "out"
    code, err = start(models, tmp_path, out, partial(fills, disk, moment))
    assert code == 1 and f"{MOMENTS[moment]} (" in err and "No space left" in err, err
    assert "make room there" in err and "Traceback" not in err
    kept = newest(out).checkpoint
    assert kept and kept.step == (STEPS if moment == "export" else AT_STEP - 1)
    (disk / "filler").unlink()
    code, err = start(models, tmp_path, out)
    assert code == 0, err
    assert outcome(out) == undisturbed
