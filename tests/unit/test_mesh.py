"""How many process groups a layout makes, and that each is given back once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from uspft.comm import Books
from uspft.layout import Layout
from uspft.mesh import GROUPS, Mesh, make_mesh


class World:
    """What torch.distributed was asked for by one rank of many."""

    def __init__(self, rank: int, layout: Layout, patch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[int, ...]] = []
        self.met: list[Any] = []
        self.closed: list[Any] = []
        answers = {
            "is_initialized": lambda: True,
            "get_world_size": lambda: layout.ranks,
            "get_rank": lambda: rank,
            "new_group": self.new_group,
            "barrier": self.barrier,
            "destroy_process_group": self.closed.append,
        }
        for name, answer in answers.items():
            patch.setattr(f"torch.distributed.{name}", answer)

    def new_group(self, ranks: Sequence[int], timeout: object) -> object:
        self.made.append(tuple(ranks))
        return object()

    def barrier(self, group: object) -> None:
        self.met.append(group)


# All four names apart only where a row is split both ways and there are several replicas.
COUNTS = [
    (Layout(), 0),
    (Layout(data=4), 1),
    (Layout(ring=4), 1),
    (Layout(ulysses=4), 1),
    (Layout(ulysses=2, ring=2), 5),
    (Layout(ring=2, data=2), 3),
    (Layout(ulysses=2, data=2), 3),
    (Layout(ulysses=2, ring=2, data=2), 11),
]


@pytest.mark.parametrize(("layout", "count"), COUNTS, ids=str)
def test_groups_with_the_same_members_are_one(
    layout: Layout, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = set()
    for rank in range(layout.ranks):
        world = World(rank, layout, monkeypatch)
        mesh = make_mesh(layout, Books())
        assert len(world.made) == len(set(world.made)) == count
        orders.add(tuple(world.made))
        groups = [getattr(mesh, name) for name in GROUPS]
        for one in groups:
            assert one.ranks[one.index] == rank and (one.handle is None) == (one.size == 1)
            for other in groups:
                assert (one.handle is other.handle) == (one.ranks == other.ranks)
        mine = {id(group.handle) for group in groups if group.handle}
        assert {id(handle) for handle in world.met} == mine and len(world.met) == len(mine)
        mesh.close()
        assert {id(handle) for handle in world.closed} == mine and len(world.closed) == len(mine)
    assert len(orders) == 1, "ranks make groups in different orders"


def test_a_layout_that_does_not_fill_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="is for 2 ranks, the world has 1"):
        make_mesh(Layout(ring=2), Books())
    assert isinstance(make_mesh(Layout(), Books()), Mesh)
