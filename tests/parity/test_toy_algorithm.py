"""A new algorithm is one class and one row of the table: nothing else is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from tests.support.models import Documents, make_documents, make_model, mismatch, reference
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from uspft.config import RecipeError
from uspft.config.algorithms import CONTEXT, AlgorithmRow, Splits
from uspft.config.messages import schema_of
from uspft.planner.ways import candidates
from uspft.prepare.examine import examine
from uspft.prepare.layout_findings import layout_findings
from uspft.segments import Segments
from uspft.sequence import Algorithm, Cost, Heads, Share
from uspft.sequence.algorithm import rows_must_divide
from uspft.sequence.exchange import ExchangePasses
from uspft.sequence.rows.exchange import Exchange

ROW, STEPS = 64, 2


@dataclass(frozen=True)
class Consecutive(Algorithm):
    """Rank i holds the i-th part of a row as it stands, and is sent all keys."""

    ring: int = 1
    ulysses: int = 1

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        return rows_must_divide(row_tokens, self.ring)

    def token_order(self, segments: Segments) -> list[Any]:
        each = segments.length // self.ring
        return [((i * each, (i + 1) * each),) for i in range(self.ring)]

    def passes(self, share: Share, *, keeps: bool = False) -> ExchangePasses:
        make = lambda: Exchange(share, 1, trimmed=False, keep=False)  # noqa: E731
        return ExchangePasses(share.once("toy", make))

    def keys_cost(self, *of: Any) -> Cost:
        return Cost()


ROW_OF_IT = AlgorithmRow(
    "consecutive_cp",
    f"{__name__}:Consecutive",
    Splits.TOKENS,
    short="consecutive",
    alone="tokens as they stand",
    synonyms=("toy_cp",),
)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    schema_of.cache_clear()
    with monkeypatch.context() as for_now:
        for_now.setitem(CONTEXT, ROW_OF_IT.name, ROW_OF_IT)
        yield
    schema_of.cache_clear()


def recipe(folder: Path, data: Documents, algorithm: str) -> dict[str, Any]:
    return small_recipe(
        folder / "model",
        data.path,
        ROW,
        parallel_config={"context_parallel": 2, "context_parallel_algo": algorithm},
        training={"steps": STEPS, "global_batch_size": 1, "max_grad_norm": 0.5},
    )


def work(rank: int, folder: Path, data: Documents) -> Any:
    CONTEXT[ROW_OF_IT.name] = ROW_OF_IT
    return run_recipe(recipe(folder, data, "toy_cp"), folder / "out")


@pytest.fixture
def setting(tmp_path: Path) -> tuple[Path, Documents]:
    make_model(tmp_path / "model", "llama", kv_heads=2)
    return tmp_path, make_documents(tmp_path / "d.jsonl", [ROW, 50], masked=[0.2])


def examined(folder: Path, data: Documents, algorithm: str) -> Any:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(folder, data, algorithm)))
    return examine(path, ["launch.processes=2"], 1, None, trains=False)


def test_it_is_parsed_checked_and_listed(listed: None, setting: tuple[Path, Documents]) -> None:
    found = examined(*setting, "toy_cp")
    assert found.recipe.parallel_config.context_parallel_algo == ROW_OF_IT.name
    assert "each row shared by 2 (tokens as they stand)" in found.sentence
    assert found.layout.name(ROW_OF_IT.name) == "consecutive2"
    with pytest.raises(RecipeError, match="did you mean `consecutive_cp`"):
        examined(*setting, "consecutiv_cp")

    def problems(tried: Any, layout: Any) -> Any:
        return layout_findings(tried, layout, found.shape)

    verified = [one.name for one in candidates(found.recipe, 2, problems) if one.reason is None]
    assert verified[0] == "consecutive2" and "ring2" in verified


def test_nobody_knows_it_without_its_row(setting: tuple[Path, Documents]) -> None:
    with pytest.raises(RecipeError, match="unknown value `toy_cp`"):
        examined(*setting, "toy_cp")


def test_it_trains_as_one_process(setting: tuple[Path, Documents]) -> None:
    folder, data = setting
    got = spawn(2, work, folder, data)[0]
    steps = [[document] for document in data.documents]
    assert mismatch(got, reference(folder / "model", steps, rate=1e-3, clip=0.5)) == []
    assert got[0][0]["strategy"] == "consecutive2" and got[0][0]["comm_bytes"]["gather"] > 0
    assert not dist.is_initialized()
