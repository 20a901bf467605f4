"""Ranks, coordinates and groups against lists written by hand; zigzag against USP's own figure."""

from __future__ import annotations

from typing import Any

import pytest

from uspft.config.recipe import ParallelBlock
from uspft.layout import AXES, COPIES, MESH, Layout, as_processes, context_degrees, layout_of
from uspft.segments import Segments
from uspft.sequence.rows.balance import balanced


def test_neighbours_share_the_axis_with_the_most_traffic() -> None:
    assert AXES == ("mesh_columns", "ulysses", "ring", "data", "pipeline")
    layout = Layout(2, 2, 2, 2, 2)
    assert (layout.ranks, layout.tensor, layout.context, layout.copies) == (32, 2, 4, 8)
    for rank in range(32):
        # A rank is a binary number whose lowest digit is the first axis.
        digits = [int(digit) for digit in reversed(f"{rank:05b}")]
        place = layout.coordinates(rank)
        assert [place[axis] for axis in AXES] == digits
    uneven = Layout(ulysses=2, ring=3, data=4)
    place = {"ulysses": 1, "ring": 2, "data": 3, "pipeline": 0}
    held = {"mesh_columns": 0, "mesh_rows": 0, "experts": 0, "alike": 23}
    assert uneven.coordinates(23) == {**held, **place}


