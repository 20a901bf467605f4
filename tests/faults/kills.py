"""Runs that lose a rank to SIGKILL at a random moment: the next start must end as if nothing had
happened, and touch nothing else in the output folder.

    python -m tests.faults.kills [--seeds 0-29] [--out FILE]

A seed chooses the layout, what the run is about when a rank is killed, which rank, and how long
after it began. What each trial found is kept in tests/faults/kills.json, from which
docs/long-runs.md has its counts. The exit code is 1 where a trial failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import living, records, write_recipe
from tests.support.models import make_documents, make_model
from tests.support.runs import small_recipe

FOUND = Path(__file__).with_suffix(".json")
STEPS, ROW = 4, 32
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {"data_parallel": 2}),
    "context × tensor": (
        4,
        {"context_parallel": 2, "context_parallel_algo": "ring_cp", "model_parallel": 2},
    ),
    "stages": (2, {"pipeline_stage": 2}),
}
MOMENTS = ("training", "saving", "evaluating", "exporting", "resuming")
MOST_SECONDS = {
    "training": 0.3,
    "saving": 0.2,
    "evaluating": 0.1,
    "exporting": 0.3,
    "resuming": 0.2,
}
"""How long after its beginning a rank is killed at most; at its end it is killed anyway."""
HERS = ("notes.txt", "hf2/config.json", "checkpoints/step-best/state.json", "logs/mine.log")
"""Files of the user's in the output folder."""


