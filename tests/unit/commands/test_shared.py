"""Hosts that do not share the output folder are found by writing there and looking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import spawn
from uspft.commands import shared
from uspft.commands.shared import require_shared
from uspft.config import Fault


def look(rank: int, folders: list[list[Path]]) -> list[str]:
    """Four ranks as two hosts of two; what each case said."""
    shared.SEEN_SECONDS = 0.5
    host, local = divmod(rank, 2)
    own: dict[str, str] = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": str(host),
        "LOCAL_RANK": str(local),
    }
    told = []
    for case in folders:
        try:
            require_shared(case[host], own)
            told.append("")
        except Fault as fault:
            ((key, what, remedy),) = fault.findings
            assert key == "output_dir" and "share" in remedy
            told.append(what)
    return told


def test_what_each_host_sees(tmp_path: Path) -> None:
    for name in ("one", "a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one, link, a, b = (tmp_path / name for name in ("one", "link", "a", "b"))
    answers: Any = spawn(4, look, [[one, one], [one, link], [a, b], [one, tmp_path / "gone"]])
    for same, linked, apart, gone in answers:
        assert same == linked == ""
        assert "is not one folder for all hosts: host 0 sees nothing there of what host 1" in apart
        assert "gone/.host-1-" in gone and "cannot be written: No such file" in gone
    assert not [path for path in tmp_path.rglob(".host-*")]


def test_one_host_looks_at_nothing() -> None:
    require_shared(Path("/nowhere"), {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize("name", ["SEEN_SECONDS", "LOOK_SECONDS"])
def test_the_file_system_is_given_time(name: str) -> None:
    assert (shared.SEEN_SECONDS, shared.LOOK_SECONDS) == (60.0, 0.2), name
