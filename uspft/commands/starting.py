"""This host's ranks, started on a folder that says what they do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from uspft.commands.place import Place
from uspft.config import Recipe
from uspft.launcher import Hosts, LocalRanks, run_ranks


def start_ranks(
    words: Sequence[str],
    recipe: Recipe,
    hosts: Hosts,
    place: Place,
    *,
    logs: Path,
    on_stop: str = "saving a checkpoint",
) -> int:
    """Start `uspft rank WORDS` as often as the recipe says, wait, and return the exit code.

    on_stop: what a person reads who stops it.
    """
    assert isinstance(recipe.launch.processes, int)
    return run_ranks(
        [sys.executable, "-m", "uspft", "rank", *words],
        LocalRanks(recipe.launch.processes, hosts),
        environment={
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # a host without a name is no user's concern
            **place.environment,
            "DS_ACCELERATOR": recipe.launch.device,
        },
        log_dir=logs,
        on_stop=on_stop,
    )
