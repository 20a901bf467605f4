"""Ranks that a legal recipe leaves without work are told, with what to write instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.shapes import TINY
from uspft.prepare.examine import Examined, examine
from uspft.prepare.waste import wasted


def examined(folder: Path, rows: int, **changes: Any) -> Examined:
    """A recipe of a model with 8 query heads, on as many processes as its degrees ask for."""
    (folder / "config.json").write_text(json.dumps({**TINY, "model_type": "llama"}))
    (folder / "d.jsonl").write_text('{"input_ids": [1, 2]}\n')
    tree = {
        "model": {"config": str(folder / "config.json"), "dtype": "float32"},
        "data": {"train": str(folder / "d.jsonl"), "sequence_length": 64},
        "training": {"steps": 1, "global_batch_size": rows, "micro_batch_size": 1},
        "launch": {"device": "cpu"},
    }
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value}
    (folder / "r.yaml").write_text(yaml.safe_dump(tree))
    return examine(folder / "r.yaml", [], 1, None)


def hybrid(ulysses: int, ring: int = 1, **more: Any) -> dict[str, Any]:
    ways = {"context_parallel": ulysses * ring, "ulysses_degree_in_cp": ulysses}
    return {**ways, "context_parallel_algo": "hybrid_cp", **more}


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (hybrid(8, 2), []),
        (
            hybrid(16, 2),
            [
                "parallel_config.ulysses_degree_in_cp: Ulysses splits 8 query heads over 16 ranks:"
                " 8 of them compute no attention; split heads 8 ways at most, and tokens the rest"
            ],
        ),
        (
            {"context_parallel": 16, "context_parallel_algo": "ulysses_cp"},
            [
                "parallel_config.context_parallel: Ulysses splits 8 query heads over 16 ranks: 8 of"
                " them compute no attention; split heads 8 ways at most, and tokens the rest"
            ],
        ),
        (
            hybrid(4, model_parallel=4),
            [
                "parallel_config.ulysses_degree_in_cp: Ulysses splits 2 query heads of a tensor "
                "rank over 4 ranks: 2 of them compute no attention; split heads 2 ways at most, "
                "and tokens the rest"
            ],
        ),
        ({"context_parallel": 16, "context_parallel_algo": "ring_cp"}, []),
    ],
)
def test_ulysses_ranks_without_heads(
    tmp_path: Path, parallel: dict[str, Any], told: list[str]
) -> None:
    assert wasted(examined(tmp_path, 1, parallel_config=parallel)) == told


@pytest.mark.parametrize(
    ("rows", "micro", "told"),
    [
        (8, 1, []),
        (4, 2, ["4 rows a step leave 4 of 8 places empty (one pass of 4 replicas, 2 rows each)"]),
        (1, 1, ["a row a step leaves 3 of 4 places empty (one pass of 4 rows)"]),
        (6, 1, ["6 rows a step leave 2 of 8 places empty (2 passes of 4 rows)"]),
    ],
)
def test_replicas_without_rows(tmp_path: Path, rows: int, micro: int, told: list[str]) -> None:
    found = examined(
        tmp_path, rows, training={"micro_batch_size": micro}, parallel_config={"data_parallel": 4}
    )
    remedy = f"which compute padding; write a multiple of {4 * micro}, or use fewer processes"
    assert wasted(found) == [f"training.global_batch_size: {line}, {remedy}" for line in told]


def test_each_strategy_is_looked_at_and_its_samples_are_not(tmp_path: Path) -> None:
    strategies = [{"max_length": 16}, {"max_length": 64, **hybrid(16)}]
    (line,) = wasted(examined(tmp_path, 1, parallel_config={"strategies": strategies}))
    assert line.startswith("parallel_config.strategies[1].ulysses_degree_in_cp: Ulysses splits 8 ")
