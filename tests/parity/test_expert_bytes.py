"""What ranks that divide experts send, against what the cost model says of the same choices, to the
byte and the message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.experts.counted import cost
from tests.support.models import make_model
from tests.support.ranks import spawn
from tests.support.routers import ROW, documents
from tests.support.runs import run_recipe, small_recipe
from tests.support.stages import ZERO
from uspft.comm import Books
from uspft.config.inputs import ModelBlock
from uspft.families import ModelShape, read_shape
from uspft.planner.expert_traffic import RoutedRows, RowSizes
from uspft.sequence import Traffic

RANKS, LAYERS, WIDTH = 4, 2, 4


@dataclass(frozen=True)
class Case:
    model: str
    experts: int
    zero: str
    recompute: bool = False
    tiles: bool = False
    rows: int = 1
    """Rows of a rank in a step, each of a forward of its own."""

    @property
    def forwards(self) -> int:
        return 1 + self.recompute


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("glm4_moe", {"first_k_dense_replace": 0}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "gpt_oss": ("gpt_oss", {}),
}
CASES = [
    Case("glm4_moe", 2, "zero1", recompute=True),
    Case("ernie4_5_moe", 2, "zero1", recompute=True),
    Case("qwen3_moe", 4, "zero3 whole", recompute=True, rows=2),
    Case("gpt_oss", 4, "zero2", tiles=True),
]


@contextmanager
def noted(routes: list[tuple[list[int], list[int], int]], pages: list[Any]) -> Iterator[None]:
    """Keep where rows go and from where they come, and what the books have when they close."""
    from uspft.model.experts import Dispatch

    found, close = Dispatch.of, Books.close

    def of(ranks: Any, group: Any) -> Any:
        one = found(ranks, group)
        routes.append((one.send, one.receive, group.index))
        return one

    def closed(books: Books) -> dict[str, int]:
        page = books.bytes["experts"], books.messages["experts"]
        pages.extend([page] if any(page) else [])
        return close(books)

    with patch.object(Dispatch, "of", of), patch.object(Books, "close", closed):
        yield


def work(rank: int, folder: Path) -> list[Any]:
    """By case: where rows went in each forward, and what the books have of each step."""
    data, every = documents(folder / f"{rank}.jsonl"), []
    for number, case in enumerate(CASES):
        routes: list[tuple[list[int], list[int], int]] = []
        pages: list[Any] = []
        memory = {"gradient_checkpointing": case.recompute}
        recipe = small_recipe(
            folder / case.model,
            data.path,
            ROW,
            data={"packing": "best_fit"},
            parallel_config={"expert_parallel": case.experts},
            training={"steps": 2, "global_batch_size": case.rows * RANKS},
            memory={**memory, **({"mlp_tile_tokens": 5} if case.tiles else {})},
            deepspeed={"zero_optimization": ZERO[case.zero]},
        )
        with noted(routes, pages):
            run_recipe(recipe, folder / str(number))
        every.append((routes, pages))
    return every


def sizes_of(folder: Path) -> RowSizes:
    shape = read_shape(ModelBlock(config=folder / "config.json"), folder)
    assert isinstance(shape, ModelShape) and shape.layers == LAYERS
    return RowSizes.of(shape, WIDTH)


def counted(send: Sequence[int], receive: Sequence[int], own: int) -> RoutedRows:
    """The rows to and from each rank of a set, in which this one's place is `own`."""
    gone, come = (
        [count for place, count in enumerate(rows) if count and place != own]
        for rows in (send, receive)
    )
    return RoutedRows(sum(gone), sum(come), len(gone), len(come))


def first_forwards(case: Case, routes: list[Any]) -> list[Any]:
    """Where rows go in each pass that is the first; behind it its layers come again."""
    each = LAYERS * case.forwards
    passes = [routes[at : at + each] for at in range(0, len(routes), each)]
    if case.recompute:
        assert all(one[:LAYERS] == one[: LAYERS - 1 : -1] for one in passes)
    return [route for one in passes for route in one[:LAYERS]]


@pytest.mark.timeout(300)
def test_the_books_have_what_the_cost_model_says(tmp_path: Path) -> None:
    for name, (kind, extra) in MODELS.items():
        make_model(tmp_path / name, kind, kv_heads=2, initializer_range=0.1, **extra)
    answers = spawn(RANKS, work, tmp_path)
    uneven = Counter[int]()
    for number, case in enumerate(CASES):
        sizes = sizes_of(tmp_path / case.model)
        for routes, pages in (one[number] for one in answers):
            first = first_forwards(case, routes)
            other_way = replace(sizes, returns_again=not sizes.returns_again)
            assert len(first) == 2 * case.rows * LAYERS and len(pages) == 2
            said = [cost(counted(*route), sizes, case.experts, case.forwards) for route in first]
            each = len(first) // 2
            for step, page in enumerate(pages):
                mine = said[step * each : (step + 1) * each]
                want = Traffic(sum(m.bytes for m in mine), sum(m.messages for m in mine))
                assert page == want, (case, step)
            other = [cost(counted(*r), other_way, case.experts, case.forwards) for r in first]
            assert (other != said) == case.recompute, "what is run again ends as it is told"
            uneven[number] += sum(len({*send}) > 1 for send, _, _ in first)
    assert [sizes_of(tmp_path / one.model).returns_again for one in CASES] == [True, *[False] * 3]
    assert all(uneven[number] for number in range(len(CASES))), "rows that are sent are uneven"
