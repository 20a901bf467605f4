"""The check of library versions: those that uspft is not written for are refused by name.

It comes before any of them is imported, since another generation of transformers fails in words of
its own.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from uspft.config import InputError

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def require_versions(
    wanted: Callable[[str], list[str] | None] = requires, installed: Callable[[str], str] = version
) -> None:
    """Check that every dependency is here, in a version that pyproject.toml allows.

    wanted: gives a package's requirements; where uspft is not installed as one, they come from the
    pyproject.toml beside it. installed: gives a package's version. Raises InputError with a line
    for each dependency that is missing or outside its range.
    """
    problems = []
    for requirement in map(Requirement, _stated(wanted)):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = installed(requirement.name)
        except PackageNotFoundError:
            what = "is not installed"
        else:
            if found in requirement.specifier:
                continue
            what = f"is {found}, and uspft is written for {requirement.specifier}"
        remedy = f"{sys.executable} -m pip install '{requirement}'"
        problems.append(f"{requirement.name}: {what}; {remedy}")
    if problems:
        raise InputError("\n".join(problems))


def _stated(wanted: Callable[[str], list[str] | None]) -> list[str]:
    try:
        return wanted("uspft") or []
    except PackageNotFoundError:
        if not PROJECT.exists():
            return []
        found: list[str] = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
        return found
