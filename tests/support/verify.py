"""A recipe to verify, its layouts, and what ranks have measured under one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from uspft.config import Recipe
from uspft.planner.ways import Candidate, candidates
from uspft.prepare.layout_findings import layout_findings
from uspft.verify.work import Difference, Measured, Result


def recipe(folder: Path = Path("model"), **blocks: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"name_or_path": str(folder), "dtype": "float32"},
        "data": {"train": "d.jsonl", "sequence_length": 96},
        "training": {"steps": 3, "global_batch_size": 2},
        "launch": {"device": "cpu", "processes": 2},
    }
    return Recipe.model_validate(
        {key: {**base.get(key, {}), **blocks.get(key, {})} for key in {**base, **blocks}}
    )


def layouts(given: Recipe, ranks: int) -> list[Candidate]:
    return candidates(given, ranks, lambda r, layout: layout_findings(r, layout, None))


def own(**parallel: Any) -> dict[str, Any]:
    return {"parallel_config": parallel}


RING = own(data_parallel=1, context_parallel=2, context_parallel_algo="ring_cp")
REFERENCE = Measured([2.0], [1.0], [7])


def result(loss: float = 2.0, norm: float = 1.0, off: float = 0.0) -> Result:
    groups = {"attention": Difference(off, "q"), "mlp": Difference(0.0, "up")}
    return Result(Measured([loss], [norm], [7]), groups)
