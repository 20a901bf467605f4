"""Whatever stands in a configuration of another tool: a recipe or a list of problems."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.converted import EXAMPLES, converted
from uspft.__main__ import main
from uspft.commands.convert import convert
from uspft.config.document import bare
from uspft.config.other_tools import TOOLS, table_of
from uspft.config.problems import InputError
from uspft.convert.theirs import read_tree

TOOLS_READ = tuple(name for name, tool in TOOLS.items() if tool.converts)
MINDSPORE: dict[str, Any] = {
    "pretrained_model_dir": "org/base",
    "run_mode": "finetune",
    "runner_config": {"epochs": 2, "batch_size": 1, "sink_mode": True},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8},
    "lr_schedule": {"type": "CosineWithWarmUpLR", "learning_rate": 1e-6, "warmup_ratio": 0.1},
    "train_dataset": {"data_loader": {"type": "HFDataLoader", "path": "a.jsonl"}},
    "parallel_config": {"data_parallel": 2, "context_parallel": 2, "use_seq_parallel": False},
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 10}],
    "model": {"model_config": {"seq_length": 4096, "compute_dtype": "bfloat16"}},
}
ODD = (
    *(None, True, False, -1, 0, 1, 3, 10**40, 0.5, -0.0, float("inf"), float("nan"), 1e-300),
    *("", "auto", "no", "word", "1e-5", "{", "\0", "a\nb", "ü" * 300, "../x", "16"),
    *([], [[]], [1, "a", None], [{"path": 1}], {}, {"a": {"b": []}}, {"type": None}),
)
"""Values that stand where others are wanted."""


def trees() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every example, and one of MindSpore's, with its tool."""
    yield "mindspore", MINDSPORE
    for file in sorted((*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("trainer-*.json"))):
        name = file.stem.partition("-")[0]
        yield ("trl" if name == "trainer" else name), bare(read_tree(file))


TREES = tuple(trees())
CHECKED = 3
"""Recipes of a tool that go on to `check`."""
GIVEN: dict[str, Any] = {
    "data__train": "org/talks",
    "model__name_or_path": "org/model",
    "data__sequence_length": 64,
    "training__steps": 10,
}
"""What the command line may say, in part or whole."""


