"""A project as small as can be with the real launch.sh and install.py; needs no network."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.support.hangs import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    """Return install.py as a module, since it stands in no package."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load()

# What the program was given, as JSON on stdout.
PROGRAM = """
import json, os, sys
names = ("PYTHONDONTWRITEBYTECODE", "PYTHONUTF8", "USPFT_INSTALLED", "USPFT_PROGRAM")
shown = {name: os.environ[name] for name in names if name in os.environ}
print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "python": sys.executable, **shown}))
"""


TOOLS = "bash readlink cat sha256sum env dirname sh".split()


@dataclass
class Sandbox:
    """A project folder, and the folder with the packages that its pip finds."""

    root: Path
    wheels: Path

    def environment(self, **changes: str) -> dict[str, str]:
        """Return an environment in which pip reaches nothing but the sandbox's packages."""
        dropped = ("USPFT_", "PIP_", "PYTHON", "NNODES")
        kept = {name: v for name, v in os.environ.items() if not name.startswith(dropped)}
        offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
        return {**kept, **offline, "PIP_FIND_LINKS": str(self.wheels), **changes}

    def start(self, *words: str, cwd: Path | None = None, **changes: str) -> subprocess.Popen[str]:
        """Start launch.sh."""
        return subprocess.Popen(
            [self.root / "launch.sh", *words],
            cwd=cwd,
            env=self.environment(**changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *words: str, cwd: Path | None = None, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Run launch.sh to its end."""
        process = self.start(*words, cwd=cwd, **changes)
        out, shown = process.communicate(timeout=HANG_SECONDS)
        return subprocess.CompletedProcess(words, process.returncode, out, shown)


def make_sandbox(folder: Path, dependencies: str = '["uspft-sandbox"]') -> Sandbox:
    """Make a project that needs one package, and that package."""
    root, wheels = folder / "a project", folder / "wheels"
    (root / "uspft").mkdir(parents=True)
    wheels.mkdir()
    for name in ("launch.sh", "install.py"):
        shutil.copy(ROOT / name, root / name)
    (root / "pyproject.toml").write_text(
        f"[project]\ndependencies = {dependencies}\n"
        '[project.optional-dependencies]\ndev = ["uspft-sandbox-dev"]\n'
    )
    names = ("uspft-sandbox", "uspft-sandbox-dev")
    (root / "constraints.txt").write_text("".join(f"{name}==1.0\n" for name in names))
    (root / "uspft/__init__.py").touch()
    (root / "uspft/__main__.py").write_text(PROGRAM)
    for name in names:
        make_wheel(wheels, name)
    return Sandbox(root, wheels)


def path_without_python(folder: Path) -> Path:
    """Make a folder for PATH on which there is everything that launch.sh needs but a Python."""
    folder.mkdir()
    for tool in TOOLS:
        place = shutil.which(tool)
        assert place
        (folder / tool).symlink_to(place)
    return folder


def make_wheel(folder: Path, name: str) -> None:
    """Write an empty package that pip can install."""
    stem = f"{name.replace('-', '_')}-1.0"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tags = "Root-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\n{tags}")
        wheel.writestr(f"{info}/RECORD", "")
