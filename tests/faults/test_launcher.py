"""One host: whatever happens to a rank, its cause is told once and no process stays behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.faults.launched import launch
from tests.support.hangs import HANG_SECONDS

WAIT = "time.sleep(600)"


def test_all_ranks_end_well(tmp_path: Path) -> None:
    run = launch(
        tmp_path,
        3,
        """
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT"
        mark("env", " ".join(os.environ[name] for name in names.split()))
        mark("threads", os.environ["OMP_NUM_THREADS"])
        print(f"out of {rank}")
        print(f"err of {rank}", file=sys.stderr)
        """,
    )
    out, shown = run.process.communicate(timeout=HANG_SECONDS)
    assert run.process.returncode == 0
    run.assert_nothing_left()
    assert len(run.pids()) == 6  # three ranks, a child each
    assert (out, shown) == ("out of 0\n", "err of 0\n")
    assert (tmp_path / "logs/rank-0.log").read_text() == "err of 0\n"
    assert (tmp_path / "logs/rank-2.log").read_text() == "out of 2\nerr of 2\n"
    told = [(tmp_path / f"env-{rank}").read_text().split() for rank in range(3)]
    assert [fields[:6] for fields in told] == [
        [str(rank), str(rank), "3", "3", "0", "127.0.0.1"] for rank in range(3)
    ]
    assert len({fields[6] for fields in told}) == 1 and int(told[0][6]) > 0
    assert int((tmp_path / "threads-0").read_text()) >= 1


def test_threads_per_rank_are_the_users_where_set(tmp_path: Path) -> None:
    run = launch(tmp_path, 2, "mark('threads', os.environ['OMP_NUM_THREADS'])", OMP_NUM_THREADS="7")
    assert run.end()[0] == 0
    assert (tmp_path / "threads-1").read_text() == "7"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_is_told_once_with_its_rank(tmp_path: Path, rank: int) -> None:
    script = f"""
    if rank == {rank}:
        report(ValueError("boom"))
    time.sleep(600)
    """
    code, shown = launch(tmp_path, 4, script).end()
    assert code == 1
    assert shown.count(f"rank {rank} failed: ValueError: boom") == 1
    assert shown.count("Traceback") == 1 and shown.count("raise error") == 1
    assert shown.count("failed") == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_that_nobody_reported_is_told_from_the_log(tmp_path: Path, rank: int) -> None:
    script = f"""
    if rank == {rank}:
        raise ValueError("boom")
    time.sleep(600)
    """
    code, shown = launch(tmp_path, 3, script).end()
    assert code == 1
    assert f"rank {rank} failed: exit code 1" in shown
    assert shown.count("ValueError: boom") == 1


def test_a_rank_that_reported_and_hangs_on_its_way_out(tmp_path: Path) -> None:
    script = """
    import atexit
    if rank == 1:
        atexit.register(time.sleep, 600)
        report(ValueError("boom"))
    time.sleep(600)
    """
    code, shown = launch(tmp_path, 2, script).end()
    assert code == 1 and "rank 1 failed: ValueError: boom" in shown


def test_a_killed_rank_is_told_with_its_last_lines(tmp_path: Path) -> None:
    script = """
    for line in range(50):
        print(f"line {line} of {rank}")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    """
    code, shown = launch(tmp_path, 3, script).end()
    assert code == 1
    assert "rank 2 failed: killed (SIGKILL), probably out of memory" in shown
    assert [f"line {line} of 2" in shown for line in (29, 30, 49)] == [False, True, True]


def test_another_signal_is_named(tmp_path: Path) -> None:
    script = "os.kill(os.getpid(), signal.SIGSEGV) if rank else time.sleep(600)"
    code, shown = launch(tmp_path, 2, script).end()
    assert code == 1 and "rank 1 failed: killed by SIGSEGV" in shown


def test_wrong_data_found_late(tmp_path: Path) -> None:
    script = "report(ValueError('data.jsonl:17: no text'), code=2) if rank else time.sleep(600)"
    code, shown = launch(tmp_path, 2, script).end()
    assert (code, shown) == (2, "data.jsonl:17: no text\n")


CONSEQUENCES = [
    "report(RuntimeError('[pair.cc:534] Connection closed by peer [127.0.0.1]:9001'))",
    "report(RuntimeError('[1] is setting up NCCL communicator: ncclRemoteError: remote process'))",
    "raise RuntimeError('Broken pipe')",
    "os.abort()",
]


@pytest.mark.parametrize("consequence", CONSEQUENCES)
def test_the_cause_is_told_and_not_what_follows_from_it(tmp_path: Path, consequence: str) -> None:
    script = f"""
    if rank == 3:
        mark("up")
        time.sleep(0.8)
        report(ValueError("the cause"))
    if rank == 1:
        while not (folder / "up-3").exists():
            time.sleep(0.01)
        {consequence}
    time.sleep(600)
    """
    code, shown = launch(tmp_path, 4, script).end()
    assert code == 1
    assert "rank 3 failed: ValueError: the cause" in shown and "rank 1" not in shown


def test_a_lost_connection_with_no_other_cause_is_the_cause(tmp_path: Path) -> None:
    script = """
    if rank:
        report(RuntimeError("[pair.cc:534] Connection closed by peer"))
    time.sleep(600)
    """
    code, shown = launch(tmp_path, 2, script).end()
    assert code == 1 and "rank 1 failed: RuntimeError: [pair.cc:534] Connection closed" in shown


def test_the_earliest_of_two_causes(tmp_path: Path) -> None:
    script = """
    other = Path(os.environ[ERROR_FILE]).with_name("rank-2.json")
    while rank == 1 and not other.exists():
        pass
    if rank:
        report(ValueError(f"cause {rank}"))
    time.sleep(600)
    """
    assert "rank 2 failed: ValueError: cause 2" in launch(tmp_path, 3, script).end()[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_every_rank_save(tmp_path: Path, number: signal.Signals) -> None:
    run = launch(tmp_path, 3, "save_when_stopped()")
    run.wait_for("ready", 3)
    run.send(number)
    code, shown = run.end()
    assert code == 130
    assert shown == "stopping: saving a checkpoint; again to stop at once\n"
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(3)] == ["1"] * 3


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    script = """
    signal.signal(signal.SIGTERM, lambda *_: mark("asked"))
    mark("ready")
    while True:
        time.sleep(1)
    """
    run = launch(tmp_path, 2, script)
    run.wait_for("ready", 2)
    run.send(signal.SIGINT)
    run.wait_for("asked", 2)
    time.sleep(0.5)
    assert run.process.poll() is None
    run.send(signal.SIGINT)
    code, shown = run.end()
    assert code == 130
    assert shown.endswith("\nstopped at once\n")


def test_a_signal_before_the_ranks_are_ready(tmp_path: Path) -> None:
    run = launch(tmp_path, 3, WAIT)
    run.wait_for("pid", 3)
    run.send(signal.SIGTERM)
    code, shown = run.end()
    told = "stopping: there is nothing to save yet; again to stop at once\n"
    assert (code, shown) == (130, f"{told}stopped before the run had begun\n")


def test_a_failure_while_saving_is_a_failure(tmp_path: Path) -> None:
    script = """
    def save(*_):
        report(OSError("disk full")) if rank else time.sleep(600)
    signal.signal(signal.SIGTERM, save)
    mark("ready")
    time.sleep(600)
    """
    run = launch(tmp_path, 2, script)
    run.wait_for("ready", 2)
    run.send(signal.SIGTERM)
    code, shown = run.end()
    assert code == 1 and "rank 1 failed: OSError: disk full" in shown


def test_a_killed_supervisor_leaves_no_rank(tmp_path: Path) -> None:
    # Without a child of its own: only the rank itself is tied to the supervisor.
    run = launch(tmp_path, 3, "child.kill()\nmark('pid', os.getpid())\n" + WAIT)
    run.wait_for("pid", 3)
    run.send(signal.SIGKILL)
    assert run.end()[0] == -signal.SIGKILL


def test_the_cause_among_real_collectives(tmp_path: Path) -> None:
    script = """
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for step in range(1000):
            if rank == 2 and step == 20:
                dist.destroy_process_group()  # what the others then say comes before the cause
                time.sleep(1.0)
                report(ValueError("boom"))
            dist.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        mark("consequence", error)
        report(error)
    """
    code, shown = launch(tmp_path, 4, script).end()
    assert code == 1 and shown.count("failed: ") == 1
    assert "rank 2 failed: ValueError: boom" in shown
    assert list(tmp_path.glob("consequence-*"))


def test_who_waits_too_long_is_told_with_the_collective(tmp_path: Path) -> None:
    script = """
    import torch, torch.distributed as dist
    from datetime import timedelta
    from uspft.comm import deadline, set_deadline
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1, 2])
    dist.barrier(group=group)
    set_deadline(deadline(0.05))
    if rank == 2:
        time.sleep(600)
    try:
        dist.all_reduce(torch.ones(1000), group=group)
    except RuntimeError as error:
        report(error)
    """
    code, shown = launch(tmp_path, 3, script, LEAST_HOSTS="").end()
    first, *_, last = shown.splitlines()
    told = "waited 0.05 min in all_reduce for other ranks (launch.timeout_minutes)"
    assert code == 1 and told in first, shown
    assert first.startswith(("rank 0 on host 0 (", "rank 1 on host 0 ("))
    assert first.endswith("; of this host, rank 2 did not join it")
    assert last.startswith("again: Hosts(count=1, index=0")


WATCHDOG = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=_ALLGATHER_BASE, NumelIn=4, NumelOut=8, Timeout(ms)=600000) ran for 600029 milliseconds"
)
"""What torch 2.13 prints before it aborts a process (ProcessGroupNCCL.cpp)."""


def test_a_collective_that_nccl_gave_up_is_told(tmp_path: Path) -> None:
    script = f"""
    if rank == 1:
        print({WATCHDOG!r}, flush=True)
        os.abort()
    time.sleep(600)
    """
    code, shown = launch(tmp_path, 2, script, LEAST_HOSTS="").end()
    assert code == 1 and shown.splitlines()[-1].startswith("again: Hosts(count=1, index=0")
    told = "waited 10 min in _allgather_base for other ranks (launch.timeout_minutes)"
    assert told in shown.splitlines()[0] and WATCHDOG in shown
