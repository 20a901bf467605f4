"""What the package defines, the package uses: what tests or benchmarks alone ask for is theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [path.read_text() for path in sorted((ROOT / "uspft").rglob("*.py"))]
OFFERED = {"document_sums": "docs/step.md offers it to those who write an objective"}
BY_NAME = "convert_"
"""The beginning of names that are put together: one for each tool that `convert` knows."""


def unused(sources: Iterable[str]) -> set[str]:
    """The functions and classes of some files whose name none of these files has in its code."""
    defined, used = set[str](), set[str]()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Module):
            kinds = (ast.FunctionDef, ast.ClassDef)
            defined |= {one.name for one in node.body if isinstance(one, kinds)}
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.alias) and node.asname:
            used.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value.rpartition(":")[2])  # module:Class, in a table
    return {name for name in defined - used if not name.startswith(BY_NAME)}


def test_what_is_defined_is_used() -> None:
    assert len(SOURCES) > 250
    assert unused(SOURCES) == set(OFFERED)


def test_what_tests_alone_use_is_seen() -> None:
    uses = "from uspft.a import f\n\nclass A:\n    x = f()\n\nCODE = 'uspft.b:A'"
    assert unused(["def f(): ...\n\ndef g(): ...", uses]) == {"g"}
    assert unused(["def f(): ...", uses.replace("f()", "1").replace(":A", "")]) == {"f", "A"}
