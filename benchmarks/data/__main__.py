"""Conversations made into tokens on all cores: `uspft preprocess` against `datasets.map`.

    python -m benchmarks.data [--conversations 20000] [--turns 3] [--runs 3] [--out DIR]
                              [--kinds jsonl,json,parquet] [--templates marked,unmarked]

Both sides read the same file with the same tokenizer and template, and their token ids must be the
same; their runs take turns, so that what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import yaml

from benchmarks.data.case import KINDS, TEMPLATES, TOKENIZER, Case, Measured, digest_of
from benchmarks.data.figures import ENOUGH, OURS, THEIRS, record, table
from benchmarks.lab import results
from benchmarks.lab.machine import circumstances


def main() -> int:
    """The benchmark measures, prints and writes; 1 where a case's tokens differ."""
    words = _words()
    processes = len(os.sched_getaffinity(0))
    cases = results.read(words.out, "data").get("cases", {})
    for kind, template in product(words.kinds.split(","), words.templates.split(",")):
        with tempfile.TemporaryDirectory(prefix="data-") as folder:
            case = Case(words.conversations, words.turns, kind, template, Path(folder))
            case.make()
            found = []
            for number in range(words.runs):
                found.append(ours(case, Path(folder, f"ours-{number}")))
                found.append(theirs(case, processes, Path(folder, f"theirs-{number}")))
                print(
                    kind, template, *(f"{run.rate:,.0f} tokens/s" for run in found[-2:]), flush=True
                )
            cases[f"{kind}, {template}"] = record(found, case, processes)
    result = {**circumstances(), "enough": ENOUGH, "cases": cases}
    print(f"\n{table(cases)}\n")
    print(f"written: {results.write(words.out, 'data', result)}")
    differ = [name for name, case in cases.items() if not case["same_tokens"]]
    if differ:
        print(f"the two sides made different tokens: {'; '.join(differ)}")
    return 1 if differ else 0


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data")
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=3, help="the most questions of a conversation")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side, taking turns")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of files")
    parser.add_argument("--templates", default=",".join(TEMPLATES))
    parser.add_argument("--out", type=Path, default=results.RESULTS)
    return parser.parse_args()


def ours(case: Case, folder: Path) -> Measured:
    """This runs the command that a user types, with a cache of its own."""
    folder.mkdir()
    cache = folder / "cache"
    recipe = {
        "output_dir": str(folder / "out"),
        "model": {
            "config": str(results.ROOT / "configs" / "models" / "quickstart.json"),
            "tokenizer": str(TOKENIZER),
            "dtype": "float32",
        },
        "data": {
            "train": str(case.data),
            "chat_template": str(case.jinja),
            "sequence_length": 4096,
            "overlong": "split",
            "cache_dir": str(cache),
        },
        "training": {"steps": 1, "global_batch_size": 1},
        "launch": {"device": "cpu"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    whole = _seconds([sys.executable, "-m", "uspft", "preprocess", str(path)])
    from uspft.data.corpus.corpus import Corpus

    (place,) = {report.parent for report in cache.rglob("report.json")}
    corpus = Corpus.open(place)
    report = json.loads((place / "report.json").read_text())
    digest = digest_of(corpus.sample(i).ids for i in range(len(corpus)))
    return Measured(OURS, report["seconds"], whole, report["tokens"], digest)


def theirs(case: Case, processes: int, folder: Path) -> Measured:
    """This runs the other side as a program, with a cache of its own."""
    folder.mkdir()
    words = [str(case.data), str(case.jinja), str(processes), str(folder)]
    whole = _seconds([sys.executable, "-m", "benchmarks.data.datasets_map", *words])
    found = json.loads((folder / "measured.json").read_text())
    return Measured(THEIRS, found["seconds"], whole, found["tokens"], found["digest"])


def _seconds(words: list[str]) -> float:
    """This runs a command and returns its wall time; raises RuntimeError with what it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    done = subprocess.run(
        words, cwd=results.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:4])}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - begin


if __name__ == "__main__":
    raise SystemExit(main())
