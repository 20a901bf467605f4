"""Recipes that ask for matrices to be split as they cannot be: a line names the key and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.refused import Ground

PARALLEL = "parallel_config"
MESH = {"model_parallel": 4, "tensor_parallel_algo": "meshslice"}
RECIPES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "tensor ranks": (
        {PARALLEL: {"model_parallel": 3}, "launch.processes": 3},
        f"{PARALLEL}.model_parallel",
        ("4 query heads and 2 key-value heads do not split over 3 ranks", "write one of 1, 2, 4"),
    ),
    "tokens between whole matrices": (
        {PARALLEL: {"use_seq_parallel": True}},
        f"{PARALLEL}.use_seq_parallel",
        ("is true, and model_parallel is 1", "write false, or model_parallel above 1"),
    ),
    "mesh of other ranks": (
        {PARALLEL: MESH | {"tensor_mesh": [2, 3]}},
        f"{PARALLEL}.tensor_mesh",
        ("is [2, 3], 6 ranks, and model_parallel is 4", "write one of [1, 4], [2, 2], [4, 1]"),
    ),
    "mesh of one rank": (
        {PARALLEL: {"tensor_parallel_algo": "meshslice", "tensor_mesh": [1, 1]}},
        f"{PARALLEL}.tensor_mesh",
        ("is [1, 1], and model_parallel is 1: no matrix is split", "model_parallel above 1"),
    ),
    "slices of no product": (
        {PARALLEL: {"tensor_parallel_algo": "meshslice", "tensor_slices": 4}},
        f"{PARALLEL}.tensor_slices",
        ("is 4, and model_parallel is 1: no matrix is split", "leave it out, or write"),
    ),
    "mesh columns": (
        {PARALLEL: MESH | {"model_parallel": 3, "tensor_mesh": [1, 3]}, "launch.processes": 3},
        f"{PARALLEL}.tensor_mesh",
        ("hidden_size 64 does not split over a mesh of 1 × 3", "write another model_parallel"),
    ),
    "heads on mesh columns": (
        {PARALLEL: MESH | {"model_parallel": 8, "tensor_mesh": [1, 8]}, "launch.processes": 8},
        f"{PARALLEL}.tensor_mesh",
        (
            "4 query heads and 2 key-value heads do not split over 8 mesh columns",
            "write one of [2, 4], [4, 2], [8, 1]",
        ),
    ),
    "slices": (
        {PARALLEL: MESH | {"tensor_mesh": [2, 2], "tensor_slices": [1, 2, 3, 5]}},
        f"{PARALLEL}.tensor_slices",
        ("is 3 and 5, which does not slice hidden_size 64 on 2 × 2 ranks", "write 4 and 8"),
    ),
    "tokens split twice": (
        {PARALLEL: MESH | {"use_seq_parallel": True}},
        f"{PARALLEL}.use_seq_parallel",
        ("meshslice splits tokens between matrices already, over mesh rows", "write false"),
    ),
    "Ulysses on no mesh": (
        {PARALLEL: MESH | {"ulysses_degree_in_cp": 3}},
        f"{PARALLEL}.ulysses_degree_in_cp",
        ("is 3, which does not divide model_parallel: 4 × context_parallel: 1", "of 1, 2, 4"),
    ),
    "Ulysses that the mesh decides": (
        {PARALLEL: MESH | {"context_parallel_algo": "ulysses_cp", "ulysses_degree_in_cp": 4}},
        f"{PARALLEL}.ulysses_degree_in_cp",
        ("is 4, and with ulysses_cp the mesh that is chosen decides it", "write tensor_mesh"),
    ),
    "Ulysses in a ring of mesh rows": (
        {PARALLEL: MESH | {"context_parallel_algo": "ring_cp", "ulysses_degree_in_cp": 2}},
        f"{PARALLEL}.ulysses_degree_in_cp",
        ("is 2, and with ring_cp it is 1", "leave it out"),
    ),
    "no Ulysses degree among mesh rows": (
        {PARALLEL: MESH | {"context_parallel_algo": "hybrid_cp"}},
        f"{PARALLEL}.ulysses_degree_in_cp",
        ("is missing, and context_parallel_algo is hybrid_cp", "write one of 1, 2, 4"),
    ),
    "a mesh under megatron": (
        {PARALLEL: {"model_parallel": 2, "tensor_slices": 2}},
        f"{PARALLEL}.tensor_slices",
        ("is 2, and only meshslice has it", "write auto, or leave it out"),
    ),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_split_that_cannot_be(
    ground: Ground, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    changes, key, words = RECIPES[case]
    ground.write(changes)
    line = ground.call(capsys).about(key, *words)
    what, remedy = map(line.index, words)
    assert line.index(key) < what < remedy
