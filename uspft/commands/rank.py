"""A run's ranks: how a command starts those of this host, how they meet, and what each runs."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from uspft.called import keep_imports
from uspft.comm import deadline, set_deadline
from uspft.config import Fault, LaunchBlock, Recipe, dump
from uspft.config.algorithms import AUTO
from uspft.config.problems import Interrupted, RunFailed, said
from uspft.config.strategies import layouts_of
from uspft.data.rows.loader import Orders, searching_beside
from uspft.durable import write_text
from uspft.job import Job
from uspft.launcher.hosts import Hosts, LocalRanks
from uspft.launcher.supervise import Restart, run_ranks
from uspft.launcher.terminal import Waiting
from uspft.launcher.watch import Watch
from uspft.prepare.host import Invocation, shares_gpus
from uspft.written import RECIPE

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables from which torch takes its allocator's settings, the newer first."""

KEEP_FREED = {f"MALLOC_{limit}_THRESHOLD_": str(1 << 40) for limit in ("MMAP", "TRIM")}
"""Variables that make glibc's malloc keep freed pages, which the next step's logits then use."""


def start_ranks(
    words: Sequence[str],
    recipe: Recipe,
    hosts: Hosts,
    place: Invocation,
    *,
    logs: Path,
    on_stop: str = "saving a checkpoint",
    restart: Restart | None = None,
) -> int:
    """Start this host's ranks, each as `uspft rank WORDS`, wait, and return the exit code.

    The ranks start when all hosts are ready. on_stop: what the ranks do when they are stopped, as
    the person who stops them is told. restart: decides what follows where the run is lost.
    """
    launch = recipe.launch
    assert isinstance(launch.processes, int)
    if hosts.count > 1:
        gpus, limit = torch.cuda.device_count(), launch.timeout_minutes * 60
        watch = place.meeting.convene(launch.processes, launch.device, gpus, limit)
    else:  # also host 0's own part of `verify`
        watch = Watch(hosts)
    return run_ranks(
        [sys.executable, "-m", "uspft", "rank", *words],
        LocalRanks(launch.processes, hosts),
        environment=ranks_environment(launch.device, place.environment),
        log_dir=logs,
        watch=watch,
        on_stop=on_stop,
        restart=restart,
    )


def ranks_environment(device: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ranks on cpu or cuda.

    own: the user's environment, which wins over what is set here, except for DS_ACCELERATOR.
    """
    defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a host without a name is no user's concern
    if device == "cuda" and not own.keys() & ALLOCATOR:
        # Sizes differ from row to row: fixed segments would leave gaps that no row fits.
        defaults[ALLOCATOR[0]] = "expandable_segments:True"
    if device == "cuda":  # a transfer that starts late is one that nothing hides
        defaults["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    if device == "cpu":
        defaults |= KEEP_FREED
    return {**defaults, **own, "DS_ACCELERATOR": device}


MEET_SECONDS = 300.0
"""How long ranks wait for one another's start: all hosts have said before that they are ready."""


@contextmanager
def joined(
    launch: LaunchBlock, environment: Mapping[str, str], *, talks: bool = False, trains: bool = True
) -> Iterator[torch.device]:
    """Yield this rank's device, with torch.distributed and DeepSpeed up; collective.

    launch: names the device, and how long collectives wait. environment: what the launcher gave
    this process. talks: whether DeepSpeed's own loggers print. trains: whether DeepSpeed and
    transformers are needed. Raises RunFailed where ranks do not meet.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor passes on what it is told
    device = _device(launch.device, environment)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # autograd's thread says so of its first product on a GPU, and goes on as it should
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    if trains:  # messages that mean nothing to a user of uspft; errors still come through
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    join(environment, device, deadline(launch.timeout_minutes, first_step=True))
    if trains:
        from uspft.engine.quarantine import prepare_deepspeed

        prepare_deepspeed(talks=talks)
    yield device
    # In order, or gloo may abort a process whose work is done.
    dist.barrier()
    dist.destroy_process_group()


def _device(kind: str, environment: Mapping[str, str]) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    local = int(environment["LOCAL_RANK"])
    if shares_gpus(environment):  # NCCL refuses two ranks of one host on one GPU
        os.environ["NCCL_HOSTID"] = f"{environment['NODE_RANK']}.{local}"
        local %= torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(local)  # where DeepSpeed looks for its GPU
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def join(environment: Mapping[str, str], device: torch.device, limit: timedelta) -> None:
    """Meet the other ranks, and make the default group, whose collectives wait up to a limit.

    Raises RunFailed where the ranks do not meet.
    """
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        meet = timedelta(seconds=MEET_SECONDS)
        store = dist.TCPStore(address, port, world, rank == 0, timeout=meet)
    except dist.DistError as error:
        raise RunFailed(
            f"the {world} ranks did not meet at {address}, port {port}, within "
            f"{MEET_SECONDS / 60:g} min ({said(error)}); see that hosts reach that port"
        ) from error
    store.set_timeout(limit)
    # Bound to a device, torch splits every later group off the first; one rank alone has seen
    # NCCL fail at that (DeepSpeed issue 8248).
    bound = device.type == "cuda" and world > 1
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=limit,
        device_id=device if bound else None,
    )


SEEN_SECONDS = 60.0
"""How long a network file system may go on showing a folder as it was before."""
LOOK_SECONDS = 0.2


def ranks_of_host(environment: Mapping[str, str]) -> int:
    """Return how many ranks each host has, by what the launcher gave this process."""
    return int(environment["LOCAL_WORLD_SIZE"])


def require_shared(folder: Path, environment: Mapping[str, str]) -> None:
    """Check that every host sees in a folder what the others have written there; collective.

    environment: what the launcher gave this process. Raises Fault on every rank where one does not.
    """
    hosts = int(environment["WORLD_SIZE"]) // ranks_of_host(environment)
    if hosts == 1:
        return
    host, speaks = int(environment["NODE_RANK"]), environment["LOCAL_RANK"] == "0"
    tokens: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(tokens)

    def mark(of: int) -> Path:
        return folder / f".host-{of}-{tokens[0]}"

    wrong = ""
    try:
        try:
            if speaks:
                mark(host).touch()
        except OSError as error:
            wrong = f"{mark(host)} cannot be written: {error.strerror}"
        _require_none(folder, wrong)
        missing = _missing([mark(of) for of in range(hosts)]) if speaks else set()
        names = ", ".join(str(of) for of in range(hosts) if mark(of) in missing)
        what = f"host {host} sees nothing there of what host {names} has written"
        _require_none(folder, what if names else "")
    finally:
        if speaks:
            mark(host).unlink(missing_ok=True)


def _require_none(folder: Path, wrong: str) -> None:
    """Check that nothing is wrong on any rank; collective.

    wrong: what is wrong on this rank, or "". Raises Fault on every rank where one is wrong.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, wrong)
    if told := next(filter(None, every), None):
        what = f"`{folder}` is not one folder for all hosts: {told}"
        raise Fault([("output_dir", what, "name one on a file system that they share")])


