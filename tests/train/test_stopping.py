"""Runs that are stopped, killed, doubled or out of room: what is said, and that they go on."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT, environment, living, living_ranks, records
from tests.support.models import make_documents, make_model
from tests.support.runs import small_recipe
from uspft.checkpoint.folder import Checkpoint

LONG = 100_000
RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two processes, steps without end."""
    folder = tmp_path_factory.mktemp("stopping")
    make_model(folder / "model", "qwen2", heads=4, kv_heads=2)
    data = make_documents(folder / "d.jsonl", [30, 32, 11], masked=[0.0])
    return small_recipe(
        folder / "model",
        data.path,
        32,
        parallel_config=RING,
        training={"steps": LONG},
        checkpoint={"every_steps": 3, "keep_last": 1},
    )


def wait_for(folder: Path, process: Any, true: Callable[[list[dict[str, Any]]], object]) -> None:
    """Until metrics.jsonl says so."""
    until = time.monotonic() + HANG_SECONDS
    while not true(records(folder) if (folder / "out/metrics.jsonl").exists() else []):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def wait_for_step(folder: Path, step: int, process: Any) -> None:
    wait_for(folder, process, lambda found: any(one.get("step", 0) >= step for one in found))


def wait_for_more(folder: Path, process: Any) -> None:
    """Until a run has gone on, and made a step more."""
    wait_for(folder, process, lambda found: "resumed_from_step" in str(found[-2:-1]))


def in_terminal(name: str) -> None:
    """Make a terminal this process's own, as a shell does. Under nohup the suite is deaf to the end
    of its terminal, and so is what it starts."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.setsid()
    terminal = os.open(name, os.O_RDWR)  # which the first that a session opens becomes
    for stream in range(3):
        os.dup2(terminal, stream)


def newest(folder: Path) -> tuple[int, Path]:
    name = (folder / "out/checkpoints/latest").read_text().strip()
    return int(name[5:]), folder / "out/checkpoints" / name


def stopped(folder: Path, process: Any) -> str:
    """The last line of a run that was stopped, and saved."""
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130, err
    assert "Traceback" not in err and not living(folder)
    step, place = newest(folder)
    last = err.strip().splitlines()[-1]
    assert last == f"saved step {step} in {place}; the same command goes on"
    return err


def test_ctrl_c_saves_and_says_so_and_a_second_run_is_refused_meanwhile(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    process = Forked.start(recipe, tmp_path)
    wait_for_step(tmp_path, 2, process)
    (shown := tmp_path / "second").mkdir()
    words = [str(tmp_path / "recipe.yaml")]
    second = Forked(words, shown)
    _, err = second.communicate(timeout=HANG_SECONDS)
    assert second.returncode == 2 and process.poll() is None
    assert err.count("\n") == 1 and f"process {process.pid}, since" in err
    assert f"host {os.uname().nodename}" in err and "output_dir: a run is alive in" in err
    process.send_signal(signal.SIGINT)
    err = stopped(tmp_path, process)
    assert "stopping: saving a checkpoint; again to stop at once" in err
    step, _ = newest(tmp_path)
    assert step == records(tmp_path)[-1]["step"] and not list(tmp_path.glob("out/.lease*"))
    # With the same command; it is stopped the other way, by the end of its terminal.
    master, slave = os.openpty()
    again = Forked(words, tmp_path, before=partial(in_terminal, os.ttyname(slave)))
    os.close(slave)
    wait_for_step(tmp_path, step + 2, again)
    os.close(master)
    assert again.wait(HANG_SECONDS) == 130 and not living(tmp_path)
    assert {"resumed_from_step": step} in records(tmp_path)
    assert newest(tmp_path)[0] == records(tmp_path)[-1]["step"] > step


def test_a_killed_rank_s_message_and_a_killed_run_s_folder(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    process = Forked.start(recipe, tmp_path)
    wait_for_step(tmp_path, 4, process)
    os.kill(living_ranks(tmp_path)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1 and "killed (SIGKILL), probably out of memory" in err
    step, place = newest(tmp_path)
    last = err.strip().splitlines()[-1]
    assert last == f"saved step {step} in {place}; the same command goes on"
    half = place.with_name(".step-00000099.partial")
    half.mkdir()
    # Killed whole, it can say nothing; its hold on the folder ends with it.
    again = Forked.start(recipe, tmp_path)
    wait_for_more(tmp_path, again)
    assert not half.exists()
    again.kill()
    again.wait(HANG_SECONDS)
    assert list(tmp_path.glob("out/.lease*"))
    third = Forked.start(recipe, tmp_path)
    wait_for(tmp_path, third, lambda found: str(found).count("resumed_from_step") == 2)
    third.send_signal(signal.SIGTERM)
    stopped(tmp_path, third)


def test_a_stopped_run_that_was_replaced_writes_nothing_more(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    """Its lease is another's, as after a minute of Ctrl-Z."""
    process = Forked.start(recipe, tmp_path)
    wait_for_step(tmp_path, 2, process)
    (lease,) = tmp_path.glob("out/.lease-*.json")
    other = {**json.loads(lease.read_text()), "token": "another", "host": "elsewhere", "process": 7}
    lease.with_name(".lease-00000009.json").write_text(json.dumps(other))
    lease.unlink()
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1 and "Traceback" not in err
    assert "another run has taken" in err and "host elsewhere, process 7" in err
    assert len(list(tmp_path.glob("out/.lease-*"))) == 1


@pytest.mark.parametrize(
    "delays",
    [
        (0.0, 0.03, 0.15, 0.5, 2.0),
        pytest.param((0.01, 0.06, 0.1, 0.2, 0.3, 0.8, 1.2, 3.0, 4.5), marks=pytest.mark.full),
    ],
    ids=["some", "others"],
)
def test_ctrl_c_in_the_first_seconds_ends_at_once_without_a_traceback(
    recipe: dict[str, Any], tmp_path: Path, delays: tuple[float, ...]
) -> None:
    """At moments from the shell's first command over imports to the start of the ranks."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), **recipe}))
    codes = []
    for delay in delays:
        process = subprocess.Popen(
            ["./launch.sh", str(path)],
            cwd=ROOT,
            env=environment(XDG_CACHE_HOME=str(tmp_path / "cache")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=HANG_SECONDS)
        told = out + err
        assert process.returncode in (130, -signal.SIGINT), (delay, process.returncode, told)
        assert "Traceback" not in told and "KeyboardInterrupt" not in told, (delay, told)
        codes.append("before the run had begun" in err)
        assert not living(tmp_path)
    assert any(codes)


def test_a_full_disk_is_told_in_one_line_and_the_checkpoint_before_stays(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    """From some step on the system lets no file of one rank grow."""
    process = Forked.start(recipe, tmp_path)
    wait_for_step(tmp_path, 4, process)
    rank = living_ranks(tmp_path)[1]
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1 and "Traceback" not in err
    (line,) = [line for line in err.splitlines() if " failed: " in line]
    assert "the checkpoint of step" in line and "File too large" in line and "make room" in line
    step, place = newest(tmp_path)
    assert err.strip().endswith(f"saved step {step} in {place}; the same command goes on")
    assert [one.name for one in place.parent.glob("*step*")] == [place.name]
    assert Checkpoint.open(place).step == step
