"""USP's convergence experiment: do the loss curves of split rows lie on those of whole rows?

    python -m benchmarks.convergence [--steps 1000] [--others 200] [--work DIR] [--out DIR]

A 4-layer model from random weights, 4 rows of 1,024 tokens a step, learning rate 1e-3, float32, one
seed, 4 CPU processes: each with a row of its own (data parallel 4) against all four sharing every
row (Ulysses 2 × ring 2), and every other algorithm for fewer steps. The yardstick is data parallel
against itself with the rows of each step in reverse order: the same sums, rounded differently. Once
on text, a row from one document, and once on packed documents with masked prompts. What is finished
in DIR is not run again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.convergence_data import rows_of
from benchmarks.convergence_ranks import train_all
from benchmarks.machine import circumstances
from uspft.commands.examine import examine
from uspft.data import prepare
from uspft.job import Job

ROOT = Path(__file__).parents[1]
RANKS = 4
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
    "head_dim": 16,
}
"""What differs from configs/models/quickstart.json: deeper, and narrow enough for two cores."""
KINDS = {"text": "text, one document a row", "prompts": "packed documents, prompts masked"}
LIMIT, ROUNDING = 2.0, 1e-3
"""A curve may be off by so many times the yardstick over its steps, or by this."""


@dataclass(frozen=True)
class Curve:
    """A run: its layout, and whether the rows of a step are taken backwards."""

    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    backwards: bool = False
    whole: bool = False  # runs all the steps


def _shared(algorithm: str, **more: int) -> dict[str, Any]:
    return {"context_parallel": RANKS, "context_parallel_algo": algorithm, **more}


BASE = Curve("data parallel 4", whole=True)
YARDSTICK = Curve("data parallel 4, backwards", backwards=True, whole=True)
CURVES = (
    BASE,
    YARDSTICK,
    Curve("Ulysses 2 × ring 2", _shared("hybrid_cp", ulysses_degree_in_cp=2), whole=True),
    Curve("Ulysses 4", _shared("ulysses_cp")),
    Curve("ring 4", _shared("ring_cp")),
    Curve("all-gather 4", _shared("allgather_cp")),
    Curve("planned 4", _shared("planned_cp", ulysses_degree_in_cp=1)),
    Curve("Ulysses 2 × planned 2", _shared("planned_cp", ulysses_degree_in_cp=2)),
)


def main() -> int:
    """Train, compare, write; 1 where a curve is further off than the limit."""
    words = _words()
    losses = {kind: losses_of(kind, words) for kind in words.rows}
    results = {kind: compare(each) for kind, each in losses.items()}
    words.out.mkdir(parents=True, exist_ok=True)
    said = table(results)
    print(said)
    (words.out / "convergence.md").write_text(said)
    whole = {**circumstances(), "largest_differences": results, "losses": losses}
    (words.out / "convergence.json").write_text(json.dumps(whole) + "\n")
    draw(words.out / "convergence.svg", losses)
    every = [one for found in results.values() for one in found]
    return int(any(one["largest"] > max(LIMIT * one["yardstick"], ROUNDING) for one in every))


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--others", type=int, default=200, help="steps of the other algorithms")
    parser.add_argument("--rows", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--work", type=Path, default=Path("outputs/convergence"))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def losses_of(kind: str, words: argparse.Namespace) -> dict[str, list[float]]:
    """The loss of every step, by curve; trains what is not there yet."""
    work = words.work / kind
    work.mkdir(parents=True, exist_ok=True)
    data = rows_of(kind, work)
    jobs: list[tuple[Path, bool]] = []
    outputs = {}
    for number, curve in enumerate(CURVES):
        steps = words.steps if curve.whole else words.others
        outputs[curve.name] = output = work / f"run-{number}-{steps}"
        if len(_losses(output)) < steps:
            jobs.append((_job(curve, steps, data, output), curve.backwards))
    if jobs:
        train_all(jobs, RANKS)
    return {name: _losses(output) for name, output in outputs.items()}


def _job(curve: Curve, steps: int, data: dict[str, Any], output: Path) -> Path:
    """A folder that the ranks read the job from."""
    recipe = {
        "output_dir": str(output),
        "model": {
            "config": str(ROOT / "configs" / "models" / "quickstart.json"),
            "overrides": SHAPE,
            "tokenizer": str(ROOT / "data" / "tokenizer"),
            "dtype": "float32",
        },
        "data": {"sequence_length": 1024, **data},
        "parallel_config": curve.parallel,
        "optimizer": {"learning_rate": 1e-3},
        "lr_schedule": {"type": "constant", "warmup_steps": 30},
        "training": {"steps": steps, "global_batch_size": 4},
        "memory": {"gradient_checkpointing": False},
        "checkpoint": {"every_steps": None},
        "export": {"huggingface": False},
        "launch": {"device": "cpu", "processes": RANKS},
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / "written.yaml"
    path.write_text(yaml.safe_dump(recipe))
    (output / "metrics.jsonl").unlink(missing_ok=True)
    found = examine(path, [], 1, None).recipe
    corpus = prepare(found.data, found.model.tokenizer, 8192, output.parent / "cache")
    Job(found, corpus, steps, {}).write(output)
    return output


def _losses(output: Path) -> list[float]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def compare(losses: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Each curve beside data parallel's: largest difference of the loss, and the yardstick's over
    the same steps."""
    base, back = losses[BASE.name], losses[YARDSTICK.name]
    found = []
    for name, curve in losses.items():
        if name == BASE.name:
            continue
        off = max(abs(a - b) for a, b in zip(curve, base, strict=False))
        span = list(zip(back, base, strict=True))[: len(curve)]
        yardstick = max(abs(a - b) for a, b in span)
        found.append(
            {
                "curve": name,
                "steps": len(curve),
                "largest": off,
                "yardstick": yardstick,
                "of_yardstick": off / yardstick,
                "last_loss": curve[-1],
            }
        )
    return found


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """The comparison as Markdown."""
    lines = []
    for kind, found in results.items():
        lines += [
            f"Convergence, {KINDS[kind]}: loss beside that of data parallel 4",
            "",
            "| | steps | last loss | largest difference | data parallel backwards | ratio |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {each['curve']} | {each['steps']} | {each['last_loss']:.4f} | "
            f"{each['largest']:.1e} | {each['yardstick']:.1e} | {each['of_yardstick']:.2f} |"
            for each in found
        ]
        lines.append("")
    return "\n".join(lines)


def draw(path: Path, found: dict[str, dict[str, list[float]]]) -> None:
    """All curves over each other, and their differences from data parallel's, as SVG."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(11, 3.6 * len(found)), layout="constrained")
    grid = figure.subplots(len(found), 2, squeeze=False)
    for (kind, losses), (curves, differences) in zip(found.items(), grid, strict=True):
        base = losses[BASE.name]
        for name, loss in losses.items():
            steps = range(1, len(loss) + 1)
            curves.plot(steps, loss, label=name, linewidth=1)
            if name != BASE.name:
                off = [max(abs(a - b), 1e-9) for a, b in zip(loss, base, strict=False)]
                differences.semilogy(steps, off, label=name, linewidth=0.8)
        curves.set(xlabel="step", ylabel="loss", title=KINDS[kind])
        differences.set(xlabel="step", ylabel="|loss - data parallel's|")
        curves.legend(fontsize=7)
        differences.legend(fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