def paths(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path of a tree."""
    if at:
        yield at
    inside: Any = tree.items() if isinstance(tree, dict) else ()
    for key, value in enumerate(tree) if isinstance(tree, list) else inside:
        yield from paths(value, (*at, key))


def mutated(draw: random.Random, tool: str, tree: dict[str, Any]) -> dict[str, Any]:
    """A tree in which some values are others, some keys gone, and some new, of the tool's table."""
    tree = copy.deepcopy(tree)
    rows = [path for path in table_of(tool).rows if "*" not in path and "." not in path]
    for _ in range(draw.randint(1, 4)):
        way = draw.random()
        if way < 0.3 and rows:
            tree[draw.choice(rows)] = copy.deepcopy(draw.choice(ODD))
            continue
        *above, key = draw.choice(list(paths(tree)) or [("seed",)])
        block: Any = tree
        for name in above:
            block = block[name]
        if way < 0.45 and isinstance(block, dict):
            block.pop(key, None)
        elif way < 0.5 and isinstance(block, dict):
            block[f"{key}s"] = copy.deepcopy(draw.choice(ODD))
        elif isinstance(block, dict | list) and (isinstance(block, dict) or key < len(block)):
            block[key] = copy.deepcopy(draw.choice(ODD))
    return tree


@pytest.mark.parametrize("tool", TOOLS_READ)
@pytest.mark.parametrize(
    ("mutants", "checked"), [(60, CHECKED), pytest.param(300, 300, marks=pytest.mark.full)]
)
def test_a_mutated_example_is_a_recipe_or_a_list_of_problems(
    mutants: int,
    checked: int,
    tool: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What comes out loads, and `check` accepts the first ones or says what is wrong; the rest are
    lines: never a traceback."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True)
    draw = random.Random(tool)
    mine = [tree for name, tree in TREES if name == tool]
    outcomes = {"recipe": 0, "refused": 0, "no recipe": 0}
    for number in range(mutants):
        tree = mutated(draw, tool, mine[number % len(mine)])
        most = draw.choice((0.0, 0.5, 1.0))
        given = {key: value for key, value in GIVEN.items() if draw.random() < most}
        ranks = draw.choice((None, 8, 16, 16))
        try:
            outcome, recipe = converted(tmp_path, tree, ranks, tool=tool, **given)
        except InputError as told:
            assert str(told), tree
            outcomes["no recipe"] += 1
            continue
        outcomes["recipe" if recipe else "refused"] += 1
        if recipe and outcomes["recipe"] <= checked:
            given_ranks = ["--ranks", str(ranks)] if ranks else []
            words = ["check", str(tmp_path / "recipe.yaml"), "logging.wandb=null", *given_ranks]
            code, said = main(words), capsys.readouterr()
            assert code == 0 or (code == 2 and said.err.count("\n") >= 1), said
            assert "Traceback" not in said.err + said.out
        lines = [str(remark) for remark in outcome.remarks]
        assert all(line.isprintable() for line in lines)
        assert recipe or any(remark.weight == "refused" for remark in outcome.remarks)
    assert outcomes["recipe"] and outcomes["refused"], outcomes


HUGE = "a: " + "[" * 10_000
DEEP = "\n".join(f"{' ' * depth}a:" for depth in range(10_000))
BROKEN = {
    "a list": "- 1",
    "a word": "word",
    "nothing": "",
    "deep in a line": HUGE,
    "deep in lines": DEEP,
    "no YAML": "a: [",
    "twice": "seed: 1\nseed: 2",
    "no text": "a: \x00",
    "itself": "base_config: theirs.yaml",
    "itself by another": "base_config: other.yaml",
    "no such base": "base_config: none.yaml",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_lines_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(BROKEN[name])
    (tmp_path / "other.yaml").write_text("base_config: theirs.yaml")
    for tool in (None, "axolotl", "mindspore"):
        refused_whole(tmp_path, tool)


def refused_whole(folder: Path, tool: str | None, *words: str) -> str:
    """What is said where nothing can be read: lines with places, and no file beside."""
    to = folder / "recipe.yaml"
    with pytest.raises(InputError) as told:
        convert(folder / "theirs.yaml", words, "uspft", to=to, ranks=8, tool=tool)
    lines = str(told.value).splitlines()
    assert lines and all(line.startswith((str(folder), "command line:")) for line in lines)
    assert not to.exists()
    return lines[0]


def test_a_file_of_fifty_megabytes_is_a_line(tmp_path: Path) -> None:
    with (tmp_path / "theirs.yaml").open("wb") as file:
        file.truncate(50 << 20)
    assert "is larger than" in refused_whole(tmp_path, None)


def test_a_tool_that_is_not_known_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("base_model: x\n")
    assert "write one of" in refused_whole(tmp_path, "nemo")
    said = refused_whole(tmp_path, None)
    assert f"add --from and one of {', '.join(TOOLS_READ)}; for any other tool " in said
    (tmp_path / "theirs.yaml").write_text("seed: 1\nmodel: {}\n")
    assert "has the keys of no tool" in refused_whole(tmp_path, None)
    (tmp_path / "theirs.yaml").write_text("model: {}\ndata: {}\ntraining: {}\n")
    assert "is a recipe already; write check" in refused_whole(tmp_path, None)


def test_a_scalar_where_a_block_is_wanted_is_a_line(tmp_path: Path) -> None:
    tree = dict(next(tree for name, tree in TREES if name == "axolotl"))
    outcome, _ = converted(tmp_path, {**tree, "datasets": "a.jsonl"})
    assert any("datasets: is no list of mappings" in line for line in outcome.lines())
    outcome, _ = converted(tmp_path, {**tree, "learning_rate": {"peak": 1e-5}})
    said = "learning_rate.peak: is in a block, and `learning_rate` takes one value"
    assert any(said in line for line in outcome.lines())
    outcome, _ = converted(tmp_path, {**MINDSPORE, "parallel_config": 3}, None)
    assert any("parallel_config: is no key of" in line for line in outcome.lines())


def test_what_is_no_recipe_is_told_with_their_key_and_line(tmp_path: Path) -> None:
    """A value that a recipe does not take is a problem of the line that has it."""
    tree = yaml.safe_load((EXAMPLES / "axolotl-lora.yaml").read_text())
    tree["sequence_len"], tree["lora_r"] = -4, "many"
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    with pytest.raises(InputError) as told:
        words = ["logging.wandb=null"]
        convert(tmp_path / "theirs.yaml", words, "", to=tmp_path / "r.yaml", ranks=4)
    found = str(told.value)
    assert f"{tmp_path / 'theirs.yaml'}:" in found
    assert "sequence_len: as `data.sequence_length`: " in found
    assert "lora_r: as `model.adapter.rank`: " in found
    assert not (tmp_path / "r.yaml").exists()


def test_a_key_of_theirs_on_the_command_line_is_refused(tmp_path: Path) -> None:
    """Only keys of a recipe settle what is refused."""
    with pytest.raises(InputError, match="lora_r: is no key of a recipe; change it in theirs"):
        convert(Path("theirs.yaml"), ["lora_r=4"], "", to=tmp_path / "r.yaml")


def test_the_command_line_settles_what_is_refused(tmp_path: Path) -> None:
    tree = {"base_model": "org/m", "sequence_len": 64, "adapter": "lora", "num_epochs": "half"}
    tree |= {"datasets": [{"path": "a", "type": "oasst"}], "val_set_size": 100}
    outcome, _ = converted(tmp_path, tree, None, tool="axolotl")
    refused = [line for line in outcome.lines() if line.startswith("  ")]
    assert sum("; add " in line or "; write " in line for line in refused) >= 5
    given = {
        "data__train": "a.jsonl",
        "data__eval_fraction": 0.1,
        "training__steps": 10,
        "training__global_batch_size": 12,
        "model__adapter__target_modules": ["q_proj"],
    }
    outcome, recipe = converted(tmp_path, tree, None, tool="axolotl", **given)
    assert recipe["training"]["global_batch_size"] == 12, outcome.lines()
    assert recipe["data"]["train"] == "a.jsonl"
    assert recipe["model"]["adapter"]["target_modules"] == ["q_proj"]
