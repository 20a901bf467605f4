"""All-gathers and reduce-scatters of groups that lie on several hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import spawn
from uspft.comm import Books, Group, gather_over, sum_parts
from uspft.mesh import Groups

ROWS = 3
BY_HOST = {  # ranks of a host, and the groups
    "two hosts": (4, [range(8)]),
    "four hosts": (2, [range(8)]),
    "groups of both hosts": (4, [[0, 1, 4, 5], [2, 3, 6, 7]]),
}
FLAT = {
    "one host": (8, [range(8)]),
    "one of each host": (4, [[rank, rank + 4] for rank in range(4)]),
    "unequal hosts": (3, [range(8)]),
    "groups inside hosts": (4, [range(4), range(4, 8)]),
}
Found = dict[str, Any]


def work(rank: int) -> dict[str, Found]:
    found = {}
    for name, (per_host, every) in {**BY_HOST, **FLAT}.items():
        group = Groups(ranks_per_host=per_host).by_host(every, rank, Books())
        flat = replace(group, hosts=None, books=Books())
        both = results(group), results(flat)
        found[name] = {
            "by host": group.hosts is not None,
            "off": [float((a - b).abs().max()) for a, b in zip(*both, strict=True)],
            "bytes": (group.books.bytes["tensor"], flat.books.bytes["tensor"]),
            "messages": (group.books.messages["tensor"], flat.books.messages["tensor"]),
        }
        if group.hosts:
            inside, across = group.hosts
            turned = replace(group, hosts=(across, inside), books=Books())
            found[name]["control"] = float((results(turned)[0] - both[1][0]).abs().max())
            found[name]["leaves"] = leaves(group)
    return found


def results(group: Group) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7 + dist.get_rank())
    x = torch.randn(ROWS, 5, dtype=torch.float64, generator=draw)
    wide = torch.randn(ROWS * group.size, 5, dtype=torch.float64, generator=draw)
    return [gather_over(x, group, "tensor"), sum_parts(wide, group, "tensor")]


def leaves(group: Group) -> list[int]:
    """What a rank sends to other hosts in an all-gather, and in a reduce-scatter, in parts."""
    assert group.hosts
    inside, across = group.hosts
    x = torch.zeros(ROWS, 5)
    calls: list[Callable[[Group], Tensor]] = [
        lambda group: gather_over(x, group, "tensor"),
        lambda group: sum_parts(x.repeat(group.size, 1), group, "tensor"),
    ]
    sent = []
    for call in calls:
        books = Books()
        call(replace(group, hosts=(inside, replace(across, books=books))))
        sent.append(books.bytes["tensor"] // (4 * x.numel()))
    return sent


def test_what_is_collected_by_hosts_is_the_same_and_leaves_a_host_once() -> None:
    """Of eight parts on two hosts each rank sends one to the other host, where a ring of all eight
    has seven leave each host; and sums are as exact."""
    found = spawn(8, work)
    for rank in found:
        assert {name for name, one in rank.items() if one["by host"]} == set(BY_HOST)
        for name, one in rank.items():
            gathered, summed = one["off"]
            assert gathered == 0.0 and summed < 1e-14, name
            assert one["bytes"][0] == one["bytes"][1], "as much is sent in all"
        for name in BY_HOST:
            assert rank[name]["control"] > 0.1, "parts in another order are others"
            assert rank[name]["messages"][0] < rank[name]["messages"][1]
            hosts = 4 if name == "four hosts" else 2
            assert rank[name]["leaves"] == [hosts - 1, hosts - 1]
