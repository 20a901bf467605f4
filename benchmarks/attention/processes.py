"""Starts the ranks of a case, waits for them, and ends them whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.attention.setting import Setting
from benchmarks.lab.results import ROOT


def records_of(
    setting: Setting, hosts: Sequence[Sequence[str]], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """This starts the ranks and returns what they measured.

    hosts: for each, the words to put before a command that runs there. tell: takes a line of
    progress. Raises RuntimeError with the end of a failed rank's log.
    """
    with tempfile.TemporaryDirectory(prefix="uspft-benchmark-") as name:
        folder = Path(name)
        (folder / "setting.json").write_text(json.dumps(asdict(setting)))
        (folder / "progress").touch()
        per_host = setting.processes // len(hosts)
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(setting.processes):
                ranks.append(_start(folder, rank, hosts[rank // per_host], setting))
            _wait(ranks, folder, tell)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        found: list[dict[str, Any]] = json.loads((folder / "records.json").read_text())
        return found


def _start(
    folder: Path, rank: int, before: Sequence[str], setting: Setting
) -> subprocess.Popen[bytes]:
    own = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",  # DeepSpeed reads this and the three below
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(setting.processes),
    }
    if setting.host_mbit:
        own["GLOO_SOCKET_IFNAME"] = "eth0"
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*before, sys.executable, "-m", "benchmarks.attention.worker", str(folder), str(rank)],
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], folder: Path, tell: Callable[[str], None]
) -> None:
    with (folder / "progress").open() as progress:
        while True:
            codes = [process.poll() for process in ranks]
            for line in progress:
                tell(line.rstrip())
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                log = (folder / f"rank-{failed[0]}.log").read_text(errors="replace")
                raise RuntimeError(f"rank {failed[0]} failed:\n{log[-3000:]}")
            if all(code == 0 for code in codes):
                return
            time.sleep(0.2)
