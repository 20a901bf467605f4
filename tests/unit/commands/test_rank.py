"""How ranks are started, how one joins the others, and what the first leaves of the recipe."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.faults.launched import two_free_ports
from tests.support.ranks import spawn
from uspft.commands import rank as ranks
from uspft.commands.rank import (
    ALLOCATOR,
    KEEP_FREED,
    leave_recipe,
    ranks_environment,
    require_shared,
)
from uspft.config import Fault, dump, load
from uspft.config.problems import RunFailed
from uspft.config.reference import blocks, keys
from uspft.job import Job
from uspft.prepare.examine import examine


def test_memory_of_gpus_is_taken_in_segments_that_grow() -> None:
    told = ranks_environment("cuda", {"HOME": "/h"})
    assert told["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert (told["DS_ACCELERATOR"], told["HOME"]) == ("cuda", "/h")
    assert not ranks_environment("cpu", {}).keys() & ALLOCATOR


def test_transfers_on_gpus_go_before_products() -> None:
    assert ranks_environment("cuda", {})["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    own = {"TORCH_NCCL_HIGH_PRIORITY": "0"}
    assert ranks_environment("cuda", own)["TORCH_NCCL_HIGH_PRIORITY"] == "0"
    assert "TORCH_NCCL_HIGH_PRIORITY" not in ranks_environment("cpu", {})


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_user_s_allocator_settings_stand_alone(name: str) -> None:
    own = {name: "max_split_size_mb:512"}
    told = ranks_environment("cuda", own)
    assert {key: told[key] for key in told.keys() & ALLOCATOR} == own


def test_deepspeed_is_told_the_device_of_the_recipe() -> None:
    own = {"DS_ACCELERATOR": "cuda", "TORCH_CPP_LOG_LEVEL": "INFO"}
    told = ranks_environment("cpu", own)
    assert told == {**KEEP_FREED, "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "INFO"}


def test_freed_memory_is_kept_on_cpu_unless_the_user_says_otherwise() -> None:
    told = ranks_environment("cpu", {"MALLOC_TRIM_THRESHOLD_": "0"})
    assert told["MALLOC_TRIM_THRESHOLD_"] == "0"
    assert int(told["MALLOC_MMAP_THRESHOLD_"]) > 1 << 32
    assert not ranks_environment("cuda", {}).keys() & KEEP_FREED


TAKEN_AGAIN = """
import resource
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(64 << 20)
before = faults()
for _ in range(8): bytearray(64 << 20)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc than glibc's")
def test_memory_taken_again_is_not_new_to_the_system() -> None:
    def faults(own: dict[str, str]) -> int:
        command = [sys.executable, "-c", TAKEN_AGAIN]
        run = subprocess.run(command, env={**os.environ, **own}, capture_output=True, check=True)
        return int(run.stdout)

    assert faults(KEEP_FREED) < 8
    assert faults(dict.fromkeys(KEEP_FREED, str(128 << 10))) >= 8 * 32  # of 2 MiB, or smaller


LIMIT = timedelta(minutes=30)


@pytest.mark.parametrize(
    ("device", "world", "backend", "bound"),
    [
        ("cpu", 2, "gloo", False),
        ("cuda:1", 2, "cpu:gloo,cuda:nccl", True),
        ("cuda:0", 1, "cpu:gloo,cuda:nccl", False),
    ],
)
def test_a_device_is_bound_where_there_are_others(
    device: str, world: int, backend: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    class Store:
        def __init__(self, *place: Any, timeout: timedelta) -> None:
            asked.update(place=place, meet=timeout)

        def set_timeout(self, limit: timedelta) -> None:
            asked.update(later=limit)

    def init(backend: str, **options: Any) -> None:
        asked.update(backend=backend, **options)

    monkeypatch.setattr("torch.distributed.TCPStore", Store)
    monkeypatch.setattr("torch.distributed.init_process_group", init)
    place = {"MASTER_ADDR": "::1", "MASTER_PORT": "29500"}
    at = torch.device(device)
    rank = at.index or 0
    ranks.join({**place, "RANK": str(rank), "WORLD_SIZE": str(world)}, at, LIMIT)
    assert asked["backend"] == backend and asked["place"] == ("::1", 29500, world, rank == 0)
    assert (asked["rank"], asked["world_size"]) == (rank, world)
    assert asked["device_id"] == (at if bound else None)
    assert asked["meet"] < asked["later"] == asked["timeout"] == LIMIT


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_say_where(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MEET_SECONDS", 1.5)
    port = two_free_ports()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = {**place, "RANK": str(rank), "WORLD_SIZE": "2"}
    with pytest.raises(RunFailed, match=f"the 2 ranks did not meet at 127.0.0.1, port {port}"):
        ranks.join(own, torch.device("cpu"), LIMIT)
    assert not dist.is_initialized()


def look(rank: int, folders: list[list[Path]]) -> list[str]:
    """Four ranks as two hosts of two; what each case said."""
    ranks.SEEN_SECONDS = 0.5
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
    assert (ranks.SEEN_SECONDS, ranks.LOOK_SECONDS) == (60.0, 0.2), name


QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def test_only_the_kernel_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = examine(QUICKSTART, [f"output_dir={tmp_path}"], 1, 4).recipe
    update = {
        "model": recipe.model.model_copy(update={"attention": "auto"}),
        "launch": recipe.launch.model_copy(update={"device": "cuda"}),
    }
    recipe = recipe.model_copy(update=update)
    job = Job(recipe, tmp_path, 1, {}, places={"tokenizer": "/only/on/this/host"})
    leave_recipe(job, "flash_attn_3", ["flash_attn_4 refused: ImportError: too old"])
    assert capsys.readouterr().out.splitlines() == [
        "model.attention: flash_attn_4 refused: ImportError: too old; using flash_attn_3",
        "attention kernel: flash_attn_3",
    ]
    before = yaml.safe_load(dump(recipe))
    after = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert before["model"].pop("attention") == "auto"
    assert after["model"].pop("attention") == "flash_attn_3"
    assert after == before


def test_what_is_refused_when_set_is_not_left(tmp_path: Path) -> None:
    recipe = examine(QUICKSTART, [f"output_dir={tmp_path}"], 1, 4).recipe
    text = dump(recipe)
    left = yaml.safe_load(text)
    every = [key for at, kind in blocks().items() for key in keys(kind, at) if key.later]
    later = [key.path for key in every if "[]" not in key.path]
    assert later
    for key in later:
        block, _, name = key.partition(".")
        assert name not in left[block], key
    (tmp_path / "again.yaml").write_text(text)
    assert load(tmp_path / "again.yaml").recipe == recipe
