"""How many process groups a layout makes, and that each is given back once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from uspft.comm import Books, Group
from uspft.layout import Layout
from uspft.mesh import Groups, Mesh, make_mesh


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


# Those that share a row are its Ulysses group or its ring, where it is split one way alone.
COUNTS = [
    (Layout(), 0),
    (Layout(data=4), 0),
    (Layout(ring=4), 1),
    (Layout(ulysses=4), 1),
    (Layout(ulysses=2, ring=2), 5),
    (Layout(ring=2, data=2), 2),
    (Layout(ulysses=2, data=2), 2),
    (Layout(ulysses=2, ring=2, data=2), 10),
]


@pytest.mark.parametrize(("layout", "count"), COUNTS, ids=str)
def test_groups_with_the_same_members_are_one(
    layout: Layout, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = set()
    for rank in range(layout.ranks):
        world = World(rank, layout, monkeypatch)
        made = Groups()
        mesh = make_mesh(layout, made, Books())
        assert len(world.made) == len(set(world.made)) == count
        orders.add(tuple(world.made))
        groups = [one for one in vars(mesh).values() if isinstance(one, Group)]
        for one in groups:
            assert one.ranks[one.index] == rank and (one.handle is None) == (one.size == 1)
            for other in groups:
                assert (one.handle is other.handle) == (one.ranks == other.ranks)
        mine = {id(group.handle) for group in groups if group.handle}
        assert {id(handle) for handle in world.met} == mine and len(world.met) == len(mine)
        again = make_mesh(layout, made, Books())
        assert len(world.made) == count, "a second layout makes groups that there are"
        assert again.ring.handle is mesh.ring.handle and again.ring.books is not mesh.ring.books
        made.close()
        assert {id(handle) for handle in world.closed} == mine and len(world.closed) == len(mine)
    assert len(orders) == 1, "ranks make groups in different orders"


def test_a_layout_that_does_not_fill_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="is for 2 ranks, the world has 1"):
        make_mesh(Layout(ring=2), Groups(), Books())
    assert isinstance(make_mesh(Layout(), Groups(), Books()), Mesh)
