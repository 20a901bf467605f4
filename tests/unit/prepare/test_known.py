"""`launch.hardware`: by name, path or the GPU's name, or what stands in; and the run says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hardware import round_figures
from tests.support.models import make_documents, make_model
from uspft.config import RecipeError
from uspft.prepare.examine import Examined, examine
from uspft.prepare.known import STANDS_IN, cluster_of, shipped


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in its own folder, and another folder that the command runs in."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "here").mkdir()
    make_model(tmp_path / "model", "llama")
    make_documents(tmp_path / "recipes" / "d.jsonl", [5, 9], masked=[0.0])
    given = {
        "model": {"name_or_path": "../model", "dtype": "float32"},
        "data": {"train": "d.jsonl", "sequence_length": 16},
        "training": {"steps": 1, "global_batch_size": 1},
        "launch": {"device": "cpu", "processes": 1},
    }
    (tmp_path / "recipes" / "r.yaml").write_text(yaml.safe_dump(given))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "recipes" / "r.yaml"


def found(recipe: Path, *words: str) -> Examined:
    return examine(recipe, list(words), 1, None)


@pytest.mark.parametrize(
    ("device", "gpu", "name", "why"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "h100", "by the GPU's name, NVIDIA H100 80GB HBM3"),
        ("cuda", "NVIDIA H200", "h200", "by the GPU's name"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "a100", "by the GPU's name"),
        ("cuda", "NVIDIA A800-SXM4-80GB", "a800", "by the GPU's name"),
        ("cuda", "NVIDIA L20", "l20", "by the GPU's name"),
        ("cuda", "NVIDIA L40S", "h100", "shipped figures, none being there for NVIDIA L40S"),
        ("cuda", "NVIDIA H100 NVL", "h100", "none being there for NVIDIA H100 NVL"),
        ("cuda", "NVIDIA B300", "h100", "none being there for NVIDIA B300"),
        ("cuda", None, "h100", "shipped figures, there being no GPU here"),
        ("cpu", None, "cpu", "shipped figures"),
        ("cpu", "NVIDIA H200", "cpu", "shipped figures"),
    ],
)
def test_auto_goes_by_the_gpus_name(device: str, gpu: str | None, name: str, why: str) -> None:
    cluster, findings = cluster_of("auto", device, gpu)
    assert findings == [] and cluster
    assert cluster.hardware.name == name and why in cluster.why
    assert cluster.sentence.startswith(f"{name} ({cluster.why}): ")


def test_a_name_of_a_shipped_file_is_enough(recipe: Path) -> None:
    examined = found(recipe, "launch.hardware=a800")
    assert examined.recipe.launch.hardware == "a800"
    assert examined.hardware.startswith("a800 (as launch.hardware says): ")


def test_ranks_elsewhere_may_be_gpus_that_are_not_here(recipe: Path) -> None:
    hint = "; for GPUs that are not here write launch.device=cuda"
    here, words = ["launch.device=auto"], ["model.dtype=bfloat16", "launch.processes=auto"]
    assert examine(recipe, [*here, *words], 1, 8).hardware.endswith(hint)
    there = examine(recipe, ["launch.device=cuda", *words], 1, 8)
    assert there.hardware.startswith("h100 ") and not there.hardware.endswith(hint)
    assert not found(recipe, *here).hardware.endswith(hint)


def test_auto_is_settled_and_told(recipe: Path) -> None:
    examined = found(recipe)
    assert examined.recipe.launch.hardware == "cpu"
    assert examined.hardware.startswith("cpu (shipped figures): ")
    assert set(STANDS_IN.values()) <= set(shipped())


def test_a_file_is_looked_for_beside_the_recipe_then_here(recipe: Path) -> None:
    beside, here = recipe.parent / "mine.yaml", Path("mine.yaml")
    here.write_text(yaml.safe_dump(round_figures(name="here")))
    assert found(recipe, "launch.hardware=mine.yaml").hardware.startswith("here ")
    beside.write_text(yaml.safe_dump(round_figures(name="beside")))
    assert found(recipe, "launch.hardware=mine.yaml").hardware.startswith("beside ")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("h10", ("`h10` is no file, and no name in configs/hardware", "did you mean `h100`?")),
        ("none.yaml", ("write auto, a file or one of a100, a800, cpu, h100, h200, l20",)),
        ("bad.yaml", ("bad.yaml:1: speed: unknown key `speed`", "known here: name, what, ")),
    ],
)
def test_a_wrong_name_is_refused_with_the_list(
    recipe: Path, name: str, told: tuple[str, ...]
) -> None:
    bad = {"speed": 1, **round_figures()}
    (recipe.parent / "bad.yaml").write_text(yaml.safe_dump(bad, sort_keys=False))
    with pytest.raises(RecipeError) as error:
        found(recipe, f"launch.hardware={name}")
    (line,) = str(error.value).splitlines()
    assert line.startswith("command line: launch.hardware: ")
    assert all(words in line for words in told), line


def test_where_a_file_was_looked_for_is_told(recipe: Path) -> None:
    with pytest.raises(RecipeError) as error:
        found(recipe, "launch.hardware=no.yaml")
    both = f"(looked for at {recipe.parent / 'no.yaml'} and {Path.cwd() / 'no.yaml'})"
    assert both in str(error.value)


def test_auto_of_the_algorithm_takes_its_figures(recipe: Path) -> None:
    """With links that take a second for any message, heads are split: in 4 exchanges, not 21."""

    def chosen(**link: Any) -> str | None:
        inside = {"launch_seconds": 0, "hop_seconds": 0, "bytes_per_second": 1e9, **link}
        Path("mine.yaml").write_text(yaml.safe_dump(round_figures(inside=inside)))
        words = ["parallel_config.context_parallel=2", "launch.processes=2", "data.packing=none"]
        words += ["parallel_config.context_parallel_algo=auto", "launch.hardware=mine.yaml"]
        return found(recipe, *words).recipe.parallel_config.context_parallel_algo

    slow = {"launch_seconds": 1.0, "hop_seconds": 1.0, "bytes_per_second": 1.0}
    assert chosen(point_to_point=slow) == "ulysses_cp"
    assert chosen(all_to_all=slow) == "planned_cp"
