"""The rules of the house that no tool checks: sizes, names, and where the environment is read.

Sizes are the package's alone. The other rules hold for tests too; only the environment is theirs to
read.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from uspft.config.algorithms import CONTEXT, WHOLE

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted([*(ROOT / "uspft").rglob("*.py"), ROOT / "install.py"])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
EVERY = [*FILES, *TESTS]

MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80
LONG_FILE_LINES = 350
"""From here on a file is worth a look for a second idea, which is advice and no fault."""

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
# Each with a letter in brackets: this file must not hold them either.
FORBIDDEN_WORDS = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X|NotImplemented[E]rror)\b")
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


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function with its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{prefix}{child.name}", child
            yield from functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        else:
            yield from functions(child, prefix)


def too_large(name: str, source: str) -> dict[str, int]:
    """Return the lines of a file and of its functions that break a size rule, by their names."""
    found = {}
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        found[name] = lines
    for function, node in functions(ast.parse(source)):
        start = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
        lines = (node.end_lineno or start) - start + 1
        if lines > MAX_FUNCTION_LINES:
            found[f"{name}:{function}"] = lines
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


def test_files_and_their_functions_are_small() -> None:
    sources = {name_of(path): path.read_text() for path in FILES}
    for name, source in sources.items():
        if (lines := len(source.splitlines())) > LONG_FILE_LINES:
            warnings.warn(f"{name} has {lines} lines: is there a second idea in it?", stacklevel=1)
    every = [too_large(name, source) for name, source in sources.items()]
    assert {name: lines for found in every for name, lines in found.items()} == {}


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
    body = "    pass\n" * 79
    source = f"class C:\n  def f(self):\n{body}  def g(self):\n{body}    pass\n" + "\n" * 440
    assert too_large("uspft/a.py", source) == {"uspft/a.py:C.g": 81, "uspft/a.py": 602}


def test_the_launcher_and_tests_may_read_the_environment() -> None:
    source = "import os\nx = os.environ['X']"
    allowed = ("uspft/__main__.py", "uspft/commands/a.py", "uspft/launcher/a.py", "tests/a.py")
    for name in allowed:
        assert "line 2: the environment is read" not in broken_rules(name, source)


def told_of_algorithms(name: str, source: str) -> set[str]:
    """Where a file names an algorithm's recipe value, or imports its class, though the table and
    the algorithm's own file alone may."""
    found = set()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for row in [*CONTEXT.values(), WHOLE]:
        module, _, cls = row.code.partition(":")
        if name in ("uspft/config/algorithms.py", f"{module.replace('.', '/')}.py"):
            continue
        if row is not WHOLE and re.search(rf"\b{row.name}\b", source):
            found.add(row.name)
        for node in imports:
            if node.module == module:
                found |= {alias.name for alias in node.names if alias.name == cls}
    return found


def test_the_table_alone_lists_algorithms() -> None:
    found = {name_of(path): told_of_algorithms(name_of(path), path.read_text()) for path in FILES}
    assert {name: told for name, told in found.items() if told} == {}


def test_a_file_that_lists_algorithms_is_seen() -> None:
    lists = 'if algorithm == "planned_cp":\n    from uspft.sequence.usp import Usp\n'
    assert told_of_algorithms("uspft/layout.py", lists) == {"planned_cp", "Usp"}
    assert told_of_algorithms("uspft/config/algorithms.py", lists) == set()
    assert told_of_algorithms("uspft/sequence/planned.py", lists) == {"Usp"}


def bearers(files: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """By name of a public class or alias, where it is defined."""
    found: dict[str, set[str]] = {}
    for name, source in files:
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
    assert {word: sorted(where) for word, where in every.items() if len(where) > 1} == {}


def test_two_things_of_one_name_are_seen() -> None:
    files = [("uspft/a/plan.py", "class Run: ..."), ("uspft/b/plan.py", "Run = tuple[int, int]")]
    twice = {word for word, where in bearers(files).items() if len(where) > 1}
    assert twice == {"Run"}
