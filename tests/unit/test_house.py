"""The rules of the house that no tool checks: sizes, names, and where the environment is read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "uspft").rglob("*.py"), ROOT / "install.py"])

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_POSITIONAL = 300, 60, 5

# What is larger than the rules say: ten at most, each with its reason.
EXCEPTIONS: dict[str, str] = {}

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
FORBIDDEN_WORDS = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
READS_ENVIRONMENT = ("__main__.py", "commands/", "launcher/")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_environment(node: ast.AST) -> bool:
    """Tell whether an expression or import reads the process's environment."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id == "os" and node.attr in ("environ", "environb", "getenv", "putenv")
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(
            alias.name in ("environ", "environb", "getenv", "putenv") for alias in node.names
        )
    return False


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function, int]]:
    """Yield every function with its dotted name and the number of its positional arguments."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            marks = {getattr(mark, "id", "") for mark in child.decorator_list}
            given = child.args.posonlyargs + child.args.args
            bound = isinstance(node, ast.ClassDef) and "staticmethod" not in marks
            # autograd hands everything to `forward` by position.
            by_autograd = isinstance(node, ast.ClassDef) and any(
                "Function" in ast.unparse(base) for base in node.bases
            )
            yield f"{prefix}{child.name}", child, 0 if by_autograd else len(given) - bound
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        else:
            yield from functions(child, prefix)


def too_large(name: str, source: str) -> dict[str, str]:
    """Return what breaks a size rule, by the name an exception would have."""
    found = {}
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        found[name] = f"{lines} lines"
    for function, node, positional in functions(ast.parse(source)):
        start = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
        lines = (node.end_lineno or start) - start + 1
        if lines > MAX_FUNCTION_LINES:
            found[f"{name}:{function}"] = f"{lines} lines"
        elif positional > MAX_POSITIONAL:
            found[f"{name}:{function}"] = f"{positional} positional arguments"
    return found


def broken_rules(name: str, source: str) -> list[str]:
    """Return the rules, other than sizes, that a file breaks."""
    found = [
        f"line {n}: {word[0]}"
        for n, text in enumerate(source.splitlines(), 1)
        if (word := FORBIDDEN_WORDS.search(text))
    ]
    parts = set(Path(name).with_suffix("").parts)
    found += [f"a room called {part}" for part in sorted(parts & FORBIDDEN_NAMES)]
    reads = name == "install.py" or name.removeprefix("uspft/").startswith(READS_ENVIRONMENT)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        elif not reads and is_environment(node):
            found.append(f"line {node.lineno}: the environment is read")
    defines = any(isinstance(node, Function | ast.ClassDef) for node in ast.walk(ast.parse(source)))
    if defines and "from __future__ import annotations" not in source:
        found.append("no `from __future__ import annotations`")
    return found


def test_the_files_are_found() -> None:
    names = {name_of(path) for path in FILES}
    assert {"install.py", "uspft/launcher/supervise.py", "uspft/launcher/watch.py"} <= names
    rooms = [
        path for path in (ROOT / "uspft").iterdir() if any(path.rglob("*.py")) or path.is_file()
    ]
    assert len({path.relative_to(ROOT / "uspft").parts[0] for path in FILES[1:]}) == len(
        [room for room in rooms if room.name != "__pycache__"]
    )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_keeps_the_rules(path: Path) -> None:
    assert broken_rules(name_of(path), path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_and_its_functions_are_small(path: Path) -> None:
    large = too_large(name_of(path), path.read_text())
    assert {name: size for name, size in large.items() if name not in EXCEPTIONS} == {}


def test_exceptions_are_few_and_needed() -> None:
    assert len(EXCEPTIONS) <= 10
    large = {name for path in FILES for name in too_large(name_of(path), path.read_text())}
    assert set(EXCEPTIONS) <= large, "an exception that nothing needs any more"
    assert all(len(reason.split()) >= 4 for reason in EXCEPTIONS.values())


@pytest.mark.parametrize(
    ("name", "source", "told"),
    [
        ("uspft/a.py", "import os\nx = os.environ['X']", "line 2: the environment is read"),
        ("uspft/a.py", "from os import getenv", "line 1: the environment is read"),
        ("uspft/a.py", "def f():\n    global x\n    x = 1", "line 2: global x"),
        ("uspft/a.py", "# FIX" + "ME: later", "line 1: FIX" + "ME"),
        ("uspft/utils.py", "", "a room called utils"),
        ("uspft/helpers/a.py", "", "a room called helpers"),
        ("uspft/a.py", "def f(): pass", "no `from __future__ import annotations`"),
    ],
)
def test_a_broken_rule_is_seen(name: str, source: str, told: str) -> None:
    assert told in broken_rules(name, source)


def test_what_is_too_large_is_seen() -> None:
    body = "    pass\n" * 61
    source = f"class C:\n  def f(self):\n{body}\ndef g(a, b, c, d, e, f): pass\n" + "\n" * 300
    source += "def h(a, b, c, d, e, *, f): pass\nclass D:\n  def k(self, a, b, c, d, e): pass\n"
    source += "class E(torch.autograd.Function):\n  def forward(ctx, a, b, c, d, e, f): pass\n"
    found = too_large("uspft/a.py", source)
    assert set(found) == {"uspft/a.py", "uspft/a.py:C.f", "uspft/a.py:g"}


def test_the_launcher_may_read_the_environment() -> None:
    source = "import os\nx = os.environ['X']"
    for name in ("uspft/__main__.py", "uspft/commands/a.py", "uspft/launcher/a.py"):
        assert "line 2: the environment is read" not in broken_rules(name, source)
