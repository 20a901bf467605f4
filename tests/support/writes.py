"""What a process brings to the disk and when: names may only point at contents that are there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def times(place: Path) -> dict[str, int]:
    """When each file and folder of a tree last changed, by path."""
    inside = [place, *place.rglob("*")] if place.is_dir() else [place]
    return {str(path): path.stat().st_mtime_ns for path in inside}


def record(log: Path) -> None:
    """From here on this process notes each fsync, each renaming and each deletion of a tree."""
    fsync, replace, rename, rmtree = os.fsync, os.replace, os.rename, shutil.rmtree

    def note(**event: Any) -> None:
        with log.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def noted_fsync(handle: int) -> None:
        fsync(handle)
        path = os.readlink(f"/proc/self/fd/{handle}")
        note(kind="sync", path=path, time=os.fstat(handle).st_mtime_ns)

    def renaming(how: Any) -> Any:
        def noted(source: Any, target: Any, **more: Any) -> None:
            before = times(Path(source).resolve())
            how(source, target, **more)
            if str(target).endswith(".partial"):  # it has lost its name
                note(kind="gone", path=str(source))
            else:
                note(kind="name", source=str(Path(source).resolve()), path=str(target), tree=before)

        return noted

    def noted_rmtree(path: Any, *args: Any, **more: Any) -> None:
        if os.path.exists(path) and not str(path).endswith(".partial"):
            note(kind="gone", path=str(path))
        rmtree(path, *args, **more)

    os.fsync = noted_fsync
    os.replace, os.rename = renaming(replace), renaming(rename)
    shutil.rmtree = noted_rmtree  # type: ignore[assignment]


def events(log: Path) -> list[dict[str, Any]]:
    """In order, without those inside a folder that has no name yet."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return [one for one in found if one["kind"] == "sync" or ".partial/" not in one["path"]]


def unsafe(found: list[dict[str, Any]]) -> Iterator[str]:
    """Each name that a power loss could leave pointing at what never reached the disk, and each
    step that followed before the name itself was there."""
    synced: dict[str, int] = {}
    waiting: dict[str, str] = {}
    for event in found:
        if event["kind"] == "sync":
            synced[event["path"]] = event["time"]
            waiting.pop(event["path"], None)
            continue
        for parent, name in waiting.items():
            yield f"{event['kind']} of {event['path']} before {name} is in {parent} for good"
        waiting.clear()
        if event["kind"] == "name":
            for path, time in event["tree"].items():
                if synced.get(path) != time:
                    yield f"{event['path']} is named before {path} is on the disk"
            waiting[str(Path(event["path"]).resolve().parent)] = event["path"]
    yield from (f"{name} is in {parent} never for good" for parent, name in waiting.items())
