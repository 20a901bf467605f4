"""MeshSlice on four hosts: rates, bounds, predictions, and that parts alone are parts of a flow."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import median
from typing import Any, get_args

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.meshslice.engines import in_slices
from benchmarks.meshslice.events import Task, simulate
from benchmarks.meshslice.hosts.baselines import PASSES
from benchmarks.meshslice.hosts.blocks import (
    MEGATRON,
    ONE_SLICE,
    TUNED,
    Choice,
    Measured,
    choose,
    total,
    tuned,
)
from benchmarks.meshslice.hosts.grids import grid_of
from benchmarks.meshslice.hosts.local import Local
from benchmarks.meshslice.hosts.overlapped import (
    PRODUCTS,
    TRANSFERS,
    Overlap,
    bound_of,
    overlap_of,
)
from benchmarks.meshslice.hosts.predicted import hardware_of, transfer_errors
from benchmarks.meshslice.hosts.report import figures
from benchmarks.meshslice.hosts.setting import (
    MESHES,
    SQUARE,
    Setting,
    block_bytes,
    rate_mbit,
    sent_bytes,
)
from tests.support.ranks import spawn
from uspft.mesh import Groups
from uspft.planner.mesh import Flow

MIB = 1 << 20
ABOUT: dict[str, Any] = {
    "date": "2026-11-21T20:00",
    "machine": {"cores": 2, "cpu": "CPU", "memory_gib": 24, "load_average_before": 0.5},
    "versions": {"torch": "2.13"},
}
SETTING = Setting("baselines", 100, 1.5, 4096, 2048, 2048, 2, (1, 2))
TOKENS, HIDDEN, FEATURES = 24, 64, 40


def test_a_block_is_llamas_and_a_rate_makes_its_transfers_take_their_share() -> None:
    sizes = {one.name: (one.hidden, one.features(1)) for one in SETTING.products}
    wide = {"qkv": 3072, "out": 2048, "gate_up": 2 * 8192, "down": 8192}
    assert sizes == {name: (2048, features) for name, features in wide.items()}
    assert block_bytes(SETTING.products, 2048, (1, 1)) == 0
    assert sent_bytes(*SETTING.square, SQUARE) == 2 * 16 * MIB
    assert rate_mbit(1_000_000, 2.0, 0.5) == 8
    assert 8e-6 * 32 * MIB / rate_mbit(32 * MIB, 1.0, 1.5) == pytest.approx(1.5, rel=0.01)


class Products(TorchDispatchMode):
    """The shapes of the matrices of each product that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            a, b = args[-2:]
            self.seen.append((*a.shape, *b.shape))
        return func(*args, **(kwargs or {}))


def alone_and_whole(rank: int) -> dict[Any, Any]:
    """Bytes that a flow sends and products that it makes, whole and by its parts alone."""
    found, groups = {}, Groups()
    for mesh in MESHES:
        grid = grid_of(mesh, groups)
        for flow in get_args(Flow):
            local = Local(flow, TOKENS, HIDDEN, FEATURES, grid)
            a, b = local.operands()
            calls = {
                "whole": lambda flow=flow, a=a, b=b, grid=grid: in_slices(2)[flow](a, b, grid),
                "products": local.products(2),
                "transfers": local.transfers(),
            }
            for name, call in calls.items():
                grid.columns.books.close()  # those of the mesh columns too
                with Products() as products:
                    call()
                sent = sum(grid.columns.books.close().values())
                found[mesh, flow, name] = sent, products.seen
    return found


def test_products_and_transfers_alone_are_those_of_the_flow() -> None:
    for found in spawn(4, alone_and_whole):
        assert len(found) == 3 * 3 * 3
        for mesh in MESHES:
            sent = sent_bytes(TOKENS, HIDDEN, FEATURES, mesh)
            for flow in get_args(Flow):
                moved, shapes = found[mesh, flow, "whole"]
                assert moved == sent and len(shapes) == 2
                assert found[mesh, flow, "products"] == (0, shapes)
                assert found[mesh, flow, "transfers"] == (sent, [])


