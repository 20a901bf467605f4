"""The project as its users start it: ./launch.sh, with the Python that runs the tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def environment(**extra: str) -> dict[str, str]:
    """Nothing is installed, no network is asked, two cores are shared by all ranks."""
    own = {"USPFT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, **extra}


def in_project() -> set[str]:
    """What stands in the project's folder, without what linters and compilers keep there, which
    may run beside a test."""
    return {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}


def write_recipe(recipe: dict[str, Any], folder: Path) -> Path:
    """The recipe as a file in the folder; its output folder is folder/out."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(folder / "out"), **recipe}))
    return path


def start(recipe: dict[str, Any], folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a recipe; its output folder is folder/out."""
    return subprocess.Popen(
        ["./launch.sh", str(write_recipe(recipe, folder)), *words],
        cwd=ROOT,
        env=environment(XDG_CACHE_HOME=str(folder / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl in folder/out, as `records_in` has them."""
    return records_in(folder / "out/metrics.jsonl")


def records_in(file: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without those of saves, whose times differ."""
    every = map(json.loads, file.read_text().splitlines())
    return [record for record in every if "save_bytes" not in record]


def living(folder: Path) -> list[int]:
    """Processes of this user whose environment, command or stderr names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                text += os.readlink(entry / "fd/2").encode()
            except OSError:
                continue
            if str(folder).encode() in text:
                found.append(int(entry.name))
    return found


def parent_of(pid: int) -> int:
    """The process that started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def living_ranks(folder: Path) -> dict[int, int]:
    """Process by rank: those of the living whose stderr is a rank's log, not a rank's own child."""
    logs = {pid: Path(os.readlink(f"/proc/{pid}/fd/2")) for pid in living(folder)}
    matches = {pid: re.fullmatch(r"rank-(\d+)\.log", log.name) for pid, log in logs.items()}
    ranks = {pid: int(match[1]) for pid, match in matches.items() if match}
    return {rank: pid for pid, rank in ranks.items() if parent_of(pid) not in ranks}
