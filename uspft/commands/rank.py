"""A run's ranks: how a command starts those of this host, how they connect, and what each runs."""

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
"""The variables that configure torch's allocator, the newer name first."""

KEEP_FREED = {f"MALLOC_{limit}_THRESHOLD_": str(1 << 40) for limit in ("MMAP", "TRIM")}
"""Variables that make glibc's malloc keep freed pages, so that the next step's logits reuse them.
"""


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
    """Start this host's ranks, each as `uspft rank WORDS`, wait for them, and return the exit code.

    The ranks start when all hosts are ready. on_stop: the message on what ranks do when the user
    stops them. restart: decides what follows if the run is lost.
    """
    launch = recipe.launch
    assert isinstance(launch.processes, int)
    if hosts.count > 1:
        gpus, limit = torch.cuda.device_count(), launch.timeout_minutes * 60
        watch = place.meeting.convene(launch.processes, launch.device, gpus, limit)
    else:  # the reference process that `verify` runs on host 0, too
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

    own: the user's environment, which takes precedence, except for DS_ACCELERATOR.
    """
    defaults = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # hides torch's warning about hosts without a name
    if device == "cuda" and not own.keys() & ALLOCATOR:
        # Sizes differ from row to row: fixed segments would fragment.
        defaults[ALLOCATOR[0]] = "expandable_segments:True"
    # a transfer of low priority may start too late to overlap with computation
    if device == "cuda":
        defaults["TORCH_NCCL_HIGH_PRIORITY"] = "1"
    if device == "cpu":
        defaults |= KEEP_FREED
    return {**defaults, **own, "DS_ACCELERATOR": device}


MEET_SECONDS = 300.0
"""How long ranks wait to connect; all hosts have reported ready before."""


@contextmanager
def joined(
    launch: LaunchBlock, environment: Mapping[str, str], *, talks: bool = False, trains: bool = True
) -> Iterator[torch.device]:
    """Yield this rank's device, with torch.distributed and DeepSpeed initialised; collective.

    launch: has the device and the time-out of collectives. environment: the variables set by the
    launcher. talks: whether DeepSpeed's loggers print. trains: whether DeepSpeed and transformers
    are needed. Raises RunFailed where ranks do not connect.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor forwards the signals that it gets
    device = _device(launch.device, environment)
    warnings.filterwarnings("ignore", category=FutureWarning)
    # autograd's thread warns at its first matrix product on a GPU, and works all the same
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    if trains:  # silences warnings that mean nothing to a user of uspft; errors still appear
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    join(environment, device, deadline(launch.timeout_minutes, first_step=True))
    if trains:
        from uspft.engine.quarantine import prepare_deepspeed

        prepare_deepspeed(talks=talks)
    yield device
    # exit together: gloo may abort a process otherwise
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
    """Connect to the other ranks and create the default process group.

    limit: time-out of its collectives. Raises RunFailed where the ranks do not connect.
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
    # With a bound device torch splits every later group off the first; with a single rank NCCL can
    # fail at that (DeepSpeed issue 8248).
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
"""How long a network file system may show an outdated folder."""
LOOK_SECONDS = 0.2


def ranks_of_host(environment: Mapping[str, str]) -> int:
    """Return how many ranks each host has, from the launcher's variables."""
    return int(environment["LOCAL_WORLD_SIZE"])


def require_shared(folder: Path, environment: Mapping[str, str]) -> None:
    """Check that every host sees the files that the others write in a folder; collective.

    environment: the launcher's variables. Raises Fault on every rank where one host does not.
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
    """Raise Fault on every rank where any rank has a problem; collective.

    wrong: this rank's problem, or "".
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, wrong)
    if told := next(filter(None, every), None):
        what = f"`{folder}` is not one folder for all hosts: {told}"
        raise Fault([("output_dir", what, "name one on a file system that they share")])


def _missing(paths: list[Path]) -> set[Path]:
    """Return the files that do not appear within SEEN_SECONDS."""
    until = time.monotonic() + SEEN_SECONDS
    while True:
        seen = set(paths[0].parent.iterdir())
        missing = {path for path in paths if path not in seen}
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(LOOK_SECONDS)


def rank(folder: Path, environment: Mapping[str, str], waiting: Waiting) -> int:
    """Run one rank of the job in `folder`, and return its exit code. Raises what the run raises.

    waiting: shows what this rank is waiting for until the run has its own display.
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
    set_deadline(limit)  # for DeepSpeed's groups too
    waiting.close()
    if first and job.recipe.model.attention == AUTO:
        leave_recipe(job, run.world.kernel.name, run.refused)
    if first and (line := slower(run.world.kernel, device)):
        print(f"model.attention: {line}", flush=True)
    asked: list[int] = []  # from here on a stop signal saves a checkpoint
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
    """Write the resolved recipe to the output folder, with the attention kernel that the ranks
    chose.

    refused: a line for each installed kernel that was tried first and failed.
    """
    recipe = job.recipe.changed(model={"attention": kernel})
    write_text(job.output / RECIPE, dump(recipe, job.comments))
    for line in refused:
        print(f"model.attention: {line}; using {kernel}", flush=True)
    print(f"attention kernel: {kernel}", flush=True)
