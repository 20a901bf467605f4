"""How groups of a layout lie over hosts."""

from __future__ import annotations

from collections import Counter

import pytest

from uspft.layout import AXES, COPIES, HELD, MESH, Layout
from uspft.planner.spread import Spread

WIDE = Layout(mesh_columns=2, ulysses=4, ring=2, data=2)


@pytest.mark.parametrize(
    ("axes", "per_host", "want"),
    [
        (MESH, 8, Spread(2, 2, 4)),
        (("ulysses",), 8, Spread(4, 4, 2)),
        (("ring",), 8, Spread(2, 1, 8)),
        (("ulysses", "ring"), 8, Spread(8, 4, 2)),
        (("ulysses", "ring", "data"), 8, Spread(16, 4, 2)),
        (("ring",), 16, Spread(2, 2, 8)),
        (("data",), 32, Spread(2, 2, 16)),
    ],
)
def test_members_of_a_host(axes: tuple[str, ...], per_host: int, want: Spread) -> None:
    assert Spread.of(WIDE, axes, per_host) == want
    assert want.spans_hosts == (want.per_host < want.ranks)


def test_what_follows_from_degrees_is_what_counting_finds() -> None:
    seen = 0
    for layout in (WIDE, Layout(2, 2, 4, 3, mesh_rows=2), Layout(3, 2, 2, 2), Layout(1, 8, 6)):
        for axes in (*((axis,) for axis in (*AXES[:4], *HELD[:3])), COPIES, AXES[1:3], AXES[::2]):
            for per_host in (1, 2, 3, 4, 6, 8, 16, 48, 64):
                every = layout.groups(axes)
                hosts = [Counter(rank // per_host for rank in group) for group in every]
                beside = Counter(host for group in hosts for host in group)
                counts = {count for group in hosts for count in group.values()}
                want = Spread(len(every[0]), min(counts), max(beside.values()), len(counts) == 1)
                assert Spread.of(layout, axes, per_host) == want, (layout, axes, per_host)
                seen += 1
    assert seen == 4 * 10 * 9


def test_unequal_hosts_count_by_the_one_with_fewest() -> None:
    assert Spread.of(Layout(ring=6), ("ring",), 4) == Spread(6, 2, 1, even=False)


def test_what_leaves_the_host() -> None:
    assert Spread.inside(8).share_across == 0.0
    assert Spread(8, 4).share_across == pytest.approx(4 / 7)
    assert Spread(2, 1).share_across == 1.0 and Spread(1, 1).share_across == 0.0
