"""How much a cache of tokenised data holds, and how it is emptied of it and of nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from uspft.data.cache import PARTIAL
from uspft.data.corpus import META
from uspft.lease import is_abandoned

_NAME = re.compile(r"[0-9a-f]{24}")


class CacheSize(NamedTuple):
    """How many corpora there are, how many bytes they take, and how many of them are unfinished."""

    corpora: int
    bytes: int
    unfinished: int = 0


def corpora_in(cache_dir: Path) -> list[Path]:
    """Return the folders of the corpora in a cache, sorted."""
    if not cache_dir.is_dir():
        return []
    named = (path for path in cache_dir.iterdir() if _NAME.fullmatch(path.name))
    return sorted(path for path in named if (path / META).is_file())


def holding(folders: list[Path]) -> CacheSize:
    """Return how much these corpora are."""
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    unfinished = sum(bool(PARTIAL.fullmatch(folder.name)) for folder in folders)
    return CacheSize(len(folders), sum(file.stat().st_size for file in files), unfinished)


def empty(cache_dir: Path) -> CacheSize:
    """Delete the corpora of a cache, and what killed processes left; return how much that was.

    What is being written now stays, and so does what is no corpus. A run that has a corpus open
    goes on with it. Raises OSError.
    """
    folders = corpora_in(cache_dir)
    left = list(cache_dir.iterdir()) if cache_dir.is_dir() else []
    folders += [path for path in left if PARTIAL.fullmatch(path.name) and is_abandoned(path)]
    found = holding(folders)
    for folder in folders:
        shutil.rmtree(folder)
    return found
