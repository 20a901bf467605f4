"""`check` writes nothing at all: no cache, no bytecode, nothing for itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project beside an empty home, where nobody else writes."""
    folder = tmp_path_factory.mktemp("copy")
    (folder / "home").mkdir()
    for name in ("uspft", "configs", "recipes", "data"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "project" / name, ignore=unwanted)
    return folder


# Two commands in one process, whose imports are most of either.
PROGRAM = """
import sys
from uspft.__main__ import main
sys.exit(max(main(["check", name]) for name in sys.argv[1:]))
"""


def check(copy: Path, *recipes: str) -> subprocess.CompletedProcess[str]:
    """Run `check` without a network or a GPU; everything it might write lies under `copy`."""
    dropped = ("HF_", "XDG_", "NNODES", "SLURM_", "USPFT_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    own = {"HOME": str(copy / "home"), "TMPDIR": str(copy / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *recipes],
        cwd=copy / "project",
        env={**kept, **own, **offline},
        capture_output=True,
        text=True,
        check=False,
    )


def listing(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Every folder below, and every file with its size and the time it was last written."""
    found = {}
    for path in folder.rglob("*"):
        state = path.stat()
        found[str(path)] = (state.st_size, state.st_mtime_ns) if path.is_file() else None
    return found


def test_a_check_writes_nothing(copy: Path) -> None:
    """From its first import on, for data and a tokenizer that are here and for those of the hub."""
    recipes = "recipes/quickstart.yaml", "recipes/qwen2.5-32b-lora-planned-32k.yaml"
    before = listing(copy)
    done = check(copy, *recipes)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("no problem found") == len(recipes)
    assert listing(copy) == before


def test_a_written_file_is_seen(copy: Path) -> None:
    before = listing(copy)
    (copy / "home/.cache").mkdir()
    assert listing(copy) != before
    (copy / "home/.cache").rmdir()
