"""`verify` of the quickstart on GPUs: every legal layout beside one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.gpu import Row, needs, ran
from tests.support.launch import ROOT

RECIPE = ROOT / "recipes/quickstart.yaml"


def quickstart(gpus: int) -> dict[str, Any]:
    """The quickstart for bfloat16 on so many GPUs, with its paths whole."""
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    for key in ("config", "tokenizer"):
        recipe["model"][key] = str((RECIPE.parent / recipe["model"][key]).resolve())
    recipe["model"]["dtype"] = "bfloat16"
    recipe["parallel_config"] = {"context_parallel": gpus, "context_parallel_algo": "ulysses_cp"}
    return {**recipe, "launch": {"device": "cuda", "processes": gpus}}


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gpus", [pytest.param(n, marks=needs(n)) for n in (1, 2, 8)])
def test_the_quickstart_is_verified(tmp_path: Path, gpus: int, row: Row) -> None:
    code, shown = ran(quickstart(gpus), tmp_path, verb="verify", seconds=3000)
    reports = list((tmp_path / "out").rglob("verify.json"))
    layouts = len(json.loads(reports[0].read_text())["layouts"]) if reports else 0
    row(f"verify of the quickstart, {gpus} GPUs", f"exit code {code}, {layouts} layouts")
    assert code == 0, shown[-4000:]
