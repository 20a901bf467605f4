"""Every `auto` is settled in one place, again as more is known, and by nobody else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from tests.support.models import make_model
from tests.support.shapes import hub
from uspft.config import ParallelBlock, Recipe, load
from uspft.config.recipe import PLANNED
from uspft.config.reference import blocks, keys
from uspft.config.strategies import strategies_of
from uspft.families import ModelShape, read_shape
from uspft.job import placed
from uspft.layout import Layout
from uspft.planner.mesh import slices_on
from uspft.planner.rank import RECOMPUTE, ROWS, STAGE
from uspft.planner.step_shape import PlacedStep
from uspft.prepare.known import Known, cluster_of, step_shape
from uspft.prepare.remarks import memory_sentence
from uspft.prepare.resolve import FIRST, SETTLED, resolved
from uspft.segments import Segments

STAYS = {"checkpoint.resume"}
"""What means something for as long as the recipe lives."""
CHOSEN = {
    *(f"parallel_config.{key}" for key in (*PLANNED, "tensor_mesh", "tensor_slices")),
    *(STAGE, ROWS, RECOMPUTE),
}
"""The keys that the planner chooses, together (prepare/left_open.py)."""


def defaults(model: type[BaseModel], at: str = "") -> dict[str, Any]:
    """Every key's default, blocks opened."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        blocks = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if blocks and not at:
            found |= defaults(blocks[0], f"{name}.")
        else:
            found[at + name] = field.default
    return found


def test_every_auto_has_its_function() -> None:
    later = {key.path for at, kind in blocks().items() for key in keys(kind, at) if key.later}
    auto = {key for key, value in defaults(Recipe).items() if value == "auto"}
    assert len(auto) >= 7
    assert auto - later - STAYS <= {*FIRST, *CHOSEN, *SETTLED}
    assert not STAYS & {*FIRST, *CHOSEN, *SETTLED}


def resolve(asked: Recipe, known: Known) -> Recipe:
    return resolved(asked, known)[0]


def recipe(folder: Path, **blocks: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"name_or_path": str(folder)},
        "data": {"train": "x.jsonl", "sequence_length": 4096},
        "parallel_config": {"context_parallel": 4, "context_parallel_algo": "auto"},
        "training": {"steps": 1, "global_batch_size": 8},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({k: {**base.get(k, {}), **blocks.get(k, {})} for k in base}))
    return load(path).recipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path, "llama", heads=8, kv_heads=4)


def test_more_is_settled_as_more_is_known(folder: Path) -> None:
    asked = recipe(folder)
    shape = read_shape(asked.model, folder)
    assert isinstance(shape, ModelShape)
    nothing = resolve(asked, Known())
    assert nothing.launch.device == "cpu" and nothing.model.attention == "torch"
    assert nothing.launch.processes == 4 and nothing.memory.loss_tile_tokens == "auto"
    here = resolve(asked, Known(hosts=2, gpus=8))
    assert (here.launch.device, here.launch.processes) == ("cuda", 8)
    assert (here.parallel_config.data_parallel, here.model.attention) == (4, "auto")
    known = Known(hosts=2, gpus=8, shape=shape, formats=["text"])
    settled = resolve(asked, known)
    assert isinstance(settled.memory.loss_tile_tokens, int)
    assert (settled.data.format, settled.model.attention) == ("text", "auto")
    assert settled.parallel_config.context_parallel_algo == "planned_cp"
    whole = [Segments.single(4096)] * 4
    links_unknown = resolve(asked, Known(gpus=8, shape=shape, rows=whole))
    assert links_unknown.parallel_config.context_parallel_algo == "planned_cp"
    cluster, _ = cluster_of("auto", "cuda", "NVIDIA H100 80GB HBM3")
    assert cluster and settled.launch.hardware == "auto"
    last = resolve(asked, Known(gpus=8, shape=shape, rows=whole, cluster=cluster))
    assert last.launch.hardware == "h100"
    assert last.parallel_config.context_parallel_algo == "ulysses_cp"
    assert last.parallel_config.exchange_stages is None


