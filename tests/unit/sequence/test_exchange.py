"""What an exchange is made of, once for all layers and gone with its plan; and that it computes
while keys and gradients are on their way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from tests.support.algorithms import named
from tests.support.overlap import attend
from uspft.segments import Segments
from uspft.sequence import Heads, Share
from uspft.sequence.exchange import Exchange
from uspft.sequence.planned import Planned
from uspft.sequence.rows.balance import balanced
from uspft.sequence.rows.spans import Holding

ROW = Segments((0, 700, 1500, 1600, 4000), 3 << 12)
WINDOWS = (None, 128)


def plan_of(ring: int, index: int = 0) -> Share:
    return Share([ROW], [balanced(ROW, 1, ring)], (1, index))


def parts_of(plan: Share) -> list[object]:
    """What layers of every algorithm ask of a plan, the ones with a window too."""
    found: list[object] = []
    for each in (plan.with_window(window) for window in WINDOWS):
        ring = each.ring
        for algorithm in (Planned(ring), Planned(ring, keep=False), Planned(ring, stages=1)):
            exchange = algorithm.exchange(each)
            found += [stage.blocks for stage in exchange.arrivals]
            found += [
                exchange.leaving(d, stage.leg)
                for stage in exchange.arrivals
                for d in stage.leg.distances
            ]
        found += [each.blocks, each.hops, [each.seen(i, 0) for i in range(ring)]]
    return found


@pytest.mark.parametrize("ring", [2, 4])
def test_the_second_layer_works_nothing_out(ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[str] = []

    def counted(name: str) -> Callable[..., object]:
        walk = getattr(Holding, name)

        def count(*args: int) -> object:
            walks.append(name)
            return walk(*args)

        return count

    for name in ("within", "before"):
        monkeypatch.setattr(Holding, name, counted(name))
    plan = plan_of(ring)
    first = parts_of(plan)
    assert {"within", "before"} == set(walks)
    walks.clear()
    assert parts_of(plan) == first
    assert walks == []


@pytest.mark.parametrize("ring", [2, 4])
def test_a_plan_is_gone_with_its_last_user(ring: int) -> None:
    """Its index tensors, on the device, would else wait for Python's collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        plan = plan_of(ring)
        seen = [weakref.ref(plan.with_window(window)) for window in WINDOWS]
        assert parts_of(plan)
        del plan
        assert [ref() for ref in seen] == [None] * len(WINDOWS)
    finally:
        gc.enable()


@pytest.mark.parametrize(("ring", "stages"), [(2, 1), (4, 1), (4, 2), (4, 3), (8, 5)])
def test_a_number_of_stages_is_that_many(ring: int, stages: int) -> None:
    plan = plan_of(ring)
    exchange = named("planned_cp", 1, ring, stages=stages).exchange(plan)  # type: ignore[attr-defined]
    assert len(exchange.arrivals) == stages


@pytest.mark.parametrize(("ring", "least"), [(2, 4), (3, 4), (4, 3), (8, 7)])
def test_by_itself_it_takes_at_least_four_where_messages_are_long(ring: int, least: int) -> None:
    assert len(Planned(ring).exchange(plan_of(ring)).arrivals) == least
    whole = Exchange(plan_of(ring), 0, trimmed=True, keep=True)
    assert len(whole.arrivals) == ring - 1


@pytest.mark.parametrize(
    ("degrees", "stages", "said"),
    [
        (
            (1, 4),
            4,
            "is 4, and a rank exchanges with 3 others; write auto, or a number up to 3",
        ),
        ((4, 1), 1, "is 1, and a rank exchanges with 0 others; write auto"),
        ((1, 2), 2, "is 2, and a rank exchanges with 1 other; write auto, or a number up to 1"),
    ],
)
def test_stages_that_no_exchange_has_are_refused(
    degrees: tuple[int, int], stages: int, said: str
) -> None:
    heads = Heads(4, 4, 8)
    ((key, what, remedy),) = named("planned_cp", *degrees, stages=stages).problems(96, heads)
    assert (key, f"{what}; {remedy}") == ("parallel_config.exchange_stages", said)
    for fine in range(degrees[1]):
        assert not named("planned_cp", *degrees, stages=fine).problems(96, heads)


EXCHANGES = [
    # algorithm, ranks, options, kernel calls: this rank's own keys, and one for each stage
    ("planned_cp", 4, {"keep": True}, 4),
    ("planned_cp", 4, {"keep": False}, 4),
    ("planned_cp", 4, {"keep": False, "stages": 2}, 3),
    ("planned_cp", 2, {"keep": True, "piece_tokens": 4}, 5),
    ("planned_cp", 2, {"keep": False, "piece_tokens": 4}, 5),
    ("allgather_cp", 4, {}, 2),
]


@pytest.mark.parametrize(("name", "ranks", "options", "calls"), EXCHANGES)
def test_an_exchange_computes_while_keys_and_gradients_are_on_their_way(
    name: str, ranks: int, options: dict[str, int | bool], calls: int, on_wire: None
) -> None:
    for forward, backward in attend(name, ranks, **options)[0]:
        assert len(forward.calls) == len(backward.calls) == calls
        assert forward.sources[0] == {forward.index}
        assert forward.keys and bool(backward.keys) == (not options.get("keep"))
        for done in (forward, backward):
            for transfer in done.keys:
                before, after = (done.calls[done.call_of(transfer) - n] for n in (1, 0))
                assert transfer.started < done.calls[0].at
                assert before.at < transfer.ended < after.at
        assert forward.gradients == [] and backward.gradients
        for transfer in backward.gradients:
            number = max(n for n, call in enumerate(backward.calls) if call.at < transfer.started)
            assert transfer.peer in backward.sources[number]
            assert transfer.ended > backward.calls[-1].at


FETCHED_AGAIN = [(name, ranks, options) for name, ranks, options, _ in EXCHANGES if options]


@pytest.mark.parametrize(("name", "ranks", "options"), FETCHED_AGAIN)
def test_keys_that_were_attended_to_are_let_go_of(
    name: str, ranks: int, options: dict[str, int | bool], on_wire: None
) -> None:
    """Unless the backward pass wants them: else a rank would end up with the whole row's."""
    for forward, backward in attend(name, ranks, **options)[0]:
        for done in (forward, backward):
            left = [
                [t for t in alive if done.call_of(t) < number]
                for number, alive in enumerate(done.alive)
            ]
            kept = bool(options["keep"]) and done is forward
            assert any(left) == kept, (done.index, left)
        assert forward.alive[0] == forward.keys, "all are on their way while own keys are used"
