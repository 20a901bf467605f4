"""A ring's keys and gradients are on their way while blocks are computed."""

from __future__ import annotations

from tests.support.overlap import attend


def test_a_ring_sends_the_next_keys_while_it_computes(on_wire: None) -> None:
    found, buffers = attend("ring_cp", 4)
    for done in (one for both in found for one in both):
        assert done.sources == [{(done.index - step) % 4} for step in range(4)]
        assert [done.call_of(t) for t in done.keys] == [1, 2, 3]
        for step, transfer in enumerate(done.keys):
            before, after = done.calls[step : step + 2]
            assert transfer.started < before.at < transfer.ended < after.at
    assert buffers == 2, "more than what is at hand and what arrives"


def test_gradients_of_a_ring_go_straight_home_while_it_computes(on_wire: None) -> None:
    for forward, backward in attend("ring_cp", 4)[0]:
        assert forward.gradients == []
        assert [{t.peer} for t in backward.gradients] == backward.sources[1:]
        assert len(backward.gradients) == 3
        for step, transfer in enumerate(backward.gradients, 1):
            assert backward.calls[step].at < transfer.started
            for following in backward.calls[step + 1 : step + 2]:
                assert transfer.started < following.at < transfer.ended