def _missing(paths: list[Path]) -> set[Path]:
    """Return those of the files that are not seen within SEEN_SECONDS."""
    until = time.monotonic() + SEEN_SECONDS
    while True:
        seen = set(paths[0].parent.iterdir())
        missing = {path for path in paths if path not in seen}
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(LOOK_SECONDS)


def rank(folder: Path, environment: Mapping[str, str], waiting: Waiting) -> int:
    """Be one rank of the job in `folder`, and return its exit code. Raises what the run raises.

    waiting: says what this rank waits for until the run has a display of its own.
    """
    job = Job.read(folder)
    logs_transfers = bool(job.recipe.deepspeed.comms_logger)
    every = [one.parallel_config for one in layouts_of(job.recipe)]
    shared = any(p.context_parallel > 1 or p.tensor_parallel_algo == "meshslice" for p in every)
    with (
        searching_beside() if shared else nullcontext() as orders,
        joined(job.recipe.launch, environment, talks=logs_transfers) as device,
    ):
        require_shared(job.output, environment)
        renewed = job.lease.renewed() if job.lease and dist.get_rank() == 0 else nullcontext()
        with renewed:
            code = _run(job, device, waiting, orders, environment)
        if logs_transfers:
            import deepspeed

            deepspeed.comm.log_summary()
    return code


def _run(
    job: Job,
    device: torch.device,
    waiting: Waiting,
    orders: Orders | None,
    environment: Mapping[str, str],
) -> int:
    waiting.now("the model to be built")
    from uspft.assemble import assemble
    from uspft.kernels import slower
    from uspft.mesh import Groups
    from uspft.training.loop import train

    keep_imports()
    first = dist.get_rank() == 0
    limit = deadline(job.recipe.launch.timeout_minutes, first_step=True)
    run = assemble(job, device, Groups(limit, ranks_of_host(environment)), orders=orders)
    set_deadline(limit)  # in DeepSpeed's groups too
    waiting.close()
    if first and job.recipe.model.attention == AUTO:
        leave_recipe(job, run.world.kernel.name, run.refused)
    if first and (line := slower(run.world.kernel, device)):
        print(f"model.attention: {line}", flush=True)
    asked: list[int] = []  # from here on there is something to save
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    code = 0
    try:
        train(run, lambda: bool(asked))
    except Interrupted:
        code = 130
    run.loader.close()
    run.engine.close()
    return code


def leave_recipe(job: Job, kernel: str, refused: list[str]) -> None:
    """Write the recipe that the run leaves, now that the ranks have found which kernel works.

    refused: a line for each kernel that is installed and was tried before, in vain.
    """
    recipe = job.recipe.changed(model={"attention": kernel})
    write_text(job.output / RECIPE, dump(recipe, job.comments))
    for line in refused:
        print(f"model.attention: {line}; using {kernel}", flush=True)
    print(f"attention kernel: {kernel}", flush=True)
