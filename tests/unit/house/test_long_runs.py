"""What can go wrong in a long run, by docs/long-runs.md, is held by tests that exist and passed."""

from __future__ import annotations

import json

import pytest

from tests.faults import held
from tests.support.launch import ROOT


def missing(name: str) -> str:
    """What of a test or script does not exist; "" where it does."""
    file, _, test = name.partition("::")
    place = ROOT / file
    if not place.is_file():
        return file
    return "" if not test or f"\ndef {test}(" in place.read_text() else name


def test_each_line_names_tests_that_exist() -> None:
    lines = held.lines()
    assert len(lines) >= 17
    for what, names in lines.items():
        assert [name for name in names if "::" in name], f"{what}: no test holds it"
        assert [wrong for name in names if (wrong := missing(name))] == [], what


def test_each_was_counted_and_passed() -> None:
    counted = json.loads(held.FOUND.read_text())["tests"]
    assert list(counted) == held.tests(), "python -m tests.faults.held"
    assert [name for name, one in counted.items() if not 0 < one["passed"] == one["cases"]] == []


@pytest.mark.parametrize("name", ["tests/none.py", "tests/faults/test_kills.py::test_none"])
def test_what_does_not_exist_is_told(name: str) -> None:
    assert missing(name) == name
