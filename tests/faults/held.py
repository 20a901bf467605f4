"""The tests that docs/long-runs.md names beside what can go wrong: how many cases of each pass.

    python -m tests.faults.held [--out FILE]

What was found is kept in tests/faults/held.json, from which the page has its counts. The exit code
is 1 where a case did not pass.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT

FOUND = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs/long-runs.md"
LINE = re.compile(r"^\| (?P<what>.+?) \| (?P<then>.+) \| (?P<held>.+?) \|$", re.M)
TEST = re.compile(r"`(?P<file>tests/\S+?\.py)(?:::(?P<name>\w+))?`")


def lines() -> dict[str, list[str]]:
    """What can go wrong, as the page has it, and the tests and scripts that it names beside it."""
    table = PAGE.read_text().partition("\n## ")[0]
    _, _, *rows = LINE.finditer(table)
    return {row["what"]: [one[0].strip("`") for one in TEST.finditer(row["held"])] for row in rows}


def tests() -> list[str]:
    """The tests that the page names, each once, in its order; scripts are none."""
    named = [name for names in lines().values() for name in names if "::" in name]
    return list(dict.fromkeys(named))


class Counted:
    """A plugin of pytest that counts the cases of each test, and those that pass."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        one = self.found.setdefault(report.nodeid.partition("[")[0], {"passed": 0, "cases": 0})
        one["cases"] += report.when == "setup"
        one["passed"] += report.when == "call" and report.passed


def main() -> int:
    """Run the tests, keep what they found, and return 1 where a case did not pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.held")
    parser.add_argument("--out", type=Path, default=FOUND, metavar="FILE")
    asked, counted = parser.parse_args(), Counted()
    pytest.main(["-q", *tests()], plugins=[counted])
    kept = ",\n".join(f"{json.dumps(test)}: {json.dumps(counted.found[test])}" for test in tests())
    asked.out.write_text(f'{{"tests": {{\n{kept}\n}}}}\n')
    return int(any(one["passed"] != one["cases"] for one in counted.found.values()))


if __name__ == "__main__":
    sys.exit(main())
