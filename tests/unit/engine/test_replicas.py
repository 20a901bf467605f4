"""What DeepSpeed's tables of experts are told, and what it would compute wrong is refused; a tied
table's copy, and memory for its gradient, are where the run is, and the table may not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import groups
from torch import nn

from tests.support.known import EXPERTS
from uspft.comm import Group
from uspft.engine.replicas import ExpertSets, TiedTable, mark_for_partition
from uspft.layout import Layout
from uspft.parameters.shards import Holders, Shards

SHAPES = {"experts": (4, 2), "rest": (2,)}


def holders(shards: Shards) -> Holders:
    """Those of rank 1, with groups that nobody else is in."""
    pair, alike = Group(None, (0, 1), 1), Group(None, (1, 3), 0)
    alone = Group()
    return Holders(shards, 1, SHAPES, alone, alone, alike, pair, alone, alone, {})


def named() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


PAIRS = Shards(Layout(data=4, experts=2), experts={"experts": EXPERTS})


@pytest.mark.parametrize("stage", [1, 2])
def test_experts_have_groups_of_parameters_and_of_ranks_until_the_engine_closes(stage: int) -> None:
    parameters, module = named(), nn.Module()
    optimizer = torch.optim.AdamW(parameters.values())
    sets = ExpertSets(parameters, holders(PAIRS), stage)
    sets.give_groups(module, optimizer)
    dense, experts = optimizer.param_groups
    assert (dense["params"], experts["params"]) == ([parameters["rest"]], [parameters["experts"]])
    assert experts["moe"] and "moe" not in dense
    one: Any = parameters["experts"]
    assert experts["name"] == one.group_name and one.allreduce is False
    assert groups._EXPERT_PARALLEL_GROUP_RANKS[one.group_name] == [0, 1]
    assert groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[one.group_name] == [1, 3]
    assert not list(module.parameters()) and len(list(module.modules())) == 2
    sets.close()
    assert not groups._EXPERT_PARALLEL_GROUP and not groups._EXPERT_DATA_PARALLEL_GROUP_RANKS


def test_nothing_is_told_where_all_ranks_hold_the_same() -> None:
    parameters, module = named(), nn.Module()
    optimizer = torch.optim.AdamW(parameters.values())
    sets = ExpertSets(parameters, holders(Shards(Layout(data=4))), 1)
    sets.give_groups(module, optimizer)
    mark_for_partition(parameters, holders(Shards(Layout(data=4))))
    assert len(optimizer.param_groups) == len(list(module.modules())) == 1
    assert not any(
        hasattr(p, "allreduce") or hasattr(p, "ds_zero_placement_family")
        for p in parameters.values()
    )
    assert not groups._EXPERT_PARALLEL_GROUP
    sets.close()


def test_a_copy_is_made_on_the_device_of_the_run() -> None:
    lines: Any = SimpleNamespace(group=SimpleNamespace(index=1, size=2))
    run = torch.device("meta")
    tied = TiedTable(nn.Parameter(torch.zeros(0)), (4, 2), lines, torch.bfloat16, run)
    assert tied.copy is not None and tied.copy.device == run
    assert tied.buffer().device == run
