"""Every `auto` is settled in one place, again as more is known, and by nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from tests.support.models import make_model
from uspft.config import Recipe, load
from uspft.config.available import LATER
from uspft.families import ModelShape, read_shape
from uspft.planner.auto import Work
from uspft.prepare.cluster import cluster_of
from uspft.prepare.resolve import SETTLED, Known, resolve
from uspft.segments import Segments

STAYS = {"checkpoint.resume"}
"""What means something for as long as the recipe lives."""


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
    later = {key for feature in LATER for key in feature.keys}
    auto = {key for key, value in defaults(Recipe).items() if value == "auto"}
    assert len(auto) >= 7
    assert auto - later - STAYS <= set(SETTLED)
    assert not STAYS & set(SETTLED)


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
    known = Known(hosts=2, gpus=8, shape=shape, formats=["text"], kernel="flash_attn_3")
    settled = resolve(asked, known)
    assert isinstance(settled.memory.loss_tile_tokens, int)
    assert (settled.data.format, settled.model.attention) == ("text", "flash_attn_3")
    assert settled.parallel_config.context_parallel_algo == "planned_cp"
    whole = Work([Segments.single(4096)] * 4)
    links_unknown = resolve(asked, Known(gpus=8, shape=shape, work=whole))
    assert links_unknown.parallel_config.context_parallel_algo == "planned_cp"
    cluster, _ = cluster_of("auto", "cuda", "NVIDIA H100 80GB HBM3")
    assert cluster and settled.launch.hardware == "auto"
    last = resolve(asked, Known(gpus=8, shape=shape, work=whole, cluster=cluster))
    assert last.launch.hardware == "h100"
    assert last.parallel_config.context_parallel_algo == "ulysses_cp"
    assert last.parallel_config.exchange_stages is None


def test_what_is_settled_stays(folder: Path) -> None:
    shape = read_shape(recipe(folder).model, folder)
    assert isinstance(shape, ModelShape)
    known = Known(gpus=8, shape=shape, formats=["text"], kernel="flash_attn_3")
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
    assert known.here(asked).model.name_or_path == "/cache/name"