def test_the_rows_of_a_mesh_are_among_the_ranks_that_share_a_row() -> None:
    """Mesh 2 × 2 under context 4 (Ulysses 2 × ring 2) and data 2: ranks, by hand."""
    layout = Layout(2, ulysses=2, ring=2, data=2, mesh_rows=2, blocks=True)
    assert (layout.ranks, layout.tensor, layout.context, layout.copies) == (16, 4, 4, 4)
    assert layout.groups(MESH) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert sorted(layout.groups(["mesh_rows"]))[:3] == [[0, 2], [1, 3], [4, 6]]
    assert sorted(layout.groups(["mesh_columns"]))[:3] == [[0, 1], [2, 3], [4, 5]]
    assert sorted(layout.groups(["ulysses", "ring"]))[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sorted(layout.groups(COPIES)) == [[i, i + 4, i + 8, i + 12] for i in range(4)]
    three = Layout(1, ring=3, mesh_rows=3, blocks=True)
    assert three.groups(MESH) == [[0, 1, 2]] and three.groups(COPIES) == [[0], [1], [2]]
    with pytest.raises(ValueError, match="2 mesh rows do not divide 3"):
        Layout(ring=3, mesh_rows=2, blocks=True)


# Two rows at a time, each shared by Ulysses 2 × ring 2: the groups of the USP paper's code.
USP = {
    ("ulysses",): [[0, 1], [2, 3], [4, 5], [6, 7]],
    ("ring",): [[0, 2], [1, 3], [4, 6], [5, 7]],
    ("data",): [[0, 4], [1, 5], [2, 6], [3, 7]],
    MESH: [[rank] for rank in range(8)],
    ("pipeline",): [[rank] for rank in range(8)],
    ("ulysses", "ring"): [[0, 1, 2, 3], [4, 5, 6, 7]],
    ("ulysses", "ring", "data"): [list(range(8))],
    AXES: [list(range(8))],
}


@pytest.mark.parametrize("axes", USP)
def test_groups_of_usp(axes: tuple[str, ...]) -> None:
    assert sorted(Layout(ulysses=2, ring=2, data=2).groups(axes)) == USP[axes]


@pytest.mark.parametrize("axis", AXES)
def test_groups_of_every_axis(axis: str) -> None:
    layout = Layout(2, ulysses=3, ring=2, data=2, pipeline=2)
    groups = layout.groups([axis])
    assert sorted(rank for group in groups for rank in group) == list(range(48))
    for group in groups:
        every = [layout.coordinates(rank) for rank in group]
        places = [{axis: place[axis] for axis in AXES} for place in every]
        assert [place.pop(axis) for place in places] == list(range(getattr(layout, axis)))
        assert all(place == places[0] for place in places)


def test_groups_with_tensor_and_pipeline() -> None:
    layout = Layout(2, ulysses=2, pipeline=2)
    assert sorted(layout.groups(MESH)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(layout.groups(["ulysses"])) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(layout.groups(["pipeline"])) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def parallel(**fields: Any) -> ParallelBlock:
    return ParallelBlock.model_validate(fields)


HYBRID = {"context_parallel": 8, "context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": 4}


@pytest.mark.parametrize(
    ("fields", "degrees"),
    [
        ({}, (1, 1)),
        ({"context_parallel_algo": "ring_cp"}, (1, 1)),
        ({"context_parallel": 4, "context_parallel_algo": "ulysses_cp"}, (4, 1)),
        ({"context_parallel": 4, "context_parallel_algo": "ring_cp"}, (1, 4)),
        ({"context_parallel": 4, "context_parallel_algo": "allgather_cp"}, (1, 4)),
        ({"context_parallel": 4, "context_parallel_algo": "planned_cp"}, (1, 4)),
        (HYBRID | {"context_parallel_algo": "planned_cp"}, (4, 2)),
        (HYBRID, (4, 2)),
    ],
)
def test_context_degrees(fields: dict[str, Any], degrees: tuple[int, int]) -> None:
    assert context_degrees(parallel(**fields)) == degrees


@pytest.mark.parametrize(
    ("fields", "ranks", "layout"),
    [
        ({}, 3, Layout(data=3)),
        ({}, None, Layout()),
        (HYBRID, 16, Layout(ulysses=4, ring=2, data=2)),
        (HYBRID, None, Layout(ulysses=4, ring=2)),
        (HYBRID | {"data_parallel": 2}, None, Layout(ulysses=4, ring=2, data=2)),
        (HYBRID | {"data_parallel": 2}, 16, Layout(ulysses=4, ring=2, data=2)),
    ],
)
def test_layout_of(fields: dict[str, Any], ranks: int | None, layout: Layout) -> None:
    assert layout_of(parallel(**fields), ranks) == layout


@pytest.mark.parametrize(
    ("fields", "ranks", "key", "words"),
    [
        (HYBRID, 12, "context_parallel", ["= 8 does not divide the 12", "a multiple of 8"]),
        (HYBRID, 4, "context_parallel", ["does not divide the 4", "a multiple of 8"]),
        (
            HYBRID | {"data_parallel": 3},
            16,
            "data_parallel",
            ["stage 1 = 24 processes", "has 16", "or 2"],
        ),
        ({"data_parallel": 3}, 2, "data_parallel", ["3 processes", "has 2", "auto, or 2"]),
    ],
)
def test_what_does_not_fit_is_told(
    fields: dict[str, Any], ranks: int, key: str, words: list[str]
) -> None:
    found = layout_of(parallel(**fields), ranks)
    assert not isinstance(found, Layout) and len(found) == 3
    assert found[0] == f"parallel_config.{key}"
    assert [word for word in words if word not in f"{found[1]}; {found[2]}"] == []


@pytest.mark.parametrize(
    ("layout", "algorithm", "sentence", "name"),
    [
        (Layout(), None, "1 process, each row whole on one process, 1 row at a time", "single"),
        (Layout(data=2), None, "2 processes, each row whole on one process, 2 rows", "data2"),
        (Layout(ulysses=4), "ulysses_cp", "4 processes, each row shared by 4 (Ulysses)", ""),
        (Layout(ring=4), "ring_cp", "4 processes, each row shared by 4 (zigzag ring)", "ring4"),
        (Layout(ring=4), "allgather_cp", "each row shared by 4 (all-gather), 1 row", "allgather4"),
        (
            Layout(ulysses=2, ring=4),
            "planned_cp",
            "each row shared by 8 (Ulysses 2 × exchange 4), 1 row",
            "ulysses2-planned4",
        ),
        (
            Layout(ulysses=2, ring=2, data=2),
            "hybrid_cp",
            "8 processes, each row shared by 4 (Ulysses 2 × ring 2), 2 rows at a time",
            "ulysses2-ring2-data2",
        ),
    ],
)
def test_a_layout_in_words(layout: Layout, algorithm: str | None, sentence: str, name: str) -> None:
    assert sentence in layout.sentence(algorithm)
    assert name in layout.name(algorithm)


def test_layouts_of_other_algorithms_have_other_names() -> None:
    ring = Layout(ring=2)
    names = {ring.name(algorithm) for algorithm in ("ring_cp", "allgather_cp", "planned_cp")}
    assert names == {"ring2", "allgather2", "planned2"} and ring.name() == "ring2"


# 16 tokens on 4 ranks (USP, 2405.07719, algorithm 2), by Ulysses and ring degree.
ZIGZAG = {
    (1, 4): [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
    (2, 2): [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]],
    (4, 1): [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
}


@pytest.mark.parametrize("degrees", ZIGZAG)
def test_who_holds_what_of_sixteen_tokens(degrees: tuple[int, int]) -> None:
    order = balanced(Segments.single(16), *degrees)
    assert [[p for a, b in runs for p in range(a, b)] for runs in order] == ZIGZAG[degrees]


@pytest.mark.parametrize(
    ("layout", "sentence", "name"),
    [
        (
            Layout(2, 2, 2, 2, 2),
            "32 processes, each matrix split over 2 (tensor 2), each row shared by 4 "
            "(Ulysses 2 × ring 2), layers in 2 stages, 2 rows at a time",
            "tensor2-ulysses2-ring2-data2-pipeline2",
        ),
        (
            Layout(4, ring=2, data=2, mesh_rows=2, blocks=True),
            "16 processes, each matrix split over 8 (mesh 2 × 4), each row shared by 2 "
            "(zigzag ring), 2 rows at a time",
            "mesh2x4-ring2-data2",
        ),
        (
            Layout(4, blocks=True),
            "4 processes, each matrix split over 4 (mesh 1 × 4), each row whole on each of them, "
            "1 row at a time",
            "mesh1x4",
        ),
        (
            Layout(1, 4, mesh_rows=4, blocks=True),
            "4 processes, each matrix split over 4 (mesh 4 × 1), each row shared by 4 (Ulysses), "
            "1 row at a time",
            "mesh4x1-ulysses4",
        ),
    ],
    ids=str,
)
def test_every_axis_in_words(layout: Layout, sentence: str, name: str) -> None:
    assert layout.sentence("hybrid_cp") == sentence
    assert layout.name("hybrid_cp") == name


def test_a_mesh_that_is_not_chosen_is_not_told_as_chosen() -> None:
    told = "each matrix split over 8 (a mesh that the model's sizes decide), each row shared by its"
    layout = Layout(mesh_columns=8, data=2, blocks=True)
    assert layout.sentence("planned_cp", open_=True) == (
        f"16 processes, {told} rows, 2 rows at a time"
    )
    longer = Layout(mesh_columns=4, ring=2, blocks=True).sentence("planned_cp", open_=True)
    assert "each row shared by its rows × 2, 1 row at a time" in longer
    assert "mesh 1 × 8" in layout.sentence("planned_cp")


def test_one_process_is_no_processes() -> None:
    assert [as_processes(count) for count in (1, 2)] == ["1 process", "2 processes"]
