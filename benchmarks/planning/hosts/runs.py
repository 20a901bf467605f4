"""Commands that run on every host of a cluster at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab.cluster import address_of
from benchmarks.lab.results import ROOT
from benchmarks.planning.hosts.case import WARM_UP, Case
from benchmarks.predictions import own_layout
from uspft.prepare.make_plan import examine_for_plan
from uspft.written import METRICS

PORT = 29577
POLL_SECONDS, GRACE_SECONDS = 0.1, 10.0


def on_all(hosts: Sequence[Sequence[str]], words: Sequence[str], log: Path, first: Path) -> None:
    """This runs `launch.sh WORDS` on every host to its end.

    hosts: for each, the words to put before a command. log: a folder for what they print. first:
    what host 0 writes before the others are started. Raises RuntimeError with the end of a
    failed host's log.
    """
    log.mkdir(parents=True)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, before in enumerate(hosts):
            started.append(
                _start(number, len(hosts), [*before, str(ROOT / "launch.sh"), *words], log)
            )
            while not first.exists() and started[0].poll() is None:
                time.sleep(POLL_SECONDS)
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                time.sleep(GRACE_SECONDS)  # in which the others say why
                break
            time.sleep(POLL_SECONDS)
    finally:
        for process in started:
            process.terminate()
        codes = [process.wait() for process in started]
    for number, code in enumerate(codes):
        if code:
            said = (log / f"host-{number}.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"uspft {words[0]} on host {number} ended with {code}:\n{said}")


def _start(number: int, count: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    own = {
        "NNODES": str(count),
        "NODE_RANK": str(number),
        "MASTER_ADDR": address_of(0),
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
        "USPFT_PYTHON": sys.executable,
        "XDG_CACHE_HOME": str(log.parent / "cache"),
    }
    with (log / f"host-{number}.log").open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **own}, stdout=output, stderr=output
        )


def calibrated(case: Case, hosts: Sequence[Sequence[str]], folder: Path) -> Path:
    """This measures the cluster, and returns the hardware file."""
    found = folder / "hardware.yaml"
    recipe = case.recipe(folder, "data 4")
    on_all(hosts, ["calibrate", str(recipe), f"to={found}"], folder / "calibrate-log", folder)
    return found


def predicted(recipe: Path, hardware: Path, hosts: int) -> dict[str, Any]:
    """This returns the seconds of a step that `plan` predicts, whole and by part."""
    words = [f"launch.hardware={hardware}"]
    found = examine_for_plan(recipe, words, hosts, None)
    with found.placed():
        time = own_layout(found).time
    parts: dict[str, float] = {}
    for part in time.parts:
        parts[part.name] = parts.get(part.name, 0.0) + part.seconds - part.hidden
    return {"predicted": time.seconds, "parts": parts}


def measured(recipe: Path, hosts: Sequence[Sequence[str]], folder: Path) -> list[float]:
    """This trains, and returns the seconds of each timed step."""
    output = folder / recipe.stem
    on_all(hosts, ["train", str(recipe)], folder / f"{recipe.stem}-log", output)
    lines = (output / METRICS).read_text().splitlines()
    return [json.loads(line)["step_seconds"] for line in lines[WARM_UP:]]