@pytest.fixture(scope="module")
def known() -> Known:
    """What is known of 8 GPUs and a model of 8B."""
    cluster, _ = cluster_of("auto", "cuda", "NVIDIA H100 80GB HBM3")
    return Known(gpus=8, shape=hub("meta-llama/Llama-3.1-8B"), cluster=cluster)


NO_SHARING = {"context_parallel": 1, "context_parallel_algo": None}


def settled_of(folder: Path, known: Known, **parallel: Any) -> ParallelBlock:
    """What 8 rows of a step become, which do not fit one card whole beside all of the model."""
    data = {"sequence_length": 1 << 15}
    asked = recipe(folder, parallel_config={**NO_SHARING, **parallel}, data=data)
    return resolve(asked, known).parallel_config


def test_stages_that_are_left_open_are_chosen(folder: Path, known: Known) -> None:
    free = settled_of(folder, known, pipeline_stage="auto")
    assert free.pipeline_stage > 1, "stage 1 of ZeRO needs more than a card whole"
    assert free.data_parallel * free.pipeline_stage == 8
    assert free.layers_per_stage and free.micro_batch_num == 8 // int(free.data_parallel)
    assert (free.pipeline_scheduler, free.pipeline_interleave) == (
        "1f1b",
        free.pp_interleave_num > 1,
    )
    plain = settled_of(folder, known, pipeline_stage="auto", pipeline_interleave=False)
    assert plain.pipeline_stage > 1 == plain.pp_interleave_num
    four = settled_of(folder, known, pipeline_stage="auto", micro_batch_num=4)
    assert (four.data_parallel, four.pipeline_stage) == (2, 4)
    whole = settled_of(folder, known, pipeline_stage="auto", model_parallel=8)
    off = whole.pipeline_stage, whole.pp_interleave_num, whole.pipeline_scheduler
    assert off == (1, 1, None)
    unknown = settled_of(folder, Known(gpus=8), pipeline_stage="auto")
    assert (unknown.pipeline_stage, unknown.data_parallel) == (1, 8)


def test_what_is_open_beside_stages_fills_all_ranks(folder: Path, known: Known) -> None:
    found = settled_of(folder, known, pipeline_stage=2, model_parallel="auto")
    assert found.model_parallel * int(found.data_parallel) * 2 == 8


def test_tokens_are_split_where_matrices_are(folder: Path, known: Known) -> None:
    given = {"model_parallel": "auto", "use_seq_parallel": True}
    split = settled_of(folder, known, data_parallel=1, **given)
    assert (split.model_parallel, split.use_seq_parallel) == (8, True)
    whole = settled_of(folder, known, data_parallel=8, **given)
    assert (whole.model_parallel, whole.use_seq_parallel) == (1, False)


def on_a_mesh(folder: Path, length: int = 4096, **more: Any) -> Recipe:
    """A recipe of four ranks on a mesh, and what else it says of them."""
    four = {"model_parallel": 4, "tensor_parallel_algo": "meshslice", "context_parallel": 1}
    return recipe(folder, parallel_config={**four, **more}, data={"sequence_length": length})


def mesh_of(asked: Recipe, known: Known) -> tuple[object, object]:
    parallel = resolve(asked, known).parallel_config
    return parallel.tensor_mesh, parallel.tensor_slices


