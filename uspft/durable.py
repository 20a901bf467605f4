"""Functions by which a file or folder is either complete or absent, even after kills and power
loss.

Contents must reach the disk before the name does, and the name before anything that it replaces is
deleted. Each function returns only when that is so.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush everything in a folder to the disk, the folder's own entries last. Raises OSError."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(place, name))
        sync(Path(place))


def partial_of(target: Path) -> Path:
    """Return the hidden path next to a target under which it is written before it is renamed."""
    return target.with_name(f".{target.name}.partial")


def start_partial(target: Path) -> Path:
    """Create and return an empty folder in which to write `target`.

    A leftover of a killed process is deleted.
    """
    aside = partial_of(target)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def publish(aside: Path, target: Path) -> None:
    """Give a complete file or folder its final name; a file of that name is replaced.

    Raises OSError.
    """
    if aside.is_dir():
        sync_tree(aside)
    else:
        sync(aside)
    os.replace(aside, target)
    sync(target.parent)


def write_text(target: Path, text: str) -> None:
    """Write or replace a text file. Raises OSError, and then leaves an earlier file unchanged."""
    aside = partial_of(target)
    try:
        aside.write_text(text, encoding="utf-8")
        publish(aside, target)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file and flush it to the disk.

    Raises OSError, also in place of the SafetensorError for an error of the operating system.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=dict(metadata) if metadata else None)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    sync(path)
