"""Every command that a text names begins as the one that was typed, and runs where the user
stands."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment
from uspft.called import VARIABLE, called_as, to_install, to_type
from uspft.commands.arguments import VERBS

COMMAND = re.compile(rf"launch\.sh|\buspft (?:{'|'.join(VERBS)})\b")

# Texts that name the program and are no command to type where the user stands.
OTHERWISE = {
    ("uspft/called.py", "launch.sh"): "the file's own name",
    ("uspft/commands/recipes.py", "./launch.sh"): "what comments of shipped recipes name",
    ("uspft/calibration/fits.py", "# Written by `uspft calibrate`; how well its lines fit:\n#\n"): (
        "who wrote a file"
    ),
    ("uspft/config/loading.py", "write ./launch.sh convert "): (
        "whoever reads a recipe sees no environment"
    ),
}


def texts(source: str) -> list[str]:
    """The strings of a program that are no docstrings."""
    tree = ast.parse(source)
    statements = [n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)]
    strings = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in statements]
    return [node.value for node in strings if isinstance(node.value, str)]


def test_no_text_names_a_command_by_itself() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "uspft").rglob("*.py")}
    found = {
        (name, text)
        for name, path in files.items()
        for text in texts(path.read_text())
        if COMMAND.search(text)
    }
    assert found == set(OTHERWISE) and len(files) > 250


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("print(f'then: ./launch.sh check {name}')", True),
        ("raise E('write uspft export OUT')", True),
        ("def f():\n    'uspft check does it, as launch.sh does.'", False),
        ("X = 1\n'What uspft check prints.'", False),
        ("print('uspft reads it')", False),
    ],
)
def test_a_command_in_a_text_is_seen(source: str, found: bool) -> None:
    assert any(map(COMMAND.search, texts(source))) == found


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """launch.sh as a user types it who stands in a folder beside a project's."""
    (tmp_path / "my folder").mkdir()
    (tmp_path / "a place").symlink_to(ROOT)
    monkeypatch.chdir(tmp_path / "my folder")
    return "../a place/launch.sh"


def test_a_command_is_one_that_a_shell_reads_back(beside: str) -> None:
    words = ["check", "my recipe.yaml", "data.train=[a, b]"]
    assert shlex.split(to_type({VARIABLE: beside}, *words)) == [beside, *words]
    assert to_type({}, "check") == "uspft check"


def test_what_installs_is_launch_sh(beside: str, tmp_path: Path) -> None:
    assert to_install({VARIABLE: beside}) == f"'{beside}' --install"
    for other in ({}, {VARIABLE: "uspft"}, {VARIABLE: str(tmp_path / "link")}):
        launch, install = shlex.split(to_install(other))
        assert (Path(launch), install) == (ROOT / "launch.sh", "--install")


def test_a_program_is_named_as_it_was_typed(
    beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called_as(beside) == f"'{beside}'"
    Path("launch.sh").touch(0o644)
    assert called_as("launch.sh") == "bash launch.sh"
    assert called_as("./launch.sh") == "bash ./launch.sh", "it may not be executed"
    assert called_as("uspft") == "uspft" and called_as("my bin/uspft") == "'my bin/uspft'"
    assert called_as(f"{ROOT}/uspft/__main__.py") == f"{sys.executable} -m uspft"
    (tmp_path / "uspft").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert called_as(f"{tmp_path}/uspft") == "uspft", "found by its name"


@pytest.mark.parametrize("program", [f"{ROOT}/launch.sh", "../a place/launch.sh", "uspft"])
def test_what_is_told_to_type_next_runs_from_there(
    tmp_path: Path, beside: str, program: str
) -> None:
    """A recipe is copied to a folder of the user's; the command that is named then is typed."""
    own = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"

    def run(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line], env=own, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout

    *_, last = run(f"{shlex.quote(program)} recipes quickstart my.yaml").splitlines()
    line = last.rpartition(": ")[2]
    assert shlex.split(line) == [program, "check", "my.yaml"]
    assert f"{shlex.quote(program)} my.yaml" in Path("my.yaml").read_text()
    whole = program == beside  # of the others the beginning is enough
    assert run(line if whole else f"{line} --help").startswith(
        "my.yaml: no problem found" if whole else f"usage: {shlex.quote(program)} "
    )
