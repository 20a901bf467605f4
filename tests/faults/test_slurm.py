"""SLURM: what `srun` tells each host of a step becomes the hosts of a run."""

from __future__ import annotations

import pytest

from uspft.called import VARIABLE
from uspft.launcher import hosts
from uspft.launcher.hosts import PORTS, Hosts, LaunchError, first_host, hosts_from, planned_hosts

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4"}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
}
BATCH = str(0xFFFFFFFB)
"""The step of a batch script."""


@pytest.fixture(autouse=True)
def names_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "resolve", lambda address: (2, "10.0.0.7"))


def test_a_step_tells_its_hosts() -> None:
    found = hosts_from(STEP)
    assert (found.count, found.index, found.address) == (4, 2, "gpu07")
    assert found.port in PORTS and planned_hosts(STEP) == 4
    # Every host computes one port, and steps side by side have others.
    assert hosts_from({**STEP, "SLURM_NODEID": "0"}).port == found.port
    others = {hosts_from({**STEP, "SLURM_STEP_ID": str(n)}).watch_port for n in range(1, 9)}
    assert len(others) == 8 and not others & {found.port, found.watch_port}


def test_what_the_user_sets_stays() -> None:
    own = {"MASTER_ADDR": "node-ib0", "MASTER_PORT": "29500"}
    assert hosts_from({**STEP, **own}) == Hosts(4, 2, "node-ib0", 29500)
    torchrun = {"NNODES": "2", "NODE_RANK": "1", **own}
    assert hosts_from({**STEP, **torchrun}) == Hosts(2, 1, "node-ib0", 29500)
    assert hosts_from({**JOB, "NNODES": "1"}) == Hosts()


@pytest.mark.parametrize("batch", [{}, {"SLURM_STEP_ID": BATCH}])
def test_one_host_of_several_is_refused_outside_a_step(batch: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"has 4 hosts.*srun --ntasks-per-node=1 \.\./bin/uspft"):
        hosts_from({**JOB, **batch, VARIABLE: "../bin/uspft"})
    assert planned_hosts({**JOB, **batch}) == 4  # what `check` in the script is told
    one = {**JOB, **batch, "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1"}
    assert hosts_from(one) == Hosts()


@pytest.mark.parametrize(("nodes", "tasks"), [("4", "32"), ("1", "8")])
def test_several_tasks_on_a_host_are_refused(nodes: str, tasks: str) -> None:
    step = {**STEP, "SLURM_STEP_NUM_NODES": nodes, "SLURM_STEP_NUM_TASKS": tasks}
    with pytest.raises(LaunchError, match=f"srun started {tasks} tasks.*--ntasks-per-node=1"):
        hosts_from(step)


def test_a_step_of_one_host_in_a_larger_allocation() -> None:
    assert hosts_from({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) == Hosts()


def test_a_step_that_does_not_say_all_is_refused_by_variable() -> None:
    step = {name: value for name, value in STEP.items() if name != "SLURM_STEP_NODELIST"}
    with pytest.raises(LaunchError, match="MASTER_ADDR is not set"):
        hosts_from(step)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[12,07-09],login", "gpu12"),
        ("login,gpu[1-2]", "login"),
        ("r[1-2]n[03-04]-ib", "r1n03-ib"),
        ("a-b-1", "a-b-1"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(names: str, first: str) -> None:
    assert first_host(names) == first
