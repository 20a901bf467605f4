"""What speaks against a recipe before a process starts: matrices that cannot be split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.shapes import TINY
from uspft.config import RecipeError
from uspft.config.problems import Fault
from uspft.prepare.examine import examine


def said(folder: Path, model: dict[str, Any], **parallel: Any) -> list[str]:
    """What `examine` says of a model under these degrees; nothing where it passes."""
    (folder / "config.json").write_text(json.dumps({**TINY, **model}))
    (folder / "d.jsonl").write_text('{"input_ids": [1, 2]}\n')
    tree = {
        "model": {"config": str(folder / "config.json"), "dtype": "float32"},
        "data": {"train": str(folder / "d.jsonl"), "sequence_length": 32},
        "parallel_config": parallel,
        "training": {"steps": 1, "global_batch_size": 1},
        "launch": {"device": "cpu"},
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(tree))
    try:
        examine(folder / "r.yaml", [], 1, None)
    except RecipeError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("model", "degree", "words"),
    [
        ({"model_type": "llama"}, 8, None),
        ({"model_type": "llama"}, 3, "do not split over 3 ranks; write one of 1, 2, 4, 8"),
        ({"model_type": "phi3"}, 8, None),
        ({"model_type": "qwen3_next", "num_experts": 4}, 2, None),
        ({"model_type": "mixtral", "num_local_experts": 4}, 2, None),
    ],
)
def test_models_and_heads_that_cannot_be_split_are_named(
    model: dict[str, Any], degree: int, words: str | None, tmp_path: Path
) -> None:
    lines = said(tmp_path, model, model_parallel=degree)
    if words is None:
        assert lines == []
    else:
        (line,) = lines
        assert ": parallel_config.model_parallel: " in line and words in line


STATES = {"model_type": "qwen3_5_text", "linear_num_key_heads": 3, "linear_num_value_heads": 6}
"""Three key heads do not divide by two ranks, of which one then has two."""


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"model_parallel": 2}, None),
        (
            {"model_parallel": 4},
            "model_parallel: is 4, and layers with a state have 3 key heads; write at most 3",
        ),
        (
            {"model_parallel": 2, "tensor_parallel_algo": "meshslice", "tensor_mesh": [1, 2]},
            "tensor_parallel_algo: is meshslice, and `qwen3_5_text` has layers with a state; "
            "write megatron",
        ),
    ],
)
def test_layers_with_a_state_that_cannot_be_split_are_named(
    parallel: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    lines = said(tmp_path, STATES, **parallel)
    assert len(lines) == (words is not None)
    assert all(words in line for line in lines if words)


@pytest.mark.parametrize(
    ("model", "degree", "words"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, 4, None),
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            3,
            "is 3, which does not divide the 8 ranks of data × context; write one of 1, 2, 4, 8",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4},
            8,
            "is 8, which does not divide the 4 experts of a layer; write one of 1, 2, 4",
        ),
        (
            {"model_type": "llama"},
            2,
            "is 2, and `llama` has no experts; write 1, or name a model of type qwen2_moe, ",
        ),
    ],
)
def test_experts_that_ranks_cannot_divide_are_named(
    model: dict[str, Any], degree: int, words: str | None, tmp_path: Path
) -> None:
    lines = said(tmp_path, model, expert_parallel=degree, data_parallel=8)
    if words is None:
        assert lines == []
    else:
        (line,) = lines
        assert ": parallel_config.expert_parallel: " in line and words in line


def test_context_parallelism_has_the_heads_that_tensor_ranks_leave_it(tmp_path: Path) -> None:
    """Of 8 heads on 4 tensor ranks 2 are left: ulysses 4 spreads them as evenly as it can."""
    split = {"model_parallel": 4, "context_parallel": 2, "context_parallel_algo": "ring_cp"}
    assert said(tmp_path, {"model_type": "llama"}, **split) == []
    (line,) = said(tmp_path, {"model_type": "llama"}, **split, tensor_mesh=[2, 2])
    assert "tensor_mesh: is [2, 2], and only meshslice has it; write auto, or leave it out" in line


def test_a_mesh_that_was_chosen_is_told_with_the_others(tmp_path: Path) -> None:
    mesh = {"model_parallel": 4, "tensor_parallel_algo": "meshslice"}
    assert said(tmp_path, {"model_type": "llama"}, **mesh) == []
    found = examine(tmp_path / "r.yaml", [], 1, None)
    parallel = found.recipe.parallel_config
    assert found.decision and found.decision.values["parallel_config.tensor_mesh"] == (
        parallel.tensor_mesh
    )
    why = found.decision.choice.reasons
    assert why["parallel_config.tensor_mesh"].count(" a step takes ") == 2
    assert why["parallel_config.tensor_slices"].startswith("in one slice a step takes ")
    key = "parallel_config.tensor"
    sliced = examine(tmp_path / "r.yaml", [f"{key}_mesh=[2, 2]"], 1, None)
    assert sliced.decision and list(sliced.decision.values) == [f"{key}_slices"]
    both = examine(tmp_path / "r.yaml", [f"{key}_mesh=[2, 2]", f"{key}_slices=2"], 1, None)
    assert both.decision is None, "nothing was left to choose"
    other = examine(tmp_path / "r.yaml", [f"{key}_parallel_algo=megatron"], 1, None)
    assert other.decision is None


def test_a_model_that_came_later_is_held_to_the_layout_too(tmp_path: Path) -> None:
    """Of a hub model that is not on this machine yet, the heads are known once it has come."""
    assert said(tmp_path, {"model_type": "llama"}) == []
    model = ["model.config=null", "model.name_or_path=some/model"]
    ranks = ["parallel_config.model_parallel=3", "launch.processes=3"]
    found = examine(tmp_path / "r.yaml", [*model, *ranks], 1, None)
    with pytest.raises(Fault) as raised:
        found.knowing_model({"name_or_path": str(tmp_path)})
    ((key, what, _),) = raised.value.findings
    assert key == "parallel_config.model_parallel" and "do not split over 3 ranks" in what


def test_steps_of_an_exchange_may_be_said_of_a_mesh_that_exchanges(tmp_path: Path) -> None:
    mesh = {"model_parallel": 4, "tensor_parallel_algo": "meshslice", "tensor_mesh": [2, 2]}
    assert said(tmp_path, {"model_type": "llama"}, **mesh, exchange_stages=1) == []
    (line,) = said(tmp_path, {"model_type": "llama"}, model_parallel=4, exchange_stages=2)
    assert "exchange_stages: is 2, and only planned_cp has it" in line


def test_an_exchange_of_heads_is_made_again_only_where_there_is_one(tmp_path: Path) -> None:
    split = {"context_parallel": 4, "context_parallel_algo": "hybrid_cp"}
    assert said(tmp_path, {"model_type": "llama"}, **split, ulysses_degree_in_cp=2) == []
    again = ["memory.recompute=exchange"]
    examine(tmp_path / "r.yaml", again, 1, None)
    with pytest.raises(RecipeError) as raised:
        examine(tmp_path / "r.yaml", [*again, "parallel_config.ulysses_degree_in_cp=1"], 1, None)
    assert str(raised.value) == (
        "command line: memory.recompute: is exchange, and no heads are exchanged: "
        "the Ulysses degree is 1; write auto, nothing or attention"
    )
    chosen = [*again, "parallel_config.context_parallel_algo=auto"]
    examine(tmp_path / "r.yaml", [*chosen, "parallel_config.ulysses_degree_in_cp=null"], 1, None)


def test_what_has_kernels_on_gpus_alone_is_refused_on_a_cpu(tmp_path: Path) -> None:
    assert said(tmp_path, {"model_type": "llama"}) == []
    zero = "deepspeed.zero_optimization"
    for key in ("zero_quantized_weights", "offload_optimizer.super_offload"):
        with pytest.raises(RecipeError, match=f"{zero}.{key}: is true, and .* GPUs alone"):
            examine(tmp_path / "r.yaml", [f"{zero}.stage=3", f"{zero}.{key}=true"], 1, None)


@pytest.mark.parametrize(
    ("shared", "tensor", "what"),
    [(2, 2, "with parallel_config.model_parallel 2"), (3, 1, "does not divide the 4 processes")],
)
def test_weights_kept_in_a_host_are_those_of_neighbours(
    tmp_path: Path, shared: int, tensor: int, what: str
) -> None:
    assert said(tmp_path, {"model_type": "llama"}) == []
    key = "deepspeed.zero_optimization"
    words = [f"{key}.stage=3", "launch.processes=4", f"{key}.zero_hpz_partition_size=2"]
    examine(tmp_path / "r.yaml", words, 1, None)
    words += [f"{key}.zero_hpz_partition_size={shared}", f"parallel_config.model_parallel={tensor}"]
    with pytest.raises(RecipeError, match=f"hpz_partition_size: is {shared}, which .*{what}"):
        examine(tmp_path / "r.yaml", words, 1, None)


def test_wrong_sizes_that_the_command_line_gives_are_told_of_it(tmp_path: Path) -> None:
    assert said(tmp_path, {"model_type": "llama"}) == []
    heads = "model.overrides.num_attention_heads"
    with pytest.raises(RecipeError, match=f"^command line: {heads}: 9 attention heads are not"):
        examine(tmp_path / "r.yaml", [f"{heads}=9"], 1, None)


RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
UNSPLIT = "data.sequence_length: 30 tokens"


def told(folder: Path, *words: str) -> list[str]:
    """The keys of all problems of a good recipe under these words, with what is wrong."""
    assert said(folder, {"model_type": "llama"}, **RING) == []
    try:
        examine(folder / "r.yaml", words, 1, None)
    except RecipeError as error:
        return [f"{one.key}: {one.what}" for one in error.problems]
    return []


FAULTS = {
    "a type": ("training.steps=10k", "training.steps"),
    "a word": ("model.dtype=bf16", "model.dtype"),
    "a name": ("sed=1", "sed"),
    "a rule": ("lr_schedule.min_learning_rate=1", "lr_schedule.min_learning_rate"),
    "a feature to come": ("model.trust_remote_code=true", "model.trust_remote_code"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_of_the_recipe_hides_none_of_its_layout_files_or_model(
    case: str, tmp_path: Path
) -> None:
    word, key = FAULTS[case]
    found = told(tmp_path, word, "data.sequence_length=30", "data.train=no.jsonl")
    assert [line.partition(":")[0] for line in found[:1]] == [key] or key in str(found)
    assert any(line.startswith(UNSPLIT) for line in found), found
    assert any(line.startswith("data.train.path: ") for line in found), found
    assert len(found) == 3, found


@pytest.mark.parametrize(
    "word",
    ["data.sequence_length=bad", "parallel_config.context_parallel=x", "launch.processes=0"],
)
def test_what_reads_a_faulty_key_is_not_asked(word: str, tmp_path: Path) -> None:
    (line,) = told(tmp_path, word)
    assert line.startswith(word.partition("=")[0])
    first, second = sorted(told(tmp_path, word, "data.train=no.jsonl"))
    assert {line, "data.train.path"} == {
        one if one == line else one.partition(":")[0] for one in (first, second)
    }


def test_a_dtype_that_is_none_is_not_taken_for_the_default(tmp_path: Path) -> None:
    words = ("deepspeed.zero_optimization.stage=0", "training.global_batch_size=4")
    (summed,) = told(tmp_path, "model.dtype=bfloat16", *words)
    assert summed.startswith("deepspeed.zero_optimization.stage: stage 0 would sum")
    (line,) = told(tmp_path, "model.dtype=float", *words)
    assert line.startswith("model.dtype: unknown value")


def test_an_unreadable_model_is_told_beside_a_type(tmp_path: Path) -> None:
    found = told(tmp_path, "training.steps=x", "model.config=no.json")
    assert [line.partition(":")[0] for line in found] == ["training.steps", "model.config"]