def test_slices_of_a_mesh_are_what_the_tuner_says(folder: Path) -> None:
    asked = on_a_mesh(folder)
    shape = read_shape(asked.model, folder)
    cluster, _ = cluster_of("auto", "cuda", "NVIDIA H100 80GB HBM3")
    assert isinstance(shape, ModelShape) and cluster
    known = Known(gpus=4, shape=shape, cluster=cluster)
    assert mesh_of(asked, Known(gpus=4)) == ("auto", "auto")
    assert mesh_of(asked, replace(known, cluster=None)) == ((2, 2), (1, 1, 1, 1)), "likely"
    step, found = step_shape(asked, shape), dict[object, object]()
    for rows in (1, 2, 4):
        layout = Layout(4 // rows, ring=rows, mesh_rows=rows, blocks=True)
        found[rows, 4 // rows] = slices_on(PlacedStep(step, layout, known.hardware_on(4)))
        given = on_a_mesh(folder, tensor_mesh=[rows, 4 // rows])
        assert mesh_of(given, known) == ((rows, 4 // rows), found[rows, 4 // rows])
    mesh, slices = mesh_of(asked, known)
    assert slices == found[mesh]
    wide = replace(shape, hidden_size=8192, heads=64, kv_heads=8, head_dim=128)
    wide = replace(wide, intermediate_size=28672)
    mesh, slices = mesh_of(on_a_mesh(folder, 1 << 17), replace(known, shape=wide))
    assert isinstance(mesh, tuple) and mesh[0] > 1
    assert isinstance(slices, tuple) and max(slices) > 1
    twice = on_a_mesh(folder, tensor_slices=2)
    assert mesh_of(twice, known)[1] == (2, 2, 2, 2)
    settled = resolve(asked, known)
    assert resolve(settled, known) == settled == resolve(settled, Known())


def test_each_strategy_has_the_mesh_that_a_recipe_of_its_rows_has(folder: Path) -> None:
    mesh = {"model_parallel": 4, "tensor_parallel_algo": "meshslice"}
    several = [{"max_length": 1024}, {"max_length": 2048, **mesh}, {"max_length": 4096, **mesh}]
    degrees = {**mesh, "context_parallel": 1, "context_parallel_algo": None}
    asked = recipe(folder, parallel_config={**degrees, "strategies": several})
    shape = read_shape(asked.model, folder)
    cluster, _ = cluster_of("auto", "cuda", "NVIDIA H100 80GB HBM3")
    assert isinstance(shape, ModelShape) and cluster
    known = Known(gpus=4, shape=shape, cluster=cluster)
    whole, *rest = strategies_of(resolve(asked, known))
    assert (whole.tensor_mesh, whole.tensor_slices) == (None, None)
    for one in rest:
        alone = on_a_mesh(folder, one.max_length, context_parallel_algo=None)
        assert (one.tensor_mesh, one.tensor_slices) == mesh_of(alone, known)
        assert isinstance(one.tensor_mesh, tuple)
        shared = "planned_cp" if one.tensor_mesh[0] > 1 else None
        assert one.context_parallel_algo == shared


def test_attention_decides_how_many_mesh_rows_there_can_be(folder: Path) -> None:
    """Two pieces of a row for each of its ranks, as the exchange wants, do not divide 4,094; and of
    one mesh row there are not two ranks for Ulysses."""
    shape = read_shape(recipe(folder).model, folder)
    cluster, _ = cluster_of("auto", "cpu", None)
    assert isinstance(shape, ModelShape)
    known = Known(shape=shape, cluster=cluster)
    odd = on_a_mesh(folder, 4094, context_parallel_algo="planned_cp")
    assert mesh_of(odd, replace(known, ranks=4))[0] == (1, 4)
    hybrid = {"context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": 2}
    assert mesh_of(on_a_mesh(folder, **hybrid), replace(known, ranks=4))[0] in ((2, 2), (4, 1))
    four = on_a_mesh(folder, **{**hybrid, "ulysses_degree_in_cp": 4})
    assert mesh_of(four, replace(known, cluster=None)) == ((4, 1), (1, 1, 1, 1))
    assert mesh_of(four, known)[0] == (4, 1)
    eight = on_a_mesh(folder, **{**hybrid, "ulysses_degree_in_cp": 8, "context_parallel": 2})
    assert mesh_of(eight, Known(gpus=8)) == ("auto", "auto"), "the model is not here"
    assert mesh_of(eight, known)[0] == (4, 1)
    none = on_a_mesh(folder, 4093, context_parallel=2, context_parallel_algo="planned_cp")
    assert mesh_of(none, known) == ((2, 2), (1, 1, 1, 1)), "what is wrong is told of this"


def test_what_is_settled_stays(folder: Path) -> None:
    shape = read_shape(recipe(folder).model, folder)
    assert isinstance(shape, ModelShape)
    known = Known(gpus=8, shape=shape, formats=["text"])
    once = resolve(recipe(folder), known)
    assert resolve(once, known) == once == resolve(once, Known())


def test_sources_of_unlike_formats_have_each_its_own(folder: Path) -> None:
    asked = recipe(folder, data={"train": ["a.jsonl", "b.txt"], "eval": "c.jsonl"})
    data = resolve(asked, Known(formats=["messages", "text", "text"])).data
    assert data.format == "auto" and [s.format for s in data.train] == ["messages", "text"]
    assert data.eval and [s.format for s in data.eval] == ["text"]


def test_a_hub_id_is_a_folder_here_alone(folder: Path) -> None:
    asked = recipe(folder, model={"name_or_path": "org/name"})
    known = Known(places={"name_or_path": "/cache/name"})
    assert resolve(asked, known).model.name_or_path == "org/name"
    assert placed(asked, known.places).model.name_or_path == "/cache/name"


def long_rows(folder: Path, length: str, **memory: Any) -> Recipe:
    """A recipe of Llama 3.1's 8B on eight cards that share rows of this length."""
    asked = recipe(
        folder,
        model={"name_or_path": "meta-llama/Llama-3.1-8B", "dtype": "bfloat16"},
        data={"sequence_length": length},
        parallel_config={"context_parallel": 8, "context_parallel_algo": "ulysses_cp"},
        training={"global_batch_size": 1},
    )
    zero = asked.deepspeed.model_copy(update={"zero_optimization": {"stage": 3}})
    block = asked.memory.model_copy(update=memory)
    return asked.model_copy(update={"deepspeed": zero, "memory": block})


def test_what_is_made_again_of_attention_is_the_least_that_fits(folder: Path) -> None:
    shape = hub("meta-llama/Llama-3.1-8B")
    cluster, _ = cluster_of("auto", "cuda", "NVIDIA H100 80GB HBM3")
    known = Known(gpus=8, shape=shape, cluster=cluster)

    def settled(length: str, known: Known = known, **memory: Any) -> str:
        return resolve(long_rows(folder, length, **memory), known).memory.recompute

    assert settled("128k") == "nothing"
    assert settled("512k") == "exchange"
    assert settled("640k") == settled("4m") == "attention"
    assert settled("512k", recompute="attention") == "attention"
    assert settled("1m", mlp_tile_tokens="auto", offload_activations="cpu") == "nothing"
    cpu, _ = cluster_of("auto", "cpu", None)
    assert settled("640k", Known(shape=shape, cluster=cpu)) == "nothing"
    assert settled("640k", Known(shape=shape)) == "nothing"
    assert settled("640k", Known()) == "auto"
    assert settled("640k", gradient_checkpointing=False) == "auto"


def test_check_says_what_a_rank_needs(folder: Path) -> None:
    hardware = cluster_of("auto", "cuda", "NVIDIA H100 80GB HBM3")[0]
    assert hardware
    given = long_rows(folder, "512k", recompute="exchange", loss_tile_tokens=1046)
    layout, shape = Layout(ulysses=8, data=1), hub("meta-llama/Llama-3.1-8B")
    asked = long_rows(folder, "512k").memory
    said = memory_sentence(given, shape, layout, hardware.hardware, asked)
    assert said == (
        "about 67.8 of 74.5 GiB a rank (activations 48.5, weights, gradients and optimizer 19.3); "
        "the longest row that fits is 768k; with offload_activations: cpu 1.46m"
    )
    page = (Path(__file__).parents[3] / "docs" / "long-context.md").read_text()
    assert f"\nmemory: {said}\n" in page
    stages = replace(layout, pipeline=2)
    halved = memory_sentence(given, shape, stages, hardware.hardware, asked)
    assert halved and re.match(r"about 4\d\.\d of 74\.5 GiB a rank", halved), halved
