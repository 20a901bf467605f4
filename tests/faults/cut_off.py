"""A host whose network is cut in the middle of a run: how the others end, and go on without it.

    sudo .venv/bin/python -m tests.faults.cut_off [--mbit 1000] [--out FILE]

Two hosts are network namespaces of this machine (benchmarks/lab/cluster.py), which needs root and
iproute2. Once without `launch.restarts`: both hosts must end, with what is wrong, and the same
command goes on when the link is back. Once with restarts and `min_hosts: 1`: host 0 goes on alone.
Both must give the losses of a run on one host to which nothing happens, but for float32's rounding
in another order. What was found is kept in tests/faults/cut_off.json, from which docs/long-runs.md
has it. The exit code is 1 where one was not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab.cluster import address_of, hosts_of
from tests.support.launch import ROOT, records, write_recipe
from tests.support.models import make_documents, make_model
from tests.support.runs import small_recipe

FOUND = Path(__file__).with_suffix(".json")
CASES: dict[str, dict[str, Any]] = {
    "ended on both, and went on together": {},
    "went on alone": {"restarts": 1, "min_hosts": 1},
}
STEPS, AT_STEP, END_SECONDS, APART = 400, 20, 60.0, 1e-3
"""The link is cut after a step; all hosts must have ended so long after it. Losses of a step may be
as far apart, relatively."""


def recipe(folder: Path, **launch: Any) -> dict[str, Any]:
    """Two hosts of one process each."""
    return small_recipe(
        folder / "model",
        folder / "d.jsonl",
        64,
        parallel_config={"data_parallel": "auto"},
        training={"steps": STEPS, "global_batch_size": 2},
        checkpoint={"every_steps": 10},
        launch={"processes": 1, "timeout_minutes": 0.5, **launch},
    )


def start(path: Path, hosts: Sequence[Sequence[str]]) -> list[subprocess.Popen[bytes]]:
    """Start the recipe on each host, its output in a log beside it."""
    started = []
    for index, words in enumerate(hosts):
        own = {
            "NNODES": str(len(hosts)),
            "NODE_RANK": str(index),
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(path.parent / "cache"),
        }
        if len(hosts) == 1:
            own = {key: own[key] for key in ("OMP_NUM_THREADS", "XDG_CACHE_HOME")}
        own["PYTHONPATH"] = str(ROOT)
        with (path.parent / f"host-{index}.log").open("ab") as log:
            command = [*words, sys.executable, "-m", "uspft", "train", str(path)]
            environment = {**os.environ, **own}
            started.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            )
    return started


def cut(host: Sequence[str], state: str) -> None:
    """Set the link of a host down or up."""
    subprocess.run([*host, "ip", "link", "set", "eth0", state], check=True)


def steps_of(folder: Path) -> int:
    """The last step of a run's journal."""
    if not (folder / "out/metrics.jsonl").exists():
        return 0
    return max([one["step"] for one in records(folder) if "loss" in one], default=0)


def losses_of(folder: Path) -> dict[int, float]:
    """The losses of a run by step."""
    return {one["step"]: one["loss"] for one in records(folder) if "loss" in one}


def ended(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """The exit codes after a while; what still runs is ended, and has none."""
    until = time.monotonic() + seconds
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(None)
    return codes


def run(
    folder: Path, data: Path, hosts: Sequence[Sequence[str]], launch: dict[str, Any]
) -> dict[str, Any]:
    """Cut the second host off in a run, and return what happened, `wrong` what should not have."""
    folder.mkdir()
    for name in ("model", "d.jsonl"):
        (folder / name).symlink_to(data / name)
    path = write_recipe(recipe(folder, **launch), folder)
    processes = start(path, hosts)
    while steps_of(folder) < AT_STEP and all(one.poll() is None for one in processes):
        time.sleep(0.2)
    cut(hosts[1], "down")
    began, after_step, alone, wrong = time.monotonic(), steps_of(folder), bool(launch), []
    codes = ended(processes[1:], END_SECONDS) if alone else ended(processes, END_SECONDS)
    seconds = time.monotonic() - began
    if any(code in (None, 0) for code in codes):
        wrong.append(f"exit codes after {END_SECONDS:.0f} s: {codes}")
    if alone:
        codes = ended(processes[:1], 600)
    cut(hosts[1], "up")
    if not alone:
        codes = ended(start(path, hosts), 600)
    if any(codes):
        wrong.append(f"the next start: exit codes {codes}")
    if (restarts := sum("restart" in one for one in records(folder))) != alone:
        wrong.append(f"{restarts} restarts in the journal")
    return {"after_step": after_step, "ended_after_seconds": round(seconds, 1), "wrong": wrong}


def main() -> int:
    """Run both, print what was found, and return 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.cut_off")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=FOUND, metavar="FILE")
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="uspft-cut-") as name,
        hosts_of(2, asked.mbit) as hosts,
    ):
        ground = Path(name)
        make_model(ground / "model", "llama")
        make_documents(ground / "d.jsonl", [64, 40] * 20, masked=[0.0])
        (ground / "plain").mkdir()
        plain = write_recipe(
            {**recipe(ground), "output_dir": str(ground / "plain/out")}, ground / "plain"
        )
        if any(ended(start(plain, hosts[:1]), 600)):
            print((ground / "plain/host-0.log").read_text(errors="replace")[-3000:])
            return 1
        wanted = losses_of(ground / "plain")
        for number, (case, launch) in enumerate(CASES.items()):
            folder = ground / str(number)
            one = {"case": case, **run(folder, ground, hosts, launch)}
            losses = losses_of(folder)
            off = [n for n, loss in wanted.items() if abs(losses.get(n, 0) - loss) > APART * loss]
            if off or losses.keys() != wanted.keys():
                one["wrong"].append(f"{len(losses)} steps, of which {len(off)} have other losses")
            for log in sorted(folder.glob("host-*.log")) if one["wrong"] else ():
                print(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}")
            print(one, flush=True)
            found.append(one)
    lines = ",\n".join(map(json.dumps, found))
    asked.out.write_text(f'{{"cases": [\n{lines}\n]}}\n')
    return int(any(one["wrong"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
