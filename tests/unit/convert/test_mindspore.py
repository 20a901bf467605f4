"""Configurations of MindSpore Transformers as recipes: each key, the batch, what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support.converted import EXAMPLES, at, example, outcome_of
from tests.support.data_cases import TOKENIZER
from tests.support.mindspore import STAGES, line_of, with_blocks
from tests.support.mindspore import converted as outcome_of_tree
from tests.support.shapes import TINY
from uspft.__main__ import main
from uspft.config import load
from uspft.config.other_tools import table_of
from uspft.config.problems import InputError
from uspft.convert import Outcome, convert_theirs, read_theirs

NAMES = Path(__file__).with_name("mindspore_keys.txt")
LISTED = ("callbacks", "train_dataset.data_loader.handler")
SMALL: dict[str, Any] = {
    "pretrained_model_dir": "org/base",
    "runner_config": {"epochs": 2, "batch_size": 1},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1e-6},
    "train_dataset": {"data_loader": {"type": "HFDataLoader", "path": "a.jsonl"}},
    "model": {"model_config": {"seq_length": 4096, "compute_dtype": "bfloat16"}},
}
"""A configuration that converts."""


def documented() -> Iterator[str]:
    """Every key that is documented there, by its path."""
    block = ""
    for line in NAMES.read_text().splitlines():
        if line.startswith("["):
            block = line.strip("[]")
        elif not line.startswith("#"):
            yield from (f"{block}.{name}".lstrip(".") for name in line.split())


def written(tree: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A tree with one more value; items of lists are found by their type."""
    tree = yaml.safe_load(yaml.safe_dump(tree))
    block: Any = tree
    done = ""
    *above, key = path.split(".")
    for name in above:
        if done in LISTED:
            item = next((one for one in block if one["type"] == name), None)
            if item is None:
                block.append(item := {"type": name})
            block = item
        else:
            path_here = f"{done}.{name}".lstrip(".")
            empty: Any = [] if path_here in LISTED else {}
            if not isinstance(block.get(name), list | dict):
                block[name] = empty
            block = block[name]
        done = f"{done}.{name}".lstrip(".")
    if done not in LISTED and isinstance(block, dict):
        block.setdefault(key, value)
    return tree


def converted(
    folder: Path, tree: Any, ranks: int | None = None, *, loads: bool = True, **given: Any
) -> tuple[Outcome, dict[str, Any]]:
    """What a configuration gives, and the recipe's tree where it is one."""
    file = folder / "theirs.yaml"
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False))
    found = {key.replace("__", "."): value for key, value in given.items()}
    outcome = convert_theirs(read_theirs(file, "mindspore"), found, ranks)
    if outcome.refused:
        return outcome, {}
    (folder / "recipe.yaml").write_text(outcome.recipe(file))
    if loads:
        load(folder / "recipe.yaml")
    return outcome, yaml.safe_load((folder / "recipe.yaml").read_text())


KEYS = tuple(documented())


def test_the_documentation_has_this_many_keys() -> None:
    assert len(KEYS) == len(set(KEYS)) == 344
    assert [key for key in KEYS if table_of("mindspore").of(key) is None] == []


@pytest.mark.parametrize("key", KEYS)
def test_no_key_is_dropped_silently(key: str, tmp_path: Path) -> None:
    """Each key shows: in the recipe, or in a line of its own."""
    tree = written(SMALL, key, 2)
    outcome, _ = converted(tmp_path, tree, loads=False)
    spoken = {remark.key.partition("#")[0] for remark in outcome.remarks}
    row = table_of("mindspore").of(key)
    assert row is not None
    taken = row.becomes == "same" and outcome.values.get(row.to) is not None
    assert key in spoken or taken, outcome.lines()


def test_rows_of_the_table_are_documented_or_more() -> None:
    """No row but those of whole blocks stands for a key that nobody names."""
    beyond = {key for key in table_of("mindspore").rows if "*" not in key} - set(KEYS)
    assert len(beyond) == 14, sorted(beyond)


