"""What the names in a folder say: which files describe a data set, and which are other splits.

A clone of a hub data set has both, and `datasets` tells them by their names too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_DESCRIBES = re.compile(r"(readme|licen[cs]e)([._-].*)?", re.IGNORECASE)
_INFOS = "dataset_infos.json"
_TRAIN = ("train", "training")
_OTHERS = ("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
_NO_LETTER = re.compile(r"[\W\d_]+")


def describing(files: Sequence[Path], records: Iterable[Path]) -> list[Path]:
    """Return those of a folder's files that describe its records, which lie beside or below them.

    records: the files of the folder that hold records by their endings.
    """
    held = {path for path in records if path.name != _INFOS}
    around = {folder for path in held for folder in path.parents}
    return [
        path
        for path in files
        if path.parent in around
        and (path.name == _INFOS or (path not in held and _DESCRIBES.fullmatch(path.name)))
    ]


def two_splits(names: Sequence[str]) -> tuple[str, str] | None:
    """Return a name that says train and one that says test or the like; None where not both are.

    names: of files that hold records, as the folder has them: `data/train-00000.parquet`.
    """
    words = {name: set(_NO_LETTER.split(name.lower())) for name in names}
    train = [name for name in names if words[name].intersection(_TRAIN)]
    others = [name for name in names if words[name].intersection(_OTHERS)]
    others = [name for name in others if name not in train]
    return (train[0], others[0]) if train and others else None
