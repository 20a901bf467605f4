"""What ranks find in their environment before they are ranks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from uspft.commands.starting import ALLOCATOR, KEEP_FREED, ranks_environment


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
