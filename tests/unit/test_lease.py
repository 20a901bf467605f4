"""One holder of a folder at a time: taken, renewed, refused, taken over, lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.support.hangs import HANG_SECONDS
from uspft import lease as room
from uspft.lease import Held, Holder, Lease, LeaseLost, is_abandoned


def silent(line: str) -> None:
    pass


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def of_another_host(folder: Path, *, silent_seconds: float) -> Path:
    """A lease that no process of this machine can be asked about."""
    found = Lease.take(folder, silent)
    holder = json.loads(found.path.read_text()) | {"machine": "far", "host": "far", "process": 7}
    found.path.write_text(json.dumps(holder))
    then = time.time() - silent_seconds
    os.utime(found.path, (then, then))
    return found.path


def test_two_renewals_may_fail_before_a_lease_lapses() -> None:
    assert room.RENEW_SECONDS * 3 <= room.LAPSE_SECONDS


def test_held_then_refused_then_free(tmp_path: Path) -> None:
    one = Lease.take(tmp_path / "new/out", silent)
    with pytest.raises(Held, match=f"host .+, process {os.getpid()}, since "):
        Lease.take(tmp_path / "new/out", silent)
    assert one.is_held()
    one.release()
    assert files(tmp_path / "new/out") == []
    Lease.take(tmp_path / "new/out", silent).release()


def test_a_holder_that_has_died_on_this_machine_is_no_hindrance(tmp_path: Path) -> None:
    take = "import sys, pathlib; from uspft.lease import Lease; "
    take += "Lease.take(pathlib.Path(sys.argv[1]), print)"
    subprocess.run([sys.executable, "-c", take, str(tmp_path)], check=True)
    assert len(files(tmp_path)) == 1 and is_abandoned(tmp_path)
    started = time.monotonic()
    found = Lease.take(tmp_path, silent)
    assert time.monotonic() - started < 50 and found.is_held() and len(files(tmp_path)) == 1
    assert not is_abandoned(tmp_path)


def test_a_process_number_that_was_given_again_is_not_the_holder(tmp_path: Path) -> None:
    found = Lease.take(tmp_path, silent)
    holder = json.loads(found.path.read_text())
    assert Holder(**holder).lives() is True
    assert Holder(**{**holder, "born": "1"}).lives() is False
    assert Holder(**{**holder, "machine": "elsewhere"}).lives() is None
    assert Holder(**{**holder, "machine": ""}).lives() is None


def test_silence_of_a_minute_ends_a_hold_and_its_holder_sees_that(tmp_path: Path) -> None:
    path = of_another_host(tmp_path, silent_seconds=61)
    mine = Lease.take(tmp_path, silent)
    assert mine.is_held() and mine.path.name == ".lease-00000002.json" and not path.exists()
    lost = Lease(path, json.loads(mine.path.read_text())["token"])
    with pytest.raises(LeaseLost, match=f"another run has taken .+process {os.getpid()}"):
        lost.require()
    lost.release()
    mine.require()


def test_a_stopped_holder_of_this_machine_loses_it_too(tmp_path: Path) -> None:
    """It lives, but has been silent: as after Ctrl-Z."""
    one = Lease.take(tmp_path, silent)
    then = time.time() - 61
    os.utime(one.path, (then, then))
    Lease.take(tmp_path, silent)
    with pytest.raises(LeaseLost):
        one.require()


def test_an_unknown_holder_is_waited_for_until_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_another_host(tmp_path, silent_seconds=30)
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.05)
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        os.utime(path)  # the holder renews

    with pytest.raises(Held, match="host far, process 7"):
        Lease.take(tmp_path, say)
    assert len(told) == 1 and "silent for 30 s" in told[0] and "60 s are over" in told[0]
    monkeypatch.setattr(room, "LAPSE_SECONDS", 0.4)
    started = time.monotonic()
    assert Lease.take(tmp_path, silent).is_held()
    assert time.monotonic() - started >= 0.3


def test_the_file_system_s_clock_tells_the_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose own clock is an hour ahead takes nothing over."""
    of_another_host(tmp_path, silent_seconds=0)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(room, "LAPSE_SECONDS", 0.5)
    started = time.monotonic()
    Lease.take(tmp_path, silent)
    assert time.monotonic() - started > 0.4


def test_a_holder_renews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RENEW_SECONDS", 0.05)
    one = Lease.take(tmp_path, silent)
    os.utime(one.path, (0, 0))
    with one.renewed():
        until = time.monotonic() + HANG_SECONDS
        while one.path.stat().st_mtime == 0:
            assert time.monotonic() < until
            time.sleep(0.01)
    os.utime(one.path, (0, 0))
    time.sleep(0.2)
    assert one.path.stat().st_mtime == 0, "renewed after the end"


def test_a_file_that_is_just_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.05)
    (tmp_path / ".lease-00000004.json").touch()

    def say(line: str) -> None:
        assert "just started" in line
        os.utime(tmp_path / ".lease-00000004.json")

    with pytest.raises(Held, match="one that has just started"):
        Lease.take(tmp_path, say)


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    one = Lease.take(tmp_path / "out", silent)
    one.path.unlink()
    one.path.parent.rmdir()
    with pytest.raises(LeaseLost, match="is gone"):
        one.require()
    one.release()


def _contend(folders: Sequence[Path], start: Any, answers: Any) -> None:
    for folder in folders:
        start.wait()
        try:
            Lease.take(folder, silent)
            answers.put((folder, "held"))
        except Held:
            answers.put((folder, "refused"))
        start.wait()  # nobody comes to the next, or dies, before all have answered


@pytest.mark.parametrize("left", [None, 61.0])
def test_of_many_that_come_at_once_at_most_one_holds(tmp_path: Path, left: float | None) -> None:
    contend: Callable[..., None] = _contend
    context, comers = get_context("forkserver"), 6
    folders = [tmp_path / str(turn) for turn in range(5)]
    for folder in folders:
        if left:
            of_another_host(folder, silent_seconds=left)
        folder.mkdir(exist_ok=True)
    start, answers = context.Barrier(comers), context.Queue()
    each = [context.Process(target=contend, args=(folders, start, answers)) for _ in range(comers)]
    for process in each:
        process.start()
    found = Counter(answers.get(timeout=HANG_SECONDS) for _ in range(comers * len(folders)))
    for process in each:
        process.join(HANG_SECONDS)
    for folder in folders:
        held = found[folder, "held"]
        assert held <= 1 and held + found[folder, "refused"] == comers, found
        assert len(files(folder)) == held, files(folder)
    assert any(found[folder, "held"] for folder in folders)
