"""Brings figures into the pages that show them.

    .venv/bin/python -m benchmarks.pages [--check]

A page has a figure between two lines, `<!-- figures: FILE, NAME -->` and `<!-- end -->`. It is made
of `results/FILE.json` by the benchmark that wrote it, or where FILE is `program`, of what the
program itself predicts (`predictions.py`). With --check nothing is written, and the exit code is 1
where a page says something else.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import faults, predictions
from benchmarks.attention import overview as attention
from benchmarks.card import figures as card
from benchmarks.convergence import comparison as convergence
from benchmarks.data import figures as data
from benchmarks.experts import figures as experts
from benchmarks.lab.results import RESULTS, ROOT, read
from benchmarks.linear import figures as linear
from benchmarks.linear.hosts import figures as linear_hosts
from benchmarks.memory import report as memory
from benchmarks.meshslice import report as meshslice
from benchmarks.meshslice.hosts import report as meshslice_hosts
from benchmarks.orders import figures as orders
from benchmarks.pipelines import report as pipelines
from benchmarks.planning import report as planning
from benchmarks.planning.hosts import figures as planning_hosts
from benchmarks.planning.speed import figures as planning_speed
from benchmarks.saving import figures as saving
from benchmarks.step import figures as step
from benchmarks.switching import report as switching
from benchmarks.switching.simulation import report as simulation

PROGRAM = "program"
MAKERS: Mapping[str, Callable[[Any], dict[str, str]]] = {
    "attention": attention.figures,
    "card": card.figures,
    "convergence": convergence.figures,
    "cut_off": faults.cut_off,
    "data": data.figures,
    "experts": experts.figures,
    "held": faults.held,
    "kills": faults.kills,
    "linear": linear.figures,
    "linear-hosts": linear_hosts.figures,
    "memory": memory.figures,
    "meshslice": meshslice.figures,
    "meshslice-hosts": meshslice_hosts.figures,
    "orders": orders.figures,
    "pipelines": pipelines.figures,
    "planning": planning.figures,
    "planning-hosts": planning_hosts.figures,
    "planning-speed": planning_speed.figures,
    "saving": saving.figures,
    "step": step.figures,
    "switching": switching.figures,
    "switching-simulation": simulation.figures,
    PROGRAM: predictions.figures,
}
"""What makes the figures of each file."""
ELSEWHERE = dict.fromkeys(("cut_off", "held", "kills"), faults.FOLDER)
"""The folders of files that are no benchmark's."""
FIGURE = re.compile(r"^<!-- figures: (.+?), (.+?) -->\n(.*?)^<!-- end -->$", re.M | re.S)


@cache
def figures(file: str) -> dict[str, str]:
    """Return the figures of a file of results, or of the program, by name. Raises KeyError where
    there is no such file."""
    return MAKERS[file](read(ELSEWHERE.get(file, RESULTS), file))


def pages() -> list[Path]:
    """Return the pages that may show figures."""
    found = [ROOT / "README.md", ROOT / "uspft" / "model" / "README.md"]
    found += sorted((ROOT / "docs").glob("*.md"))
    return [*found, ROOT / "benchmarks" / "README.md", RESULTS / "README.md"]


def remade(text: str) -> str:
    """Return a page's text with its figures as they are now. Raises KeyError for one that nobody
    makes."""

    def made(match: re.Match[str]) -> str:
        file, name = match[1], match[2]
        return f"<!-- figures: {file}, {name} -->\n{figures(file)[name]}\n<!-- end -->"

    return FIGURE.sub(made, text)


def main(words: list[str]) -> int:
    """The command writes the pages whose figures have changed, or names them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, code = parser.parse_args(words).check, 0
    for page in pages():
        text = page.read_text()
        if (now := remade(text)) == text:
            continue
        print(f"{page.relative_to(ROOT)}: {'differs' if check else 'written'}")
        code = int(check)
        if not check:
            page.write_text(now)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
