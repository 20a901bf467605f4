"""A recipe that is good, what makes it wrong, and what every refusal owes the user."""

from __future__ import annotations

import copy
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT, environment, in_project

LINE = re.compile(r"(?P<where>command line|.+?:\d+): (?P<key>[^:]*): (?P<what>.+?); (?P<remedy>.+)")


@dataclass(frozen=True)
class Refused:
    """What was said, each line once; place[key] is the line of the recipe that it named."""

    lines: list[str]
    recipe: Path

    def about(self, key: str, *words: str) -> str:
        """The one line about a key, which holds these words and names the key's own line."""
        found = [line for line in self.lines if f": {key}: " in line]
        assert len(found) == 1, self.lines
        (line,) = found
        match = LINE.fullmatch(line)
        assert match, line
        assert [word for word in words if word not in line] == [], line
        if match["where"].startswith(f"{self.recipe}:"):
            number = int(match["where"].rpartition(":")[2])
            stands = self.recipe.read_text().splitlines()[number - 1]
            names = re.findall(r"\w+", key)
            item = "[" in key and stands.lstrip().startswith("- ")
            named = item or any(f"{name}:" in stands for name in names)
            assert number == 1 or named, (line, stands)
        return line


@dataclass
class Ground:
    """A folder to start from, and the recipe in it; nothing may appear there."""

    folder: Path
    recipe: dict[str, Any]
    started: list[Any] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "recipe.yaml"

    def write(self, changes: Mapping[str, Any], more: str = "") -> None:
        """The good recipe with `key.path: value` changes (None takes the key out), as YAML."""
        tree = copy.deepcopy(self.recipe)
        for key, value in changes.items():
            *above, last = key.split(".")
            node = tree
            for name in above:
                node = node.setdefault(name, {})
            node[last] = value
            if value is None:
                del node[last]
        self.path.write_text(yaml.safe_dump(tree, sort_keys=False) + more)

    def listing(self) -> set[str]:
        return {str(path) for path in self.folder.rglob("*")}

    def started_as(self, run: Callable[[], tuple[int, str, str]]) -> Refused:
        """Run a command that must be refused."""
        before, project = self.listing(), in_project()
        code, out, err = run()
        assert code == 2, (code, out, err)
        assert "Traceback" not in out + err and "Warning" not in out + err, out + err
        assert self.listing() == before, "something was written"
        assert in_project() == project, "something was written"
        assert not self.started, "ranks were started"
        assert err.strip(), out
        return Refused(err.rstrip("\n").split("\n"), self.path)

    def launch(self, *words: str, **variables: str) -> Refused:
        """Refused by launch.sh, started as a user starts it."""

        def run() -> tuple[int, str, str]:
            own = environment(XDG_CACHE_HOME=str(self.folder.parent / "cache"), **variables)
            # A folder that is no recipe's: what a run leaves would be found.
            done = subprocess.run(
                [str(ROOT / "launch.sh"), *(words or [str(self.path)])],
                cwd=self.folder,
                env=own,
                capture_output=True,
                text=True,
                timeout=HANG_SECONDS,
                check=False,
            )
            return done.returncode, done.stdout, done.stderr

        return self.started_as(run)

    def call(self, capsys: pytest.CaptureFixture[str], *words: str) -> Refused:
        """Refused by the same program, in this process."""
        from uspft.__main__ import main

        def run() -> tuple[int, str, str]:
            capsys.readouterr()
            code = main(list(words or ["train", str(self.path)]))
            return code, *capsys.readouterr()

        return self.started_as(run)
