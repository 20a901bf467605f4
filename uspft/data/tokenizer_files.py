"""The files of a tokenizer: whether a folder holds one, and what is wrong with one that does not
load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from uspft.config.problems import said
from uspft.data.faults import DataError, wrong_key

KEY = "model.tokenizer"
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
"""Files of which a folder with a tokenizer has one: without any, transformers makes one that is
empty."""
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_POINTER = b"version https://git-lfs"


def holds_tokenizer(folder: Path) -> bool:
    """Tell whether a folder has a file with a tokenizer's vocabulary, whatever is in it."""
    return any(os.path.lexists(folder / name) for name in VOCABULARIES)


def read_tokenizer(place: str) -> Any:
    """Return transformers' tokenizer of a folder or a hub id. Raises DataError."""
    from transformers import AutoTokenizer

    folder = Path(place) if os.path.isdir(place) else None
    if folder:
        _require_files(folder)
    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # from_pretrained raises many kinds
        if folder and (damaged := _damaged(folder)):
            raise damaged from error
        remedy = "name a folder that holds a tokenizer.json, or a hub id"
        raise wrong_key(KEY, f"none can be loaded from {place}: {said(error)}", remedy) from error


def _require_files(folder: Path) -> None:
    """Check that a folder's files of a tokenizer are there and can be read. Raises DataError."""
    found = 0
    for name in VOCABULARIES + _BESIDE:
        file = folder / name
        try:
            os.lstat(file)
            with file.open("rb") as handle:
                start = handle.read(len(_POINTER))
        except FileNotFoundError:
            if not os.path.islink(file):
                continue
            raise _unread(file, "leads nowhere", "copy what it stands for") from None
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
            raise _unread(file, why, "let this user read it, or name another folder") from error
        if start == _POINTER:
            raise _unread(file, "is a pointer of Git LFS, not the file", "run `git lfs pull` there")
        found += name in VOCABULARIES
    if not found:
        what = f"the folder `{folder}` holds no tokenizer (no {', '.join(VOCABULARIES)})"
        remedy = "name a folder that holds the model's own, or its hub id"
        raise wrong_key(KEY, what, remedy)


def _damaged(folder: Path) -> DataError | None:
    """Return what to raise for the first file that is not what its name says, if there is one."""
    for name in VOCABULARIES + _BESIDE:
        file = folder / name
        if file.suffix != ".json" or not file.is_file():
            continue
        try:
            if isinstance(json.loads(file.read_bytes()), dict):
                continue
            why = "is no JSON object"
        except (ValueError, RecursionError) as error:
            why = f"is cut off or damaged ({said(error)})"
        return _unread(file, why, "copy or download it again, whole")
    return None


def _unread(file: Path, why: str, remedy: str) -> DataError:
    return wrong_key(KEY, f"`{file}` {why}", remedy)
