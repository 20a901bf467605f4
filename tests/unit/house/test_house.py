"""The rules of the house that no tool checks: sizes, names, and where the environment is read.

Sizes and rules hold for tests too; only the environment is theirs to read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from uspft.config.algorithms import CONTEXT, WHOLE

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted([*(ROOT / "uspft").rglob("*.py"), ROOT / "install.py"])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
EVERY = [*FILES, *TESTS]

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_POSITIONAL = 300, 60, 5

# What is larger than the rules say: ten at most, each with its reason.
EXCEPTIONS: dict[str, str] = {
    "install.py": "runs where nothing is installed, from one file that finds no other",
}

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
# Each with a letter in brackets: this file must not hold them either.
FORBIDDEN_WORDS = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X|NotImplemented[E]rror)\b")
READS_ENVIRONMENT = ("__main__.py", "commands/", "launcher/")

# Where one word is one thing seen from two rooms: what a command is called, and what it does.
MANY: dict[str, list[str]] = {}

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
    reads = name == "install.py" or name.startswith("tests/")
    reads = reads or name.removeprefix("uspft/").startswith(READS_ENVIRONMENT)
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        elif not reads and is_environment(node):
            found.append(f"line {node.lineno}: the environment is read")
    defines = any(isinstance(node, Function | ast.ClassDef) for node in nodes)
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


def test_the_tests_are_found() -> None:
    names = {name_of(path) for path in TESTS}
    assert {"tests/conftest.py", "tests/support/ranks.py", "tests/unit/test_mesh.py"} <= names
    assert name_of(Path(__file__)) in names
    rooms = [path for path in (ROOT / "tests").iterdir() if any(path.rglob("*.py"))]
    found = {path.relative_to(ROOT / "tests").parts[0] for path in TESTS}
    assert found == {room.name for room in rooms} | {"__init__.py", "conftest.py"}
    assert len(TESTS) == len(names) > len(found) >= 8


def test_every_file_keeps_the_rules() -> None:
    found = {name_of(path): broken_rules(name_of(path), path.read_text()) for path in EVERY}
    assert {name: told for name, told in found.items() if told} == {}


@pytest.fixture(scope="module")
def large() -> dict[str, str]:
    """What breaks a size rule, exceptions among it."""
    every = [too_large(name_of(path), path.read_text()) for path in EVERY]
    return {name: size for found in every for name, size in found.items()}


def test_files_and_their_functions_are_small(large: dict[str, str]) -> None:
    assert {name: size for name, size in large.items() if name not in EXCEPTIONS} == {}


def test_exceptions_are_few_and_needed(large: dict[str, str]) -> None:
    assert len(EXCEPTIONS) <= 10
    assert set(EXCEPTIONS) <= set(large), "an exception that nothing needs any more"
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
        ("tests/unit/test_a.py", "def f(): pass", "no `from __future__ import annotations`"),
        ("tests/support/helpers.py", "", "a room called helpers"),
        ("tests/a.py", "def f():\n    global x\n    x = 1", "line 2: global x"),
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


def test_the_launcher_and_tests_may_read_the_environment() -> None:
    source = "import os\nx = os.environ['X']"
    allowed = ("uspft/__main__.py", "uspft/commands/a.py", "uspft/launcher/a.py", "tests/a.py")
    for name in allowed:
        assert "line 2: the environment is read" not in broken_rules(name, source)


def told_of_algorithms(name: str, source: str) -> list[str]:
    """Where a file names an algorithm's recipe value, or imports its class, though the table and
    the algorithm's own file alone may."""
    found = []
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for row in [*CONTEXT.values(), WHOLE]:
        module, _, cls = row.code.partition(":")
        if name in ("uspft/config/algorithms.py", f"{module.replace('.', '/')}.py"):
            continue
        if row is not WHOLE and re.search(rf"\b{row.name}\b", source):
            found.append(row.name)
        for node in imports:
            if node.module == module:
                found += [alias.name for alias in node.names if alias.name == cls]
    return found


def test_the_table_alone_lists_algorithms() -> None:
    found = {name_of(path): told_of_algorithms(name_of(path), path.read_text()) for path in FILES}
    assert {name: told for name, told in found.items() if told} == {}


def test_a_file_that_lists_algorithms_is_seen() -> None:
    lists = 'if algorithm == "ring_cp":\n    from uspft.sequence.whole import Whole\n'
    assert told_of_algorithms("uspft/layout.py", lists) == ["ring_cp", "Whole"]
    assert told_of_algorithms("uspft/config/algorithms.py", lists) == []
    assert told_of_algorithms("uspft/sequence/ring.py", lists) == ["Whole"]


def bearers(files: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """By name of a public class or alias, or of a file, where it is defined."""
    found: dict[str, set[str]] = {}
    for name, source in files:
        stem = Path(name).stem
        if stem not in ("__init__", "__main__"):
            found.setdefault(stem, set()).add(name)
        for node in ast.parse(source).body:
            defined = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                defined = [one for one in names if one[0].isupper() and not one.isupper()]
            for one in defined:
                if not one.startswith("_"):
                    found.setdefault(one, set()).add(name)
    return found


def test_a_word_names_one_thing() -> None:
    every = bearers((name_of(path), path.read_text()) for path in FILES)
    assert {word: sorted(where) for word, where in every.items() if len(where) > 1} == MANY


def test_two_things_of_one_name_are_seen() -> None:
    files = [("uspft/a/plan.py", "class Run: ..."), ("uspft/b/plan.py", "Run = tuple[int, int]")]
    twice = {word for word, where in bearers(files).items() if len(where) > 1}
    assert twice == {"plan", "Run"}
