"""What a mesh computes and moves in one forward and backward, by formula."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hardware import H100, made
from tests.support.shapes import hub
from uspft.layout import Layout
from uspft.planner.mesh_step import MeshPart, mesh_parts
from uspft.planner.products import met_parameters
from uspft.planner.step_shape import StepShape
from uspft.segments import Segments

LLAMA = hub("meta-llama/Llama-3.1-8B")
LENGTH, WHOLE = 1 << 15, (1, 1, 1, 1)
STEP = StepShape(LLAMA, Segments.single(LENGTH), (None,) * 32, step_rows=8, recompute=False)
MESH = Layout(4, ring=2, mesh_rows=2)


def parts(
    step: StepShape = STEP, layout: Layout = MESH, slices: tuple[int, ...] = WHOLE
) -> dict[str, MeshPart]:
    return {part.name: part for part in mesh_parts(step, layout, slices, H100)}


def test_bytes_of_the_products() -> None:
    """Activations of a mesh row three times, twice where both gradients share what is gathered;
    weights twice in bfloat16 and their gradient once in float32; the tokens are half a row's."""
    found = parts()
    features = {"qkv": 6144, "out": 4096, "gate_up": 28672, "down": 14336}
    assert list(found)[:4] == list(features)
    for name, wide in features.items():
        times = 2 if name in ("out", "down") else 3
        activations, weight = times * 2 * LENGTH / 2 * 4096, (2 + 2 + 4) * 4096 * wide / 4
        assert found[name].bytes == pytest.approx(32 * (activations + weight)), name
        assert found[name].hidden == 0, "one slice"


def test_bytes_of_norms_loss_and_tables() -> None:
    found, tokens = parts(), LENGTH / 2
    assert found["norms"].bytes == (2 * 32 * 2 + 2) * 4 * tokens
    assert found["loss"].bytes == 3 * 4 * tokens
    table, activations = 2 * 128256 * 4096 / 4, 2 * tokens * 4096
    for name in ("embedding", "head"):
        assert found[name].bytes == 2 * table + 2 * activations
    frozen = parts(replace(STEP, trained=0.0))
    assert frozen["embedding"].bytes == table + activations
    assert frozen["head"].bytes == table + 2 * activations


def test_an_axis_of_one_moves_nothing() -> None:
    flat, tall = parts(layout=Layout(8)), parts(layout=Layout(1, ring=8, mesh_rows=8))
    assert flat["down"].bytes == pytest.approx(32 * 2 * 2 * LENGTH * 4096)
    assert tall["down"].bytes == pytest.approx(32 * 8 * 4096 * 14336)
    assert "norms" in flat and "norms" not in tall and "loss" not in tall


def test_products_take_what_their_flops_take() -> None:
    computed = sum(part.computed for part in parts().values())
    flops = 6 * met_parameters(LLAMA) * LENGTH / 8
    assert computed == pytest.approx(flops / (0.803 * 989e12), rel=0.02)
    again = sum(part.computed for part in parts(replace(STEP, recompute=True)).values())
    layers = met_parameters(LLAMA) - 128256 * 4096
    assert again - computed == pytest.approx(2 * layers * LENGTH / 8 / (0.803 * 989e12), rel=0.02)


def test_slices_hide_and_nothing_hides_more_than_there_is() -> None:
    for part in parts(slices=(8, 8, 16, 8)).values():
        assert 0 <= part.hidden <= min(part.moved, part.computed) + 1e-12
        assert (part.hidden > 0) == (part.name in ("qkv", "out", "gate_up", "down"))


def test_a_frozen_weight_has_no_gradient_to_move(tmp_path: Path) -> None:
    frozen = replace(STEP, trained=0.0)
    cluster = made(tmp_path)
    two, three = (mesh_parts(step, MESH, WHOLE, cluster)[3] for step in (frozen, STEP))
    assert two.bytes == pytest.approx(32 * 2 * (2 * LENGTH / 2 * 4096 + 2 * 4096 * 14336 / 4))
    assert two.computed / three.computed == pytest.approx(2 / 3, rel=0.01)
