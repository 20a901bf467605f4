"""CPU seconds and memory of the command `plan` for a model of 405B on thousands of ranks.

    .venv/bin/python -m benchmarks.planning.speed [--out DIR]

It takes a minute. CPU seconds are those of the whole process, from its start.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab.machine import circumstances
from benchmarks.lab.results import RESULTS, ROOT, write
from benchmarks.lab.tables import as_tokens, markdown

MODEL = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
"""The sizes of Llama-3.1-405B."""
RECIPE = """
model: {{config: {config}, tokenizer: org/name}}
data: {{train: org/data, format: text}}
parallel_config: {{model_parallel: 8, context_parallel: 8, context_parallel_algo: ulysses_cp}}
deepspeed: {{zero_optimization: {{stage: 3}}}}
training: {{steps: 1}}
launch: {{device: cuda, hardware: h100}}
"""
ROWS = ((1 << 13, 2048), (1 << 17, 512), (1 << 20, 64))
CASES = (*((ranks, *rows) for ranks in (256, 4096) for rows in ROWS), (65536, 1 << 17, 4096))
"""Ranks, tokens of a row, and rows of a step."""
HEADS = ("ranks", "rows of a step", "layouts", "CPU s", "memory MiB")


def measured(recipe: Path, ranks: int, tokens: int, rows: int) -> dict[str, Any]:
    """Return what one command took."""
    words = [sys.executable, "-m", "uspft", "plan", str(recipe), "--ranks", str(ranks)]
    words += [f"data.sequence_length={tokens}", f"training.global_batch_size={rows}"]
    with tempfile.TemporaryFile("w+") as page:
        child = subprocess.Popen(words, stdout=page, cwd=ROOT, env=os.environ)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {child.returncode}")
        page.seek(0)
        printed = page.read()
    more = re.search(r"^and (\d+) more", printed, re.M)
    table = printed.split("\nlayout ")[1].split("\nand ")[0]
    return {
        "ranks": ranks,
        "tokens": tokens,
        "rows": rows,
        "layouts": len(table.splitlines()) - 1 + int(more[1] if more else 0),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "memory_bytes": usage.ru_maxrss * 1024,
    }


def speed_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each command."""
    rows = [
        [
            f"{run['ranks']:,}",
            f"{run['rows']} × {as_tokens(run['tokens'])}",
            f"{run['layouts']:,}",
            f"{run['cpu_seconds']:.1f}",
            f"{run['memory_bytes'] / (1 << 20):.0f}",
        ]
        for run in runs
    ]
    return markdown(HEADS, rows, left=0)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of planning-speed.json, by name, as Markdown."""
    return {"speed": speed_table(result["runs"])}


def main() -> None:
    """Plan every case, write what that took, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning.speed")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        config, recipe = Path(aside, "config.json"), Path(aside, "recipe.yaml")
        config.write_text(json.dumps(MODEL))
        recipe.write_text(RECIPE.format(config=config))
        runs = [measured(recipe, *case) for case in CASES]
    path = write(asked.out, "planning-speed", {**circumstances(), "runs": runs})
    print(speed_table(runs))
    print(path)


if __name__ == "__main__":
    main()
