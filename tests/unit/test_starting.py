"""What ranks find in their environment before they are ranks."""

from __future__ import annotations

import pytest

from uspft.commands.starting import ALLOCATOR, ranks_environment


def test_memory_of_gpus_is_taken_in_segments_that_grow() -> None:
    told = ranks_environment("cuda", {"HOME": "/h"})
    assert told["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert (told["DS_ACCELERATOR"], told["HOME"]) == ("cuda", "/h")
    assert not ranks_environment("cpu", {}).keys() & ALLOCATOR


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_user_s_allocator_settings_stand_alone(name: str) -> None:
    own = {name: "max_split_size_mb:512"}
    told = ranks_environment("cuda", own)
    assert {key: told[key] for key in told.keys() & ALLOCATOR} == own


def test_deepspeed_is_told_the_device_of_the_recipe() -> None:
    own = {"DS_ACCELERATOR": "cuda", "TORCH_CPP_LOG_LEVEL": "INFO"}
    told = ranks_environment("cpu", own)
    assert told == {"DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "INFO"}