@dataclass(frozen=True)
class Trial:
    """One kill."""

    seed: int
    layout: str
    moment: str
    overlap: bool
    """Whether saves overlap steps."""
    rank: int
    visit: int
    """At which time of coming there."""
    after_seconds: float

    @classmethod
    def of(cls, seed: int) -> Trial:
        """The trial of a seed: each fifteen in a row have every moment in every layout."""
        draw = random.Random(seed)
        layout, moment = list(LAYOUTS)[seed // len(MOMENTS) % len(LAYOUTS)], MOMENTS[seed % 5]
        visits = {"training": STEPS, "saving": 2, "evaluating": 2}.get(moment, 1)
        return cls(
            seed,
            layout,
            moment,
            draw.random() < 0.5,
            draw.randrange(LAYOUTS[layout][0]),
            draw.randint(1, visits),
            draw.uniform(0, MOST_SECONDS[moment]),
        )


def kill(trial: Trial, mark: Path) -> None:
    """Have the trial's rank be killed when it is about what the trial says."""
    from uspft import assemble
    from uspft.checkpoint import save
    from uspft.engine.zero import ZeroEngine
    from uspft.training import evaluate, loop

    visits = 0

    def die() -> None:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def deadly(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            nonlocal visits
            if os.environ["RANK"] != str(trial.rank):
                return inner(*given, **more)
            visits += 1
            if visits != trial.visit:
                return inner(*given, **more)
            threading.Timer(trial.after_seconds, die).start()
            inner(*given, **more)
            die()

        return call

    where: Any
    where, name = {
        "training": (ZeroEngine, "step"),
        "saving": (save.Save, "finish" if trial.after_seconds < 0.1 else "__init__"),
        "evaluating": (evaluate, "evaluate"),
        "exporting": (loop, "export_run"),
        "resuming": (assemble, "load_state"),
    }[trial.moment]
    setattr(where, name, deadly(getattr(where, name)))


def recipe(ground: Path, trial: Trial, steps: int) -> dict[str, Any]:
    """The recipe of a trial, to so many steps."""
    _, parallel = LAYOUTS[trial.layout]
    return small_recipe(
        ground / "model",
        ground / "d.jsonl",
        ROW,
        data={"eval": str(ground / "eval.jsonl")},
        parallel_config=parallel,
        training={"steps": steps, "global_batch_size": 2, "eval_every_steps": 2},
        checkpoint={"every_steps": 2, "keep_last": 2, "overlap": trial.overlap},
        export={"huggingface": True},
    )


def make(ground: Path) -> None:
    """The model and the data of all trials."""
    make_model(ground / "model", "llama", heads=4, kv_heads=2)
    make_documents(ground / "d.jsonl", [ROW, 20, 31, ROW] * 2, masked=[0.0, 0.5])
    make_documents(ground / "eval.jsonl", [24, ROW], masked=[0.2])


def start(
    ground: Path, folder: Path, trial: Trial, steps: int, before: Callable[[], None] | None = None
) -> tuple[int, str]:
    """Exit code and stderr of a start in a folder."""
    path = write_recipe(recipe(ground, trial, steps), folder)
    variables = {"XDG_CACHE_HOME": str(ground / "cache")}
    process = Forked([str(path)], folder, before=before, **variables)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode is not None
    return process.returncode, err


def outcome(folder: Path) -> dict[str, Any]:
    """What a run has come to: losses and evaluations by step, and the exported weights."""
    found = records(folder)
    exported = (folder / "out/hf/model.safetensors").read_bytes()
    return {
        "losses": {one["step"]: one["loss"] for one in found if "loss" in one},
        "evaluations": {one["step"]: one["eval_loss"] for one in found if "eval_loss" in one},
        "weights": hashlib.blake2b(exported).hexdigest(),
    }


def theirs(out: Path) -> dict[str, bytes]:
    """The user's files, those of HERS and any that should not be there."""
    return {name: (out / name).read_bytes() for name in HERS if (out / name).is_file()}


def left_half_written(out: Path) -> list[str]:
    return [str(path.relative_to(out)) for path in out.rglob(".*") if ".partial" in path.name]


def attempt(trial: Trial, ground: Path, folder: Path, wanted: dict[str, Any]) -> str:
    """Carry a trial out, and return what was wrong in the end; "" where all is as wanted.

    wanted: the outcome of an undisturbed run.
    """
    folder.mkdir(parents=True)
    for name in HERS:
        (folder / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "out" / name).write_bytes(name.encode())
    hers, mark = theirs(folder / "out"), folder / "killed"
    if trial.moment == "resuming":
        code, err = start(ground, folder, trial, STEPS // 2)
        if code:
            return f"the first half: {err}"
    code, err = start(ground, folder, trial, STEPS, partial(kill, trial, mark))
    if not mark.exists() or code != 1:
        return f"it was not killed, exit code {code}: {err}"
    if left := living(folder):
        return f"processes are left: {left}"
    code, err = start(ground, folder, trial, STEPS)
    if code:
        return f"the next start: exit code {code}: {err}"
    found = outcome(folder)
    wrong = [what for what, value in wanted.items() if found[what] != value]
    if theirs(folder / "out") != hers:
        wrong.append("files of the user's")
    wrong += left_half_written(folder / "out")
    return f"not as undisturbed: {', '.join(wrong)}" if wrong else ""


def undisturbed(ground: Path, folder: Path, layout: str) -> dict[str, Any]:
    """The outcome of a run in a layout to which nothing happens."""
    folder.mkdir(parents=True)
    first = next(t for t in map(Trial.of, range(100)) if t.layout == layout and not t.overlap)
    code, err = start(ground, folder, first, STEPS)
    assert code == 0, err
    return outcome(folder)


def main() -> int:
    """Carry the trials out, keep what they found, and return 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills")
    parser.add_argument("--seeds", default="0-29")
    parser.add_argument("--out", type=Path, default=FOUND, metavar="FILE")
    asked = parser.parse_args()
    first, _, last = asked.seeds.partition("-")
    kept = json.loads(asked.out.read_text())["trials"] if asked.out.exists() else []
    known = {one["seed"]: one for one in kept}
    wanted: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="uspft-kills-") as name:
        ground = Path(name)
        make(ground)
        for trial in map(Trial.of, range(int(first), int(last or first) + 1)):
            if trial.layout not in wanted:
                place = ground / f"undisturbed-{len(wanted)}"
                wanted[trial.layout] = undisturbed(ground, place, trial.layout)
            wrong = attempt(trial, ground, ground / str(trial.seed), wanted[trial.layout])
            print(f"{trial}: {wrong or 'as undisturbed'}", flush=True)
            known[trial.seed] = {**asdict(trial), "wrong": wrong}
            lines = ",\n".join(json.dumps(known[seed]) for seed in sorted(known))
            asked.out.write_text(f'{{"trials": [\n{lines}\n]}}\n')
    return int(any(one["wrong"] for one in known.values()))


if __name__ == "__main__":
    from tests.faults import kills  # what is forked finds it by its name

    sys.exit(kills.main())
