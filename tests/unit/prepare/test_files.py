"""A recipe's relative paths: beside the recipe, else from the folder of the command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.models import make_documents, make_model
from tests.support.multimodal import UNREAD, make_checkpoint, stored
from uspft.commands.recipes import cards
from uspft.config import Recipe, RecipeError, load
from uspft.families.multimodal import own_name
from uspft.prepare.examine import examine
from uspft.prepare.files import passed_through

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """recipes/ with model and data beside it, and an empty folder that commands run in."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "here").mkdir()
    make_model(tmp_path / "model", "llama")
    make_documents(tmp_path / "recipes" / "d.jsonl", [5, 9], masked=[0.0])
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def examined(project: Path, **data: Any) -> Recipe:
    recipe = {
        "model": {"name_or_path": "../model", "dtype": "float32"},
        "data": {"train": "d.jsonl", "sequence_length": 16, **data},
        "training": {"steps": 1, "global_batch_size": 1},
        "launch": {"device": "cpu", "processes": 1},
    }
    path = project / "recipes" / "r.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return examine(path, [], 1, None).recipe


def test_what_lies_beside_the_recipe_is_read(project: Path) -> None:
    recipe = examined(project, eval=["../recipes/d.*", "python:stdlib"])
    assert Path(str(recipe.model.name_or_path)).resolve() == project / "model"
    assert [s.path for s in recipe.data.train] == [str(project / "recipes" / "d.jsonl")]
    assert recipe.data.eval and recipe.data.eval[1].path == "python:stdlib"
    assert Path(recipe.data.eval[0].path).parent.resolve() == project / "recipes"


def test_beside_the_recipe_comes_first_then_the_folder_of_the_command(project: Path) -> None:
    make_documents(project / "here" / "d.jsonl", [3], masked=[0.0])
    make_documents(project / "here" / "mine.jsonl", [3], masked=[0.0])
    beside, mine = examined(project, train=["d.jsonl", "mine.jsonl"]).data.train
    assert Path(beside.path).parent == project / "recipes" and mine.path == "mine.jsonl"


def test_what_a_run_writes_is_where_the_command_runs(project: Path) -> None:
    (project / "recipes" / "outputs").mkdir()
    assert examined(project).output_dir == Path("outputs/r")


def test_what_a_fragment_names_may_lie_beside_it(project: Path) -> None:
    (project / "apart").mkdir()
    make_documents(project / "apart" / "d.jsonl", [3], masked=[0.0])
    examined(project)
    path = project / "apart" / "mine.yaml"
    path.write_text("base: [../recipes/r.yaml]\nseed: 1\n")
    found = examine(path, [], 1, None).recipe
    assert Path(str(found.model.name_or_path)).resolve() == project / "model"
    assert found.data.train[0].path == str(project / "apart" / "d.jsonl"), "the recipe's own first"
    (project / "apart" / "d.jsonl").unlink()
    found = examine(path, [], 1, None).recipe
    assert found.data.train[0].path == str(project / "recipes" / "d.jsonl")
    with pytest.raises(RecipeError, match=r"at \S*/apart/x\.jsonl and \S*/here/x\.jsonl\)"):
        examine(path, ["data.train=x.jsonl"], 1, None)


def test_a_leading_tilde_is_the_home_folder_in_every_path(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(project))
    (project / "t.jinja").write_text("{{ messages[0].content }}")
    found = examined(project, train="~/recipes/d.jsonl", chat_template="~/t.jinja", cache_dir="~/c")
    assert found.data.train[0].path == str(project / "recipes" / "d.jsonl")
    assert found.data.chat_template == project / "t.jinja"
    assert found.data.cache_dir == project / "c"
    words = ["output_dir=~/out", "model.name_or_path=~/model", "model.tokenizer=~/model"]
    found = examine(project / "recipes" / "r.yaml", words, 1, None).recipe
    assert found.output_dir == project / "out"
    assert found.model.name_or_path == found.model.tokenizer == str(project / "model")


def test_a_variable_in_a_folder_to_write_is_refused(project: Path) -> None:
    with pytest.raises(RecipeError) as error:
        examined(project, cache_dir="$HOME/cache")
    assert "data.cache_dir: `$HOME/cache` names a variable" in str(error.value)
    words = ["output_dir=${oc.env:OUT}/run", "data.cache_dir=cost$"]
    with pytest.raises(RecipeError) as error:
        examine(project / "recipes" / "r.yaml", words, 1, None)
    (problem,) = error.value.problems
    assert problem.key == "output_dir" and "write what `${oc.env:OUT}` stands for" in problem.remedy


def test_what_is_in_neither_place_names_both(project: Path) -> None:
    with pytest.raises(RecipeError) as error:
        examined(project, train="no.jsonl", chat_template="no.jinja")
    (template, train) = sorted(map(str, error.value.problems))
    for told, name in ((train, "no.jsonl"), (template, "no.jinja")):
        both = f"(looked for at {project / 'recipes' / name} and {project / 'here' / name})"
        assert "does not exist" in told and both in told


def test_a_config_in_the_recipe_itself_is_looked_for_nowhere(project: Path) -> None:
    path = project / "recipes" / "r.yaml"
    recipe = {
        "model": {"config": {"model_type": "no-such-type"}, "tokenizer": "../model"},
        "data": {"train": "d.jsonl", "sequence_length": 16},
        "training": {"steps": 1, "global_batch_size": 1},
    }
    path.write_text(yaml.safe_dump(recipe))
    with pytest.raises(RecipeError, match=r"model\.config\.model_type: .*no-such-type") as error:
        examine(path, [], 1, None)
    assert "looked for" not in str(error.value) and str(error.value).count("no-such-type") == 1


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_recipe_works_from_any_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cpu = ["launch.device=cuda"] if "quickstart" not in path.name else []
    shipped = load(path).recipe
    ranks = 64 if shipped.parallel_config.data_parallel == "auto" else cards(shipped)
    found = examine(path, cpu, 1, None if "quickstart" in path.name else ranks)
    for source in found.recipe.data.train:
        assert source.path == "python:stdlib" or os.path.exists(source.path)


def test_what_goes_through_is_counted(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "whole", "qwen3_5")
    through = {name: x for name, x in stored(folder).items() if own_name(name) is None}
    assert through.keys() > UNREAD.keys() and any("visual" in name for name in through)
    size = sum(x.numel() * x.element_size() for x in through.values())
    assert passed_through(str(folder)) == size > 0
    alone = make_model(tmp_path / "alone", "qwen3_5_text")
    assert passed_through(str(alone)) == passed_through("org/name") == passed_through(None) == 0
    (folder / "extra.safetensors").write_bytes(b"no header")
    assert passed_through(str(folder)) == 0, "reading the weights says what is wrong"