@pytest.mark.parametrize("transfers", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("slices", [1, 2, 8])
def test_the_bound_is_a_simulated_flow_on_one_link(transfers: float, slices: int) -> None:
    moves = [Task("row", transfers / slices) for _ in range(slices)]
    products = [Task("compute", 3 / slices, (number,)) for number in range(slices)]
    simulated = simulate([*moves, *products]).seconds
    assert bound_of("output", 3.0, transfers, slices) == pytest.approx(simulated)
    assert bound_of("left", 3.0, transfers, slices) == pytest.approx(simulated)


def test_what_a_flow_gained() -> None:
    seconds = {PRODUCTS: [4.0, 9.0, 4.0], TRANSFERS: [2.0] * 3, "1": [6.0, 6.2, 6.1]}
    one = overlap_of("output", {**seconds, "2": [5.5] * 3, "4": [4.8, 4.7, 4.9]})
    assert one == Overlap(4.0, 2.0, 6.1, 4.8, 4, 4.5)
    assert one.gain == pytest.approx(6.1 / 4.8)


def made_points(hop: float, rate: float) -> list[dict[str, Any]]:
    """Transfers on a line without noise; of a reduce-scatter each step takes twice as long."""
    return [
        {
            "kind": kind,
            "ranks": ranks,
            "shard_bytes": shard,
            "seconds": 0.001 + times * (ranks - 1) * (hop + shard / rate),
        }
        for kind, times in {"all_gather": 1, "reduce_scatter": 2}.items()
        for ranks in (2, 4)
        for shard in (MIB // 4, MIB, 8 * MIB)
    ]


def points_of(rate: float) -> dict[str, Any]:
    """Products at 1 GFLOP/s."""
    return {
        "products": [(side, 2e-9 * side**3) for side in (256, 512)],
        "copied_bytes_per_second": 1e12,
        "transfers": made_points(1e-4, rate),
    }


def test_a_model_is_fitted_to_its_points_and_judged_by_large_ones() -> None:
    hardware = hardware_of(points_of(1e7))
    assert hardware.peak == pytest.approx(1e9) and hardware.ranks_per_host == 1
    exact = transfer_errors(made_points(1e-4, 1e7), hardware)
    assert len(exact) == 8 and max(map(abs, exact)) < 1e-6
    slower = transfer_errors(made_points(1e-4, 5e6), hardware)
    assert len(slower) == 8 and max(slower) < -0.45


def of_rate(measured: dict[int, float]) -> dict[str, Any]:
    """A rate of the JSON: every flow takes the seconds of its slices in one round, 2 % more in the
    other; on a single mesh row 1 % more."""
    meshes = []
    for mesh, times in {(2, 2): 1.0, (1, 4): 1.01}.items():
        seconds: dict[str, Any] = {
            f"MeshSlice {count}": {
                f"{one.name} {way}": [times * each, 1.02 * times * each]
                for one in SETTING.products
                for way in PASSES
            }
            for count, each in measured.items()
        }
        seconds["SUMMA"] = {name: [2.0, 2.0] for name in seconds["MeshSlice 1"]}
        meshes.append({"mesh": mesh, "seconds": seconds, "transfers": made_points(1e-4, 1e7)})
    return {"setting": asdict(SETTING), "measured": {"points": points_of(1e7), "meshes": meshes}}


def test_the_choice_and_how_good_it_was() -> None:
    one = Measured.of(of_rate({1: 3.0, 2: 1.0}))
    best = choose(one.seconds)
    assert best == Choice((2, 2), dict.fromkeys(("qkv", "out", "gate_up", "down"), 2))
    assert best.name == "2 × 2 in 2, 2, 2, 2"
    assert total(one.seconds, best) == pytest.approx(12 * median([1.0, 1.02]))
    assert one.spread(best) == pytest.approx(1.02)
    mixed = {key: dict(each) for key, each in one.seconds.items()}
    mixed[(2, 2), 1]["out"] = 0.5
    assert choose(mixed).slices == {"qkv": 2, "out": 1, "gate_up": 2, "down": 2}
    assert one.predicted.keys() == one.seconds.keys()
    assert one.engines((1, 4))["SUMMA"] == pytest.approx(24)


def test_the_tables_say_what_was_measured() -> None:
    square = {PRODUCTS: [4.0], TRANSFERS: [2.0], "1": [6.0], "2": [4.8], "4": [4.5]}
    setting = asdict(replace(SETTING, part="overlap", ratio=0.7))
    result = {
        "overlap": {"rates": [{"setting": setting, "measured": {"output": square}}]},
        "block": {"rates": [{"setting": setting, "measured": {"1": [6.0], "2": [4.9]}}]},
        "baselines": {"rates": [of_rate({1: 1.0, 2: 1.0})]},
    }
    found = figures({name: {**part, **ABOUT} for name, part in result.items()})
    last = {name: figure.splitlines()[-1] for name, figure in found.items()}
    assert last["overlap"].endswith("| 0.50 | 4.000 | 2.000 | 6.000 | 4.500 | 4 | 1.33 | 4.500 |")
    assert last["block"] == "| 100 | 6.000 | 4.900 | 1.22 |"
    assert last["slices"].startswith("| 100, 1 × 4 | 12.24 / ")
    assert last["others"].split(" | ")[1:3] == ["12.24", "1.00"] and "1.96" in last["others"]
    assert last["foreseen"].startswith("| 100 | 16 | 0.0 % | 0.0 % | 1 × 4 in 2, 2, 2, 2 |")
    first, second = found["summary"].splitlines()
    assert "is 1.33 times as fast, on links that take 0.5 times" in first
    assert "At 100 Mbit/s the tuner picks 1 × 4 in 2, 2, 2, 2 slices" in second
    assert "the fastest (SUMMA) takes 1.96 times as long. On 2 × 2" in second
    assert last["measured"].endswith("2 rounds (`block`) and 2 rounds (`baselines`).")


def test_the_mesh_that_the_tuner_picks_beside_megatron() -> None:
    assert tuned(SETTING, points_of(1e7)) == choose(
        Measured.of(of_rate({1: 1.0, 2: 1.0})).predicted
    )
    seconds = {MEGATRON: [4.0, 5.0, 4.5], ONE_SLICE: [6.0], TUNED: [3.0, 3.6, 3.5]}
    measured = {"mesh": [1, 4], "slices": [2, 2, 2, 2], "seconds": seconds}
    part = {**ABOUT, "rates": [{"setting": asdict(SETTING), "measured": measured}]}
    last = figures({"tuned": part})["tuned"].splitlines()[-1]
    place = "100, 1 × 4 in 2, 2, 2, 2"
    assert last == f"| {place} | 3.50 | 3.00 to 3.60 | 6.00 | 4.50 | 4.00 to 5.00 | 0.78 |"
