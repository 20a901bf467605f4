"""A run that is lost starts again from its newest checkpoint: when, how often, and where."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.launched import Launched, launch_hosts
from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import living, write_recipe
from tests.support.models import make_documents, make_model
from tests.support.refused import Ground
from tests.support.runs import small_recipe
from uspft.launcher.remote import BY_HOSTFILE

STEPS, AT_STEP = 4, 3


def ends(marks: Path, times: int, how: str) -> None:
    """Have the last rank end in the same step of the first starts: killed, or with an error."""
    from uspft.engine.zero import ZeroEngine

    plain = ZeroEngine.step

    def dies(self: Any, batches: Any, *given: Any, **more: Any) -> Any:
        result = plain(self, batches, *given, **more)
        if os.environ["RANK"] == "1" and saved(marks.parent) == AT_STEP - 1:
            number = len(list(marks.iterdir()))
            if number < times:
                (marks / str(number)).touch()
                if how == "error":
                    raise ValueError("wrong by itself")
                os.kill(os.getpid(), signal.SIGKILL)
        return result

    ZeroEngine.step = dies  # type: ignore[method-assign]


def saved(folder: Path) -> int:
    latest = folder / "out/checkpoints/latest"
    return int(latest.read_text()[5:]) if latest.exists() else 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restarts")
    make_model(folder / "model", "llama")
    make_documents(folder / "d.jsonl", [32] * STEPS, masked=[0.0])
    return folder


def run(models: Path, folder: Path, times: int, how: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, stderr and journal of a run that may start again three times."""
    folder.mkdir()
    marks = folder / "marks"
    marks.mkdir()
    recipe = small_recipe(
        models / "model",
        models / "d.jsonl",
        32,
        parallel_config={"context_parallel": 2, "context_parallel_algo": "ring_cp"},
        training={"steps": STEPS},
        checkpoint={"every_steps": 1},
        launch={"restarts": 3},
    )
    path = write_recipe(recipe, folder)
    process = Forked([str(path)], folder, before=partial(ends, marks, times, how))
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode is not None and not living(folder)
    lines = (folder / "out/metrics.jsonl").read_text().splitlines()
    return process.returncode, err, [json.loads(line) for line in lines]


def test_it_goes_on_once_from_a_step_and_never_twice(models: Path, tmp_path: Path) -> None:
    _, _, plain = run(models, tmp_path / "plain", 0, "")
    code, err, once = run(models, tmp_path / "once", 1, "kill")
    assert code == 0, err
    assert "rank 1 failed: killed (SIGKILL)" in err and "starting again, 1 of 3" in err
    losses = [[one["loss"] for one in found if "loss" in one] for found in (plain, once)]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    (told,) = [one for one in once if "restart" in one]
    assert told["restart"] == 1 and told["after_step"] == AT_STEP - 1 and "SIGKILL" in told["why"]
    code, err, twice = run(models, tmp_path / "twice", 2, "kill")
    assert code == 1 and f"lost after step {AT_STEP - 1} as before" in err
    assert len([one for one in twice if "restart" in one]) == 1
    assert len(list((tmp_path / "twice/marks").iterdir())) == 2


def test_an_error_of_the_run_itself_ends_it(models: Path, tmp_path: Path) -> None:
    code, err, found = run(models, tmp_path / "error", 1, "error")
    assert code == 1 and "wrong by itself" in err and "starting again" not in err
    assert not [one for one in found if "restart" in one]


# Each rank waits; the supervisor writes on which hosts it would start again.
WAITS = """
mark("ready")
while True:
    time.sleep(0.05)
"""


def decided(host: Launched) -> str:
    _, err = host.end()
    (line,) = [line for line in err.splitlines() if line.startswith("again: ")]
    return line


@pytest.mark.parametrize(("least", "told"), [("2", "Hosts(count=2, index={}"), ("3", "None")])
def test_without_a_lost_host_where_enough_remain(tmp_path: Path, least: str, told: str) -> None:
    hosts = launch_hosts(tmp_path, 1, WAITS, 3, LEAST_HOSTS=least)
    for host in hosts:
        host.wait_for("ready", 1)
    os.kill(hosts[1].process.pid, signal.SIGKILL)
    hosts[1].process.wait(HANG_SECONDS)
    for index, host in enumerate((hosts[0], hosts[2])):
        assert told.format(index) in decided(host)


def test_with_all_hosts_where_a_rank_was_killed(tmp_path: Path) -> None:
    hosts = launch_hosts(tmp_path, 1, WAITS, 2, LEAST_HOSTS="")
    for host in hosts:
        host.wait_for("ready", 1)
    os.kill(hosts[1].pids()[0], signal.SIGKILL)
    for index, host in enumerate(hosts):
        assert f"Hosts(count=2, index={index}" in decided(host)


def test_host_0_decides_and_an_error_elsewhere_is_no_loss(tmp_path: Path) -> None:
    hosts = launch_hosts(tmp_path, 1, "if rank == 1:\n    sys.exit(3)" + WAITS, 2, LEAST_HOSTS="")
    for host in hosts:
        assert host.end()[0] == 1 and "again: None" in (host.folder / "stderr").read_text()
    (tmp_path / "gone").mkdir()
    hosts = launch_hosts(tmp_path / "gone", 1, WAITS, 2, LEAST_HOSTS="1")
    for host in hosts:
        host.wait_for("ready", 1)
    os.kill(hosts[0].process.pid, signal.SIGKILL)
    hosts[0].process.wait(HANG_SECONDS)
    assert "None" in decided(hosts[1])


def test_hosts_that_a_hostfile_started_all_remain(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.write({"launch.restarts": 1, "launch.min_hosts": 1})
    monkeypatch.setenv(BY_HOSTFILE, "1")
    ground.call(capsys).about("launch.min_hosts", "with --hostfile all hosts end", "write null")
