"""No two files of the package import each other, whether directly or through others.

The import contract orders rooms; this holds inside rooms too, and for imports inside functions and
under TYPE_CHECKING: where files know each other, neither can be read first.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def sources() -> dict[str, str]:
    """The package's files by the names under which they are imported."""
    found = {}
    for path in sorted((ROOT / "uspft").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports(source: str, modules: Set[str]) -> set[str]:
    """Those of the modules that a source imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "an import is written with its whole name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
    return found & modules


def circles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """The sets of modules each of which reaches every other one; sorted."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        found, waiting = set[str](), [module]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        reached[module] = found
    together = [{two for two in reached[one] if one in reached[two]} for one in graph]
    return {tuple(sorted(each)) for each in together if each}


def graph_of(files: Mapping[str, str]) -> dict[str, set[str]]:
    return {name: imports(source, files.keys()) - {name} for name, source in files.items()}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return graph_of(sources())


def test_the_imports_are_found(graph: dict[str, set[str]]) -> None:
    assert len(graph) >= 250 and sum(map(len, graph.values())) >= 1000
    assert "uspft.commands.plan" in graph["uspft.commands.arguments"], "inside a function"
    assert "uspft.batch" in graph["uspft.engine.step"], "under TYPE_CHECKING"


def test_no_files_import_each_other(graph: dict[str, set[str]]) -> None:
    assert circles(graph) == set()


@pytest.mark.parametrize(
    "second",
    [
        "import uspft.a",
        "from uspft.a import x",
        "from uspft import a",
        "def f():\n    from uspft.a import x",
        "if TYPE_CHECKING:\n    from uspft.a import X",
        "from uspft.c import x",
    ],
)
def test_a_circle_is_seen(second: str) -> None:
    files = {
        "uspft": "",
        "uspft.a": "from uspft.b import y",
        "uspft.b": second,
        "uspft.c": "from uspft.a import x" if "uspft.c" in second else "import os",
        "uspft.d": "from uspft import a, c\nfrom uspft.b import y",
    }
    here = ("uspft.a", "uspft.b", *(["uspft.c"] if "uspft.c" in second else []))
    assert circles(graph_of(files)) == {here}
    assert circles(graph_of({**files, "uspft.b": "import sys"})) == set()
