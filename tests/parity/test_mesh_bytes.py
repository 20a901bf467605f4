"""What ranks of a mesh send, against what the cost model says that a mesh moves, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.hardware import H100
from tests.support.mesh import MeshCase
from tests.support.models import Documents
from tests.support.ranks import spawn
from tests.support.runs import run_recipe
from tests.support.steps import mesh_time
from tests.support.tensor import make_setting, recipe
from uspft.config.inputs import ModelBlock
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.planner.mesh import LOSS_SUMS, NORMS, number_sums
from uspft.planner.options import Options
from uspft.planner.step_shape import PlacedStep, StepShape
from uspft.segments import Segments

Data = dict[bool, Documents]
RANKS, LENGTH, LAYERS, KV_HEADS = 4, 48, 2, 2
MESHES = ((2, 2), (1, 4), (4, 1))
"""Of each, all groups of more than one rank are equally large."""


def counted(rank: int, folder: Path, data: Data, recompute: bool) -> list[tuple[int, Any]]:
    """The bytes that a step sent for matrices on each mesh, and the parameters."""
    blocks = {
        "memory": {"gradient_checkpointing": recompute},
        "training": {"steps": 1, "global_batch_size": 1},
    }
    found = []
    for mesh in MESHES:
        case = MeshCase("llama", (1, 1), "zero1", False, False, mesh)
        name = f"counted-{recompute}-{mesh[0]}x{mesh[1]}"
        answer = run_recipe(recipe(case, folder, data, **blocks), folder / name)
        if rank == 0:
            records, end = answer
            sizes = {name: each.numel() for name, each in end.items()}
            found.append((records[0]["comm_bytes"]["tensor"], sizes))
    return found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Data]:
    folder = tmp_path_factory.mktemp("bytes")
    return folder, make_setting(folder)


def moved(shape: ModelShape, mesh: tuple[int, int], recompute: bool) -> float:
    """What the model says that one rank sends, of rings of as many ranks as the larger axis has."""
    rows, columns = mesh
    options = Options(dtype="float32", checkpointing=recompute, slices=(2,) * 4)
    step = StepShape(shape, Segments.single(LENGTH), options)
    layout = Layout(columns, ring=rows, mesh_rows=rows)
    placed, share = PlacedStep(step, layout, H100), 1 - 1 / max(mesh)
    # The sums of norms and of the loss cross there and back.
    norms = shape.layers * NORMS * (placed.options.forwards + 1) + 2
    sums = number_sums(placed, norms + LOSS_SUMS).bytes
    return share * (mesh_time(placed).bytes_of("tensor") + sums)


def pieces(sizes: dict[str, int], mesh: tuple[int, int]) -> float:
    """What is sent to sum the gradients of what several ranks hold: over mesh rows norms and
    biases, over mesh columns the key-value heads that two of them share."""
    rows, columns = mesh
    share = 2 * (1 - 1 / rows)
    small = sum(size for name, size in sizes.items() if "norm" in name or "bias" in name)
    found = share * 4 * small / columns
    if columns > KV_HEADS:
        heads = sum(size for name, size in sizes.items() if "k_proj" in name or "v_proj" in name)
        found += 4 * heads / KV_HEADS
    return found


def unmasked(mesh: tuple[int, int]) -> float:
    """What the loss sends less than for every token: the last of a row has no target, which the
    busiest rank of several mesh rows does not hold."""
    rows, columns = mesh
    return 3 * 4 * 2 * (1 - 1 / columns) if rows == 1 else 0.0


@pytest.mark.parametrize("recompute", [False, True])
def test_the_books_have_what_the_cost_model_says(
    setting: tuple[Path, Data], recompute: bool
) -> None:
    folder = setting[0]
    config = ModelBlock.model_validate({"config": str(folder / "llama" / "config.json")})
    shape = read_shape(config, folder)
    assert isinstance(shape, ModelShape)
    assert (shape.layers, shape.kv_heads) == (LAYERS, KV_HEADS)
    answers = spawn(RANKS, counted, *setting, recompute)[0]
    for mesh, (sent, sizes) in zip(MESHES, answers, strict=True):
        want = moved(shape, mesh, recompute) + pieces(sizes, mesh) - unmasked(mesh)
        assert sent == want, mesh
