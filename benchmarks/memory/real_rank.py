"""One rank that counts real runs: python -m benchmarks.memory.real_rank FOLDER RANK."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.lab.processes import Tell, as_rank
from benchmarks.memory.count import count_here, returns, world_of
from benchmarks.memory.peers import count_alst_here
from uspft.config.recipe import MemoryBlock
from uspft.layout import Layout


@dataclass(frozen=True)
class Setting:
    """Rows, a model of LLaMA's shape, and what is counted of ours by name, as `memory` in a
    recipe; `alst`: by name, whether it offloads."""

    tokens: tuple[int, ...]
    config: dict[str, Any]
    ours: dict[str, dict[str, Any]]
    alst: dict[str, bool]


def measured(record: dict[str, Any], tell: Tell) -> dict[str, dict[str, Any]]:
    """Return what each contender has alive for each row on the first rank; collective."""
    setting, found = Setting(**record), dict[str, dict[str, Any]]()
    config = LlamaConfig(**setting.config, dtype=torch.bfloat16)
    ranks = dist.get_world_size()
    for tokens in setting.tokens:
        here: dict[str, Any] = {}
        for name, offload in setting.alst.items():
            here[name] = asdict(count_alst_here(config, tokens // ranks, offload=offload))
        for name, options in setting.ours.items():
            world = world_of(Layout(ulysses=ranks), "ulysses_cp", torch.device("cpu"), returns())
            memory = MemoryBlock.model_validate(options)
            here[name] = asdict(count_here(config, tokens, memory, world))
            tell(f"{tokens}, {name}")
        found[str(tokens)] = here
    return found


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
