"""The versions of libraries that uspft is written for; others are refused by name.

Looked at before any of them is imported: another generation of transformers fails in its own words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from uspft.config import InputError


def require_versions(
    wanted: Callable[[str], list[str] | None] = requires, installed: Callable[[str], str] = version
) -> None:
    """Raises InputError for each dependency that is missing or outside the range of pyproject.toml.

    Where uspft itself is not installed, launch.sh has compared them.
    """
    try:
        requirements = [Requirement(text) for text in wanted("uspft") or []]
    except PackageNotFoundError:
        return
    problems = []
    for requirement in requirements:
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
