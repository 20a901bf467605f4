"""The README's table names every algorithm, and what it says beside it is so."""

from __future__ import annotations

import re
from pathlib import Path

from uspft.sequence import ALGORITHMS

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_table_is_the_registry() -> None:
    rows = re.findall(r"^\| (?:`(\w+)`|– \(`context_parallel: 1`\)) \|.*\| (\S+) \|$", README, re.M)
    found = {name or "whole": megatron for name, megatron in rows if name != "auto"}
    assert found == {name: cls.megatron_name for name, cls in ALGORITHMS.items()}
    assert len(found) == 6
