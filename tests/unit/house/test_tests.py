"""The rules of the tests: they mirror the package, and use no private name of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODULES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "uspft").rglob("*.py")}
OURS = ("uspft", "benchmarks", "tests", "install")
"""Packages whose private names are nobody else's."""

# Attributes that begin with an underscore and are public all the same.
PUBLIC = {
    "_replace": "the documented way to change a named tuple",
    "_exit": "the documented way to end a process without its handlers",
    "_clear": "of atexit: a command that is forked begins without its parent's handlers",
    "_run_exitfuncs": "of atexit: such a command ends with its own",
    "_EXPERT_PARALLEL_GROUP": "DeepSpeed's own table, which nothing public of it reads",
    "_EXPERT_PARALLEL_GROUP_RANKS": "DeepSpeed's own table, which nothing public of it reads",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS": "DeepSpeed's own table, which nothing public of it reads",
}
# Tests in tests/unit that are about no module of their room.
ELSEWHERE = {
    "tests/unit/model/test_transformers.py": "what all rooms count on in transformers",
    "tests/unit/prepare/test_one_planner.py": "all that asks for layouts has one order of them",
}
OUTSIDE = {"benchmarks", "house", "install"}
"""Rooms of tests/unit that are about the project's files outside the package."""
PATCHING = ("setattr", "getattr", "delattr", "hasattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def imported(node: ast.AST) -> list[str]:
    """The dotted names that an import takes, where they are of this project."""
    found = []
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        found = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] in OURS]


def read(node: ast.AST) -> Iterator[str]:
    """The attributes that an expression names: those of others, and those that are patched."""
    if isinstance(node, ast.Attribute):
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in PATCHING:
        for given in node.args[:2]:
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                yield from given.value.split(".")


def private_names(source: str) -> list[str]:
    """The private names of the project that a file imports, reads or patches."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for name in imported(node):
            found += [name] if any(map(is_private, name.split("."))) else []
        found += [name for name in read(node) if is_private(name) and name not in PUBLIC]
    return found


def misplaced(name: str, modules: Collection[str]) -> str:
    """What a file of tests/unit should be and is not; "" where it is in its place."""
    room, _, file = name.removeprefix("tests/unit/").rpartition("/")
    room = f"uspft/{room}/" if room else "uspft/"
    if not any(module.startswith(room) for module in modules):
        return f"there is no folder {room}"
    if file == "conftest.py":
        return ""
    if not file.startswith("test_"):
        return "is no test; what tests share is in tests/support"
    module = room + file.removeprefix("test_")
    return "" if module in modules else f"there is no {module}"


def mirrors() -> list[str]:
    names = [path.relative_to(ROOT).as_posix() for path in TESTS]
    unit = [name for name in names if name.startswith("tests/unit/")]
    return [name for name in unit if name.split("/")[2] not in OUTSIDE]


def test_the_tests_are_found() -> None:
    rooms = {name.split("/")[2] for name in mirrors()}
    folders = [path.name for path in (ROOT / "tests/unit").iterdir() if any(path.rglob("*.py"))]
    here = {room for room in rooms if not room.endswith(".py")}
    assert set(folders) > OUTSIDE and here == set(folders) - OUTSIDE
    assert len(here) >= 15
    assert len(mirrors()) >= 60 and Path(__file__).resolve() in TESTS


def test_every_test_is_where_its_module_is() -> None:
    found = {name: misplaced(name, MODULES) for name in mirrors() if name not in ELSEWHERE}
    assert {name: told for name, told in found.items() if told} == {}


def test_what_the_suite_names_is_there() -> None:
    named = re.findall(r"tests/[\w/.]+", (ROOT / "tests/run.sh").read_text())
    assert len(named) >= 5 and [name for name in named if not (ROOT / name).exists()] == []


def test_no_test_uses_a_private_name() -> None:
    found = {path: private_names(path.read_text()) for path in TESTS}
    assert {path.as_posix(): told for path, told in found.items() if told} == {}


def test_exceptions_are_few_and_needed() -> None:
    sources = [path.read_text() for path in TESTS]
    every = {name for text in sources for node in ast.walk(ast.parse(text)) for name in read(node)}
    assert PUBLIC.keys() <= every, "an exception that nothing needs any more"
    assert all(misplaced(name, MODULES) for name in ELSEWHERE)
    assert ELSEWHERE.keys() <= set(mirrors())
    reasons = [*PUBLIC.values(), *ELSEWHERE.values()]
    assert len(reasons) <= 10 and all(len(reason.split()) >= 4 for reason in reasons)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("from uspft.data.rows.loader import a, _b", ["uspft.data.rows.loader._b"]),
        ("import uspft._a.b", ["uspft._a.b"]),
        ("from uspft._a import b", ["uspft._a.b"]),
        ("from benchmarks.a import _b as b", ["benchmarks.a._b"]),
        ("x = loader.stream._plans[0]", ["_plans"]),
        ("loader()._row(1)", ["_row"]),
        ("loader._x = 1", ["_x"]),
        ("monkeypatch.setattr(loader, '_row', None)", ["_row"]),
        ("monkeypatch.setattr('uspft.data.rows.loader._row', None)", ["_row"]),
        ("from torch.utils._pytree import tree_map\nimport _signal", []),
        ("self._x = case._replace(y=cls._z).__class__", []),
        ("monkeypatch.setattr(loader, 'row', '_x')", []),
    ],
)
def test_a_private_name_is_seen(source: str, told: list[str]) -> None:
    assert private_names(source) == told


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tests/unit/kernels/test_merge.py", ""),
        ("tests/unit/test_mesh.py", ""),
        ("tests/unit/kernels/conftest.py", ""),
        ("tests/unit/kernels/test_kernels.py", "there is no uspft/kernels/kernels.py"),
        ("tests/unit/test_merge.py", "there is no uspft/merge.py"),
        ("tests/unit/other/test_merge.py", "there is no folder uspft/other/"),
        ("tests/unit/kernels/shared.py", "is no test; what tests share is in tests/support"),
    ],
)
def test_a_test_in_another_place_is_seen(name: str, told: str) -> None:
    assert misplaced(name, {"uspft/mesh.py", "uspft/kernels/merge.py"}) == told