MEANING: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ring": (
        "context_parallel: 4",
        {"use_ring_attention": True},
        {"parallel_config.context_parallel_algo": "ring_cp"},
    ),
    "gather": (
        "context_parallel: 4, context_parallel_algo: colossalai_cp",
        {},
        {"parallel_config.context_parallel_algo": "allgather_cp"},
    ),
    "their old spelling": (
        "context_parallel: 4, context_parallel_algo: hybird_cp, ulysses_degree_in_cp: 2",
        {},
        {
            "parallel_config.context_parallel_algo": "hybrid_cp",
            "parallel_config.ulysses_degree_in_cp": 2,
        },
    ),
    "core names": (
        "context_parallel_size: 2, cp_comm_type: a2a, tensor_model_parallel_size: 2, "
        "sequence_parallel: true, data_parallel_size: 3",
        {},
        {
            "parallel_config.context_parallel_algo": "ulysses_cp",
            "parallel_config.model_parallel": 2,
            "parallel_config.use_seq_parallel": True,
            "parallel_config.data_parallel": 3,
            "training.global_batch_size": 3,
        },
    ),
    "a mesh": (
        "model_parallel: 4, use_seq_parallel: true",
        {"use_3d_tensor_parallel": True, "tp_x": 2, "tp_y": 2},
        {
            "parallel_config.tensor_parallel_algo": "meshslice",
            "parallel_config.tensor_mesh": [2, 2],
        },
    ),
    "stages": (
        "pipeline_stage: 2, micro_batch_num: 8, data_parallel: 3",
        {"pp_interleave_num": 2, "offset": [1, 0]},
        {
            "parallel_config.pp_interleave_num": 2,
            "parallel_config.offset": [1, 0],
            "training.global_batch_size": 24,
        },
    ),
}


@pytest.mark.parametrize("name", MEANING)
def test_layouts_mean_the_same(name: str, tmp_path: Path) -> None:
    degrees, config, want = MEANING[name]
    tree = yaml.safe_load(yaml.safe_dump(SMALL))
    tree["parallel_config"] = yaml.safe_load(f"{{{degrees}}}")
    tree["model"]["model_config"] |= config
    outcome, _ = converted(tmp_path, tree)
    assert {key: outcome.values[key] for key in want} == want


def test_batches_are_counted_by_their_formulas(tmp_path: Path) -> None:
    runner = {"batch_size": 2, "epochs": 1, "gradient_accumulation_steps": 5}
    tree = {**SMALL, "runner_config": runner, "micro_batch_interleave_num": 2}
    flat = {**tree, "parallel_config": {"data_parallel": 3, "micro_batch_num": 7}}
    assert converted(tmp_path, flat)[0].values["training.global_batch_size"] == 2 * 3 * 2 * 5
    piped = {**tree, "parallel_config": {"data_parallel": 3, "micro_batch_num": 7}}
    piped["parallel_config"]["pipeline_stage"] = 2
    assert converted(tmp_path, piped)[0].values["training.global_batch_size"] == 2 * 3 * 7 * 2
    alone = {**tree, "parallel": {"parallel_mode": 0}}
    outcome, _ = converted(tmp_path, alone)
    assert outcome.refused
    outcome, _ = converted(tmp_path, alone, parallel_config__data_parallel=4)
    assert outcome.values["training.global_batch_size"] == 2 * 4 * 2 * 5


def test_other_ranks_keep_the_batch(tmp_path: Path) -> None:
    tree = {**SMALL, "parallel_config": {"data_parallel": 8, "model_parallel": 2}}
    outcome, recipe = converted(tmp_path, tree, ranks=4)
    assert recipe["parallel_config"]["data_parallel"] == 2
    assert outcome.values["training.global_batch_size"] == 8
    (line,) = [line for line in outcome.lines() if "parallel_config.data_parallel: here" in line]
    assert line.endswith(
        "16 devices there (data 8 × tensor 2, 1 micro-batch of 1 row each), "
        "4 ranks here (data 2 × tensor 2, 4 micro-batches of 1 row each); the batch stays 8 rows"
    )
    outcome, _ = converted(tmp_path, tree, ranks=3)
    assert outcome.refused


def changed(**blocks: Any) -> dict[str, Any]:
    return {**SMALL, **blocks}


RATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "warm-up is rounded down": (
        {"type": "LinearWithWarmUpLR", "warmup_ratio": 0.075, "total_steps": 50},
        {"lr_schedule.warmup_steps": 3, "training.steps": 50},
    ),
    "from a rate": (
        {"type": "PolynomialWithWarmUpLR", "warmup_lr_init": 1e-7, "power": 2.0, "lr_end": 1e-8},
        {
            "lr_schedule.type": "polynomial",
            "lr_schedule.warmup_initial": 1e-7,
            "lr_schedule.power": 2.0,
            "lr_schedule.min_learning_rate": 1e-8,
        },
    ),
    "restarts": (
        {"type": "CosineWithRestartsAndWarmUpLR", "num_cycles": 3},
        {"lr_schedule.type": "cosine_restarts", "lr_schedule.cycles": 3},
    ),
    "stable": (
        {"type": "WarmUpStableDecayLR", "decay_ratio": 0.2},
        {"lr_schedule.type": "wsd", "lr_schedule.decay_ratio": 0.2},
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_schedules(name: str, tmp_path: Path) -> None:
    schedule, want = RATES[name]
    tree = changed(lr_schedule={"learning_rate": 1e-5, **schedule})
    outcome, _ = converted(tmp_path, tree)
    assert {key: outcome.values[key] for key in want} == want
    assert outcome.values["optimizer.learning_rate"] == 1e-5


def test_the_defaults_are_theirs_and_not_ours(tmp_path: Path) -> None:
    _, recipe = converted(tmp_path, SMALL)
    assert recipe["optimizer"] == {
        "type": "adamw",
        "learning_rate": 1e-6,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert recipe["training"]["max_grad_norm"] == 1.0
    _, recipe = converted(tmp_path, changed(runner_wrapper={"type": "MFTrainOneStepCell"}))
    assert recipe["training"]["max_grad_norm"] is None
    assert recipe["memory"]["gradient_checkpointing"] is False


def test_dimensions_become_a_config(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "n_kv_heads": 8}
    sizes |= {"ffn_dim_multiplier": 1.3, "multiple_of": 256, "theta": 5e5}
    tree = yaml.safe_load(yaml.safe_dump(SMALL))
    del tree["pretrained_model_dir"]
    tree["model"]["model_config"] |= sizes
    _, recipe = converted(tmp_path, tree)
    found = recipe["model"]["config"]
    assert found["model_type"] == "llama"
    assert found["intermediate_size"] == 28672, "as Llama 3.1 70B has it"
    assert found["num_key_value_heads"] == 8
    assert found["max_position_embeddings"] == 4096
    tree["model"]["model_config"] |= {"qkv_has_bias": True, "extend_method": "YARN"}
    tree["model"]["model_config"]["scaling_factor"] = {"factor": 4.0}
    _, recipe = converted(tmp_path, tree)
    assert recipe["model"]["config"]["model_type"] == "qwen2"
    assert recipe["model"]["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "their default type": ({"model": {"model_config": {"seq_length": 8}}}, "model.dtype=bfloat16"),
    "binary samples": (
        {"train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": "x"}}},
        "add data.train=FILE",
    ),
    "another optimizer": ({"optimizer": {"type": "Came"}}, "write AdamW, FusedAdamW or"),
    "another schedule": (
        {"lr_schedule": {"type": "CosineAnnealingLR"}},
        "write one of ConstantWarmUpLR",
    ),
    "predictions": ({"run_mode": "predict"}, "write finetune"),
    "experts": ({"moe_config": {"expert_num": 8}}, "model.name_or_path"),
    "rates by layer": ({"layer_scale": True}, "write false"),
    "an unknown key": ({"parallel_config": {"model_paralel": 2}}, "leave it out"),
    "too many entries": (
        {"recompute_config": {"recompute": [1, 2]}, "parallel_config": {"pipeline_stage": 1}},
        "write 1",
    ),
    "copies alone": (
        {"model": {"model_config": {"seq_length": 8, "fine_grain_interleave": 2}}},
        "write 1",
    ),
    "scaled positions of another kind": (
        {
            "pretrained_model_dir": None,
            "model": {
                "model_config": {
                    "seq_length": 8,
                    "compute_dtype": "bfloat16",
                    "extend_method": ["NTK"],
                }
            },
        },
        "write one of PI",
    ),
    "by layer": (
        {"parallel_config": {"context_parallel": 2, "cp_comm_type": ["a2a", "p2p"]}},
        "one algorithm is for all layers",
    ),
    "their checkpoint": ({"resume_training": "ckpt/rank_0"}, "load_checkpoint"),
    "evaluation": ({"do_eval": True}, "add data.eval=FILE"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_its_remedy(name: str, tmp_path: Path) -> None:
    blocks, remedy = REFUSED[name]
    outcome, _ = converted(tmp_path, changed(**blocks))
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "refused"]
    assert any(remedy in line for line in lines), lines
    assert all(line.startswith(str(tmp_path / "theirs.yaml:")) for line in lines)


def test_the_command_line_settles_what_is_refused(tmp_path: Path) -> None:
    tree = changed(train_dataset={"data_loader": {"type": "MindDataset", "dataset_dir": "x"}})
    del tree["pretrained_model_dir"]
    tree["moe_config"] = {"expert_num": 8}
    given = {"data__train": "b.jsonl", "model__name_or_path": "org/moe"}
    outcome, recipe = converted(tmp_path, tree, **given)
    assert not outcome.refused
    assert recipe["data"]["train"] == "b.jsonl"
    assert recipe["model"]["name_or_path"] == "org/moe"


HUGE = "a: " + "[" * 10_000
BROKEN = {
    "a list": "- 1",
    "a word": "word",
    "nothing": "",
    "deep": HUGE,
    "no YAML": "a: [",
    "twice": "seed: 1\nseed: 2",
    "itself": "base_config: theirs.yaml",
    "no such base": "base_config: other.yaml",
    "large": "#" * (2 << 20),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_a_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as told:
        converted(tmp_path, BROKEN[name])
    assert all(line.startswith(str(tmp_path)) for line in str(told.value).splitlines())


def test_any_value_anywhere_is_a_recipe_or_lines(tmp_path: Path) -> None:
    """No value of any key ends in a traceback."""
    draw = random.Random(0)
    outcomes = set()
    for _ in range(150):
        tree = SMALL
        for key in draw.sample(KEYS, 3):
            value = draw.choice(("a word", -1, 0, 1.5, [], [1], {}, {"a": 1}, True))
            tree = written(tree, key, value)
        try:
            outcomes.add(converted(tmp_path, tree)[0].refused)
        except InputError as told:
            outcomes.add(str(told)[:0])
    assert outcomes == {True, False, ""}, "draw more: not all three came"


def test_a_base_lies_below(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(SMALL))
    outcome, _ = converted(tmp_path, "base_config: base.yaml\nrunner_config: {batch_size: 3}\n")
    assert outcome.values["training.micro_batch_size"] == 3
    assert outcome.values["training.epochs"] == 2


PUBLISHED_NAMES = ("mindspore-a", "mindspore-b", "mindspore-c", "mindspore-d", "mindspore-e")


class Published(NamedTuple):
    """What an example has to become: its devices, the rows of an update, keys of the recipe."""

    ranks: int
    batch: int
    wanted: dict[str, Any]


PUBLISHED = {
    "mindspore-a": Published(
        64,
        1 * 1 * 64,
        {
            "model.config.model_type": "qwen2",
            "model.config.num_attention_heads": 40,
            "model.config.max_position_embeddings": 131072,
            "data.sequence_length": 131072,
            "parallel_config.context_parallel": 16,
            "parallel_config.context_parallel_algo": "ring_cp",
            "parallel_config.model_parallel": 2,
            "parallel_config.pipeline_stage": 2,
            "deepspeed.zero_optimization.stage": 1,
            "memory.gradient_checkpointing": True,
            "lr_schedule.type": "cosine",
            "lr_schedule.min_learning_rate": 1e-6,
            "training.epochs": 2,
            "checkpoint.every_steps": 5000,
            "checkpoint.keep_last": 1,
        },
    ),
    "mindspore-b": Published(
        64,
        1 * 1 * 256,
        {
            "model.config.model_type": "llama",
            "model.config.intermediate_size": 28672,
            "data.sequence_length": 8192,
            "parallel_config.use_seq_parallel": True,
            "parallel_config.fine_grain_interleave": 2,
            "parallel_config.pipeline_stage": 8,
            "memory.gradient_checkpointing": [10, 8, 6, 4, 2, 0, 0, 0],
            "memory.recompute": "nothing",
            "lr_schedule.warmup_ratio": 0.03,
            "optimizer.weight_decay": 0.0,
            "training.max_grad_norm": 1.0,
        },
    ),
    "mindspore-c": Published(
        64,
        1 * 1 * 32,
        {
            "model.config.model_type": "qwen2",
            "data.sequence_length": 32768,
            "parallel_config.use_seq_parallel": True,
            "parallel_config.pipeline_stage": 8,
            "parallel_config.seq_split_num": 8,
            "parallel_config.pipeline_scheduler": "seqpipe",
            "memory.gradient_checkpointing": True,
            "memory.recompute": "nothing",
            "lr_schedule.type": "constant",
        },
    ),
    "mindspore-d": Published(
        16,
        1 * 1 * 4,
        {
            "parallel_config.context_parallel": 16,
            "parallel_config.context_parallel_algo": "hybrid_cp",
            "parallel_config.ulysses_degree_in_cp": 8,
            "deepspeed.zero_optimization.stage": 1,
            "training.steps": 2,
            "data.shuffle": False,
        },
    ),
    "mindspore-e": Published(
        16,
        1 * 1 * 4,
        {
            "parallel_config.model_parallel": 4,
            "parallel_config.pipeline_stage": 4,
            "data.train": [
                {
                    "path": "org/alpaca",
                    "split": "train",
                    "max_samples": 2000,
                    "format": "prompt_completion",
                }
            ],
            "data.prompt_template": "alpaca_mindspore",
            "data.packing": "best_fit",
            "data.sequence_length": 4096,
            "optimizer.learning_rate": 1e-6,
            "training.epochs": 1,
        },
    ),
}


def test_every_example_is_here() -> None:
    assert tuple(sorted(file.stem for file in EXAMPLES.glob("mindspore-*.yaml"))) == PUBLISHED_NAMES
    assert set(PUBLISHED) == set(PUBLISHED_NAMES)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """What the command line says of the samples of those that name none."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n')
    return {"data.train": str(rows)}


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_it_becomes_the_same_batch_and_layout(
    name: str, given: dict[str, Any], tmp_path: Path
) -> None:
    ranks, batch, wanted = PUBLISHED[name]
    own = {} if name == "mindspore-e" else given
    outcome, recipe = outcome_of(example(name), tmp_path, None, None, own)
    assert not outcome.refused, outcome.lines()
    assert {key: at(recipe, key) for key in wanted} == wanted
    assert at(recipe, "training.global_batch_size") == batch
    halved, fewer = outcome_of(example(name), tmp_path, 2 * ranks, None, own)
    assert not halved.refused
    assert at(fewer, "parallel_config.data_parallel") == 2
    assert at(fewer, "training.global_batch_size") == batch
    lines = [str(remark) for remark in halved.remarks if "devices there (" in remark.what]
    assert len(lines) == 1 and f"{ranks} devices there (" in lines[0]
    assert f"{2 * ranks} ranks here (data 2 × " in lines[0]


@pytest.fixture
def recipe_of(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recipe that `convert` writes of an example, with the ranks that it is for behind it."""

    def write(name: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        words = [f"{key}={value}" for key, value in given.items()]
        if name == "mindspore-e":  # a model and samples that are here
            sizes = {**TINY, "vocab_size": 8192, "max_position_embeddings": 4096}
            sizes |= {"model_type": "llama", "num_hidden_layers": 4}
            words += [f"model.config={json.dumps(sizes)}", f"model.tokenizer={TOKENIZER}"]
            (tmp_path / "rows.jsonl").write_text('{"instruction": "Say a.", "output": "a"}\n')
        assert main(["convert", str(example(name)), "-o", "r.yaml", *words]) == 0
        return ["r.yaml", "--ranks", str(PUBLISHED[name].ranks)]

    return write


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_check_takes_it(name: str, recipe_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = recipe_of(name)
    capsys.readouterr()
    assert main(["check", *words]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "no problem found" in said and f"layout: {PUBLISHED[name].ranks} processes" in said


SLOW = ("mindspore-a", "mindspore-c")
"""Those of which `plan` weighs a thousand layouts of long rows."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in PUBLISHED_NAMES],
)
def test_plan_explains_it(name: str, recipe_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = recipe_of(name)
    assert main(["plan", *words, "--top", "1"]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "(the recipe's)" in said and "by part (" in said and "not predicted: " in said


def test_ulysses_alone_is_the_other_half_of_d(
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The documentation's other snippet: two ranks that share heads."""
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(example("mindspore-d").read_text())
    degrees = {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"}
    tree["parallel_config"] = {"data_parallel": 1, "model_parallel": 1, **degrees}
    found = {key.replace(".", "__"): value for key, value in given.items()}
    outcome, recipe = converted(tmp_path, tree, **found)
    assert not outcome.refused, outcome.lines()
    assert {key: recipe["parallel_config"][key] for key in degrees} == degrees
    assert main(["check", "recipe.yaml", "--ranks", "2"]) == 0
    assert "each row shared by 2 (Ulysses)" in capsys.readouterr().out


WARM = {"warmup_ratio": 0.079, "learning_rate": 1e-5}


def test_the_command_line_says_the_length(tmp_path: Path) -> None:
    """Epochs go where it names steps; a warm-up's share is rounded down, as there."""
    tree = with_blocks(lr_schedule=WARM)
    values = outcome_of_tree(tmp_path, tree).values
    assert values["training.epochs"] == 2 and values["lr_schedule.warmup_ratio"] == 0.079
    outcome = outcome_of_tree(tmp_path, tree, training__steps=50)
    assert "training.epochs" not in outcome.values
    assert outcome.values["lr_schedule.warmup_steps"] == 3
    assert "`training.steps` of the command line" in line_of(outcome, "runner_config.epochs")
    longer = with_blocks(lr_schedule={**WARM, "total_steps": 100})
    values = outcome_of_tree(tmp_path, longer, training__epochs=1).values
    assert values["training.epochs"] == 1 and "training.steps" not in values


def test_a_run_that_stops_before_its_schedule(tmp_path: Path) -> None:
    tree = with_blocks(lr_schedule={**WARM, "total_steps": 100}, runner_config={"stop_step": 7})
    values = outcome_of_tree(tmp_path, tree).values
    assert (values["training.steps"], values["training.stop_step"]) == (100, 7)
    tree["runner_config"]["stop_step"] = 0
    assert "training.stop_step" not in outcome_of_tree(tmp_path, tree).values


LAYERS: dict[str, tuple[dict[str, Any], Any, str | None]] = {
    "all": ({"recompute": True}, True, None),
    "none": ({"recompute": False, "select_recompute": False}, False, None),
    "of each stage": ({"recompute": [3, 2, 1, 0]}, [3, 2, 1, 0], None),
    "of each virtual stage": ({"recompute": [[2, 1, 1, 0]] * 2}, [[2, 1, 1, 0]] * 2, None),
    "operators everywhere": ({"select_recompute": True}, True, "nothing"),
    "operators of each stage": ({"select_recompute": [3, 2, 1, 0]}, [3, 2, 1, 0], "nothing"),
    "operators by pattern": ({"select_recompute": ["feed_forward", "norm"]}, True, "nothing"),
    "patterns in a block": ({"select_recompute": {r"feed\.mul": True}}, True, "nothing"),
    "patterns of each stage": (
        {"select_recompute": {r"a\.b": [3, 2, 0, 0], r"c\.d": [1, 1, 1, 0]}},
        [3, 2, 1, 0],
        "nothing",
    ),
    "patterns that are off": ({"select_recompute": {r"feed\.mul": False}}, False, None),
    "both, whole": ({"recompute": True, "select_recompute": True}, True, None),
    "both, by stage": (
        {"recompute": [1, 1, 0, 0], "select_recompute": [2, 0, 0, 1]},
        [2, 1, 0, 1],
        None,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_made_again(name: str, tmp_path: Path) -> None:
    block, layers, kept = LAYERS[name]
    more = {"pp_interleave_num": 2} if "virtual" in name else {}
    tree = with_blocks(parallel_config=STAGES, recompute_config=block, config=more)
    outcome = outcome_of_tree(tmp_path, tree)
    assert not outcome.refused, outcome.lines()
    assert outcome.values["memory.gradient_checkpointing"] == layers
    assert outcome.values.get("memory.recompute") == kept
    selects = [r for r in outcome.remarks if r.key.startswith("recompute_config.select_recompute")]
    assert bool(selects) == ("select_recompute" in block)
    assert {"nearest" in r.what for r in selects} <= {kept is not None}


def test_what_is_offloaded(tmp_path: Path) -> None:
    swap = {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]}
    tree = with_blocks(swap_config=swap, recompute_config={"recompute": True})
    assert outcome_of_tree(tmp_path, tree).values["memory.offload_activations"] == "cpu"
    outcome = outcome_of_tree(tmp_path, with_blocks(swap_config=swap))
    assert "memory.offload_activations" not in outcome.values
    assert "only checkpointed layers" in line_of(outcome, "swap_config.swap")


def shards(**more: Any) -> Iterator[tuple[str, dict[str, Any], int]]:
    """The four cases of optimizer parallelism, and what is asked beside it where it is off."""
    on = {"enable_parallel_optimizer": True}
    summed = {"parallel_optimizer_config": {"gradient_accumulation_shard": True}}
    again = {"parallel_optimizer_comm_recompute": True}
    yield "off", {}, 0
    yield "off beside others", {"parallel": summed, "recompute_config": again}, 0
    yield "on", {"parallel": on}, 1
    yield "gradients", {"parallel": on | summed}, 2
    yield "weights", {"parallel": on | summed, "recompute_config": again}, 3


@pytest.mark.parametrize(("name", "blocks", "stage"), shards())
def test_optimizer_parallelism_is_a_stage(
    name: str, blocks: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    key = "deepspeed.zero_optimization.stage"
    assert outcome_of_tree(tmp_path, with_blocks(**blocks)).values[key] == stage
    several = {"runner_config": {"batch_size": 1, "gradient_accumulation_steps": 2}}
    outcome = outcome_of_tree(tmp_path, with_blocks(**blocks, **several))
    assert outcome.values[key] == max(1, stage)
    told = line_of(outcome, "parallel.enable_parallel_optimizer")
    assert ("several micro-batches in bfloat16" in told) == (stage == 0)
    exact = with_blocks(**blocks, **several, config={"compute_dtype": "float32"})
    assert outcome_of_tree(tmp_path, exact).values[key] == stage
    staged = with_blocks(**blocks, parallel_config=STAGES)
    assert outcome_of_tree(tmp_path, staged).values[key] == max(1, stage)


@pytest.mark.parametrize(
    ("config", "legacy", "elements"),
    [
        ({"param_init_type": "float32"}, True, 64 * 1024 // 4),
        ({"param_init_type": "bfloat16"}, True, 64 * 1024 // 2),
        ({}, True, 64 * 1024 // 2),
        ({}, False, 64 * 1024 // 4),
        ({"params_dtype": "bfloat16"}, False, 64 * 1024 // 2),
    ],
)
def test_a_size_in_kb_is_elements(
    config: dict[str, Any], legacy: bool, elements: int, tmp_path: Path
) -> None:
    block = {"parallel_optimizer_threshold": 64}
    parallel = {"enable_parallel_optimizer": True, "parallel_optimizer_config": block}
    again = {"parallel_optimizer_comm_recompute": True}
    tree = with_blocks(parallel=parallel, recompute_config=again, config=config, use_legacy=legacy)
    found = outcome_of_tree(tmp_path, tree).values
    assert found["deepspeed.zero_optimization.stage3_param_persistence_threshold"] == elements
    one = outcome_of_tree(tmp_path, with_blocks(parallel=parallel))
    assert not any("persistence" in key for key in one.values)
    where = "parallel.parallel_optimizer_config.parallel_optimizer_threshold"
    assert "splits everything evenly" in line_of(one, where)
