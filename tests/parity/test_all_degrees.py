"""Tensor 2 × Ulysses 2 × ring 2 on eight processes, and nothing else, beside one process.

Every rank has a place of its own on each of the three axes: groups that were numbered by another
order of axes would show here, and nowhere where one of the degrees is 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.models import mismatch
from tests.support.ranks import spawn
from tests.support.runs import run_recipe
from tests.support.tensor import Case, Data, make_setting, recipe, wanted
from uspft.layout import Layout
from uspft.tensor.megatron import Megatron

LAYOUT = Layout(mesh_columns=2, ulysses=2, ring=2)
CASES = {
    "hybrid_cp": Case("llama", (2, 4), "zero3 whole", True, True),
    "planned_cp": Case("qwen3", (2, 4), "zero1", False, False),
}
"""By algorithm. Each rank has one key-value head, which Ulysses gives to two."""


def work(rank: int, names: list[str], folder: Path, data: Data) -> dict[str, Any]:
    """By algorithm what its case gave, and the layouts that ran."""
    found = {}
    for name in names:
        layouts: list[Layout] = []
        own = {"context_parallel_algo": name, "ulysses_degree_in_cp": 2}

        def see(run: Any, layouts: list[Layout] = layouts) -> None:
            layouts.append(run.world.layout)

        asked = recipe(CASES[name], folder, data, parallel_config=own)
        got = run_recipe(asked, folder / f"run-{name}-of-{len(names)}", before=see)
        found[name] = got, layouts
    return found


def apart(rank: int, folder: Path, data: Data) -> dict[str, Any]:
    """A fault: what tensor ranks find out about a block's input is not summed."""
    with patch.object(Megatron, "enter", lambda self, x, tokens, group: x):
        return work(rank, ["planned_cp"], folder, data)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Data]:
    folder = tmp_path_factory.mktemp("all")
    return folder, make_setting(folder)


def test_all_degrees_together_are_one_process(setting: tuple[Path, Data]) -> None:
    found = spawn(8, work, list(CASES), *setting)[0]
    assert found.keys() == CASES.keys()
    for name, (got, layouts) in found.items():
        assert layouts == [LAYOUT] and (LAYOUT.ranks, LAYOUT.data) == (8, 1)
        assert mismatch(got, wanted(CASES[name], setting)) == [], name


def test_gradients_that_are_not_summed_are_seen(setting: tuple[Path, Data]) -> None:
    ((got, _),) = spawn(8, apart, *setting)[0].values()
    found = mismatch(got, wanted(CASES["planned_cp"], setting))
    assert any("grad_norm" in line for line in found)
