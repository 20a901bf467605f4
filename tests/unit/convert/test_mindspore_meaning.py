"""What keys of MindSpore Transformers mean: their YAML, their errors, samples, memory, shards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.converted import converted as converted_by
from uspft.config.problems import InputError
from uspft.convert import Outcome

BASE: dict[str, Any] = {
    "pretrained_model_dir": "org/base",
    "runner_config": {"epochs": 2, "batch_size": 1},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1e-6},
    "train_dataset": {"data_loader": {"type": "HFDataLoader", "path": "a.jsonl"}},
    "model": {"model_config": {"seq_length": 4096, "compute_dtype": "bfloat16"}},
}
"""A configuration that converts."""


def with_blocks(**blocks: Any) -> dict[str, Any]:
    """BASE with blocks merged in; `config` stands for model.model_config."""
    tree = copy.deepcopy(BASE)
    tree["model"]["model_config"] |= blocks.pop("config", {})
    for name, block in blocks.items():
        if isinstance(block, dict) and isinstance(tree.get(name), dict):
            tree[name] = {**tree[name], **block}
        else:
            tree[name] = block
    return tree


def converted(folder: Path, tree: Any, ranks: int | None = None, **given: Any) -> Outcome:
    return converted_by(folder, tree, ranks, tool="mindspore", **given)[0]


def line_of(outcome: Outcome, key: str) -> str:
    """The one line about a key of theirs."""
    (line,) = [str(remark) for remark in outcome.remarks if remark.key == key]
    return line


# Their YAML


def test_anchors_numbers_and_none_are_theirs(tmp_path: Path) -> None:
    text = """\
pretrained_model_dir: org/base
load_checkpoint: ''
seed: &seed 7
runner_config: {epochs: 2, batch_size: 1}
optimizer: {type: AdamW, eps: 1.e-8, learning_rate: 1.e-5, weight_decay: 1e-2}
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 5.e-6}
train_dataset: &train_dataset
  seed: *seed
  data_loader: {type: HFDataLoader, path: a.jsonl}
train_dataset_task: {type: CausalLanguageModelDataset, dataset_config: *train_dataset}
model: {model_config: {seq_length: 4096, compute_dtype: bfloat16, extend_method: None}}
"""
    outcome = converted(tmp_path, text)
    assert not outcome.refused, outcome.lines()
    values = outcome.values
    assert values["seed"] == 7 and values["optimizer.eps"] == 1e-8
    assert values["optimizer.learning_rate"] == 5e-6 and values["optimizer.weight_decay"] == 1e-2
    assert "model.rope_scaling" not in values
    assert "not scaled" in line_of(outcome, "model.model_config.extend_method") or (
        "org/base rules" in line_of(outcome, "model.model_config.extend_method")
    )


def test_bases_lie_below_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "first.yaml").write_text(yaml.safe_dump(BASE))
    second = "base_config: deep/first.yaml\nrunner_config: {batch_size: 3}\nseed: 5\n"
    (tmp_path / "second.yaml").write_text(second)
    outcome = converted(tmp_path, "base_config: second.yaml\nseed: 6\n")
    values = outcome.values
    assert (values["seed"], values["training.micro_batch_size"]) == (6, 3)
    assert values["training.epochs"] == 2
    line = line_of(outcome, "runner_config.batch_size")
    assert line.startswith(f"{tmp_path / 'second.yaml'}:2: "), "each file names its own line"


BROKEN = {
    "a cycle of two": "base_config: other.yaml",
    "a base that is a list": "base_config: list.yaml",
    "a section twice": "parallel_config: {data_parallel: 2}\nparallel_config: {data_parallel: 4}",
    "a key twice": "parallel_config: {data_parallel: 2, data_parallel: 4}",
    "an alias that nothing names": "seed: *none",
    "ten thousand deep": "a: " + "{a: " * 10_000,
    "large": "# \n" * (25 << 20),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_configuration_is_a_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("base_config: theirs.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(InputError) as told:
        converted(tmp_path, BROKEN[name])
    lines = str(told.value).splitlines()
    assert 0 < len(lines) < 5 and all(line.startswith(str(tmp_path)) for line in lines)
    assert not (tmp_path / "recipe.yaml").exists()


def test_a_scalar_for_a_block_is_a_line(tmp_path: Path) -> None:
    outcome = converted(tmp_path, with_blocks(parallel_config=3))
    assert outcome.refused and line_of(outcome, "parallel_config")


# What their own checks refuse

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too deep": (
        {"context": {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {"i": {"j": 1}}}}}}}}}}},
        "deeper than 10",
    ),
    "other devices": (
        {"parallel": {"device_num": 8}, "parallel_config": {"data_parallel": 4}},
        "is 8, and the degrees multiply to 4",
    ),
    "no flash attention": (
        {"parallel_config": {"context_parallel": 2}, "config": {"type": "LlamaConfig"}},
        "context_parallel above 1",
    ),
    "flash attention that is off": (
        {"parallel_config": {"context_parallel": 2}, "config": {"use_flash_attention": False}},
        "context_parallel above 1",
    ),
    "heads of Ulysses": (
        {
            "parallel_config": {"context_parallel": 8, "context_parallel_algo": "ulysses_cp"},
            "config": {"num_heads": 8, "n_kv_heads": 4},
        },
        "8 × 1 ranks splits 4 KV heads",
    ),
    "heads of the hybrid": (
        {
            "parallel_config": {
                "context_parallel": 8,
                "context_parallel_algo": "hybrid_cp",
                "ulysses_degree_in_cp": 4,
                "model_parallel": 4,
            },
            "config": {"num_heads": 40, "n_kv_heads": 8},
        },
        "is 16, over 40 heads and 8 KV heads",
    ),
    "a degree that does not divide": (
        {
            "parallel_config": {
                "context_parallel": 8,
                "context_parallel_algo": "hybrid_cp",
                "ulysses_degree_in_cp": 3,
            },
            "config": {"num_heads": 6},
        },
        "does not divide context_parallel 8",
    ),
    "copies alone": ({"config": {"fine_grain_interleave": 2}}, "without use_seq_parallel"),
    "chunks without seqpipe": (
        {"parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2, "seq_split_num": 2}},
        "pipeline_scheduler is not seqpipe",
    ),
    "chunks beside a ring": (
        {
            "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2, "seq_split_num": 2},
            "parallel": {"pipeline_config": {"pipeline_scheduler": "seqpipe"}},
            "config": {"use_ring_attention": True},
        },
        "beside seq_split_num 2",
    ),
    "chunks that do not divide": (
        {
            "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2, "seq_split_num": 3},
            "parallel": {"pipeline_config": {"pipeline_scheduler": "seqpipe"}},
        },
        "does not divide seq_length 4096",
    ),
    "seqvpp without chunks": (
        {
            "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2},
            "parallel": {"pipeline_config": {"pipeline_scheduler": "seqvpp"}},
        },
        "seq_split_num is 1",
    ),
    "masks of short rows": (
        {"config": {"use_attn_mask_compression": True, "seq_length": 2048}},
        "not more than 2048",
    ),
    "documents beside a ring": (
        {"config": {"use_eod_attn_mask_compression": True, "use_ring_attention": True}},
        "beside use_ring_attention",
    ),
    "few micro-batches": (
        {"parallel_config": {"pipeline_stage": 4, "micro_batch_num": 2}},
        "fewer than the 4 stages",
    ),
    "offsets of another sum": (
        {
            "parallel_config": {"pipeline_stage": 4, "micro_batch_num": 4},
            "config": {"offset": [1, 0, 0, 0], "num_layers": 32},
        },
        "sums to 1, and 32 layers leave 0 over 4",
    ),
    "a mesh of another product": (
        {
            "parallel_config": {"model_parallel": 8, "use_seq_parallel": True},
            "config": {"use_3d_tensor_parallel": True, "tp_x": 2, "tp_y": 2},
        },
        "model_parallel is 8",
    ),
    "a mesh alone": (
        {
            "parallel_config": {"model_parallel": 4},
            "config": {"use_3d_tensor_parallel": True, "tp_x": 2, "tp_y": 2},
        },
        "without use_seq_parallel",
    ),
    "experts under tensor degrees": (
        {"parallel_config": {"model_parallel": 2}, "moe_config": {"expert_num": 8}},
        "without use_seq_parallel",
    ),
    "experts that do not divide": (
        {
            "parallel_config": {"data_parallel": 4, "expert_parallel": 4},
            "moe_config": {"expert_num": 6},
        },
        "does not divide 6 experts",
    ),
    "experts over other ranks": (
        {
            "parallel_config": {"data_parallel": 2, "expert_parallel": 4},
            "moe_config": {"expert_num": 8},
        },
        "does not divide data × context ranks",
    ),
    "groups of shards": (
        {
            "parallel_config": {"data_parallel": 4},
            "parallel": {"parallel_optimizer_config": {"optimizer_weight_shard_size": 3}},
        },
        "does not divide data_parallel 4",
    ),
    "rows without a strategy": ({"parallel": {"full_batch": False}}, "without dataset_strategy"),
    "another strategy": (
        {"parallel": {"full_batch": False, "dataset_strategy": [[4, 1]]}},
        "begins with 4, and data_parallel is 1",
    ),
    "long lists": (
        {"recompute_config": {"select_recompute": [1, 2]}},
        "has 2 entries for 1 stages",
    ),
    "long lists of a virtual stage": (
        {
            "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2},
            "recompute_config": {"recompute": [[1, 2, 3], [1, 1, 1]]},
        },
        "has 3 entries for 2 stages",
    ),
    "predictions": ({"run_mode": "eval"}, "only training is converted"),
    "degrees by hierarchy": (
        {"parallel_config": {"hierarchical_context_parallel_sizes": [4, 2]}},
        "ulysses_degree_in_cp",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_their_errors_are_told_in_our_words(name: str, tmp_path: Path) -> None:
    blocks, said = WRONG[name]
    outcome = converted(tmp_path, with_blocks(**blocks))
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "refused"]
    assert any(said in line for line in lines), lines


# What keys mean


def test_rings_are_where_they_ask_for_them(tmp_path: Path) -> None:
    algorithms = {}
    for word, degree in (("colossalai_cp", 1), ("ulysses_cp", 1), ("hybrid_cp", 2)):
        for ring in (False, True):
            block = {"context_parallel": 4, "context_parallel_algo": word}
            block |= {"ulysses_degree_in_cp": degree} if degree > 1 else {}
            tree = with_blocks(parallel_config=block, config={"use_ring_attention": ring})
            values = converted(tmp_path, tree).values
            algorithms[word, ring] = values["parallel_config.context_parallel_algo"]
    assert algorithms == {
        ("colossalai_cp", False): "allgather_cp",
        ("colossalai_cp", True): "ring_cp",
        ("ulysses_cp", False): "ulysses_cp",
        ("ulysses_cp", True): "ulysses_cp",
        ("hybrid_cp", False): "hybrid_cp",
        ("hybrid_cp", True): "hybrid_cp",
    }


def test_the_loss_is_told_where_theirs_is_another(tmp_path: Path) -> None:
    key = "runner_wrapper.calculate_per_token_loss"
    assert "is off there" in line_of(converted(tmp_path, BASE), key)
    tree = with_blocks(runner_wrapper={"type": "MFTrainOneStepCell", "use_clip_grad": False})
    outcome = converted(tmp_path, tree)
    assert outcome.values["training.max_grad_norm"] is None
    tree["runner_wrapper"]["calculate_per_token_loss"] = True
    assert "is off there" not in line_of(converted(tmp_path, tree), key)


def test_the_first_rate_is_told(tmp_path: Path) -> None:
    assert "our step i has the rate of theirs i + 1" in line_of(
        converted(tmp_path, BASE), "lr_schedule.type"
    )


STAGES = {"pipeline_stage": 4, "micro_batch_num": 8}
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
    outcome = converted(tmp_path, tree)
    assert not outcome.refused, outcome.lines()
    assert outcome.values["memory.gradient_checkpointing"] == layers
    assert outcome.values.get("memory.recompute") == kept
    selects = [r for r in outcome.remarks if r.key.startswith("recompute_config.select_recompute")]
    assert bool(selects) == ("select_recompute" in block)
    assert {"nearest" in r.what for r in selects} <= {kept is not None}


def test_what_is_offloaded(tmp_path: Path) -> None:
    swap = {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]}
    tree = with_blocks(swap_config=swap, recompute_config={"recompute": True})
    assert converted(tmp_path, tree).values["memory.offload_activations"] == "cpu"
    outcome = converted(tmp_path, with_blocks(swap_config=swap))
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
    assert converted(tmp_path, with_blocks(**blocks)).values[key] == stage
    several = {"runner_config": {"batch_size": 1, "gradient_accumulation_steps": 2}}
    outcome = converted(tmp_path, with_blocks(**blocks, **several))
    assert outcome.values[key] == max(1, stage)
    told = line_of(outcome, "parallel.enable_parallel_optimizer")
    assert ("several micro-batches in bfloat16" in told) == (stage == 0)
    exact = with_blocks(**blocks, **several, config={"compute_dtype": "float32"})
    assert converted(tmp_path, exact).values[key] == stage
    staged = with_blocks(**blocks, parallel_config=STAGES)
    assert converted(tmp_path, staged).values[key] == max(1, stage)


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
    found = converted(tmp_path, tree).values
    assert found["deepspeed.zero_optimization.stage3_param_persistence_threshold"] == elements
    one = converted(tmp_path, with_blocks(parallel=parallel))
    assert not any("persistence" in key for key in one.values)
    where = "parallel.parallel_optimizer_config.parallel_optimizer_threshold"
    assert "splits everything evenly" in line_of(one, where)


def test_experts_are_spread_where_there_are_any(tmp_path: Path) -> None:
    block = {"data_parallel": 4, "expert_parallel": 4}
    key = "parallel_config.expert_parallel"
    tree = with_blocks(parallel_config=block, moe_config={"expert_num": 8})
    found = converted(tmp_path, tree, model__name_or_path="org/moe")
    assert found.values[key] == 4
    alone = with_blocks(parallel_config=block, moe_config={"expert_num": 1})
    outcome = converted(tmp_path, alone)
    assert key not in outcome.values and "no experts" in line_of(outcome, key)
    core = {"data_parallel_size": 4, "expert_model_parallel_size": 2}
    assert converted(tmp_path, with_blocks(parallel_config=core)).values[key] == 2


def test_layers_of_stages(tmp_path: Path) -> None:
    config = {"layers_per_stage": [9, 8, 8, 7]}
    values = converted(tmp_path, with_blocks(parallel_config=STAGES, config=config)).values
    assert values["parallel_config.layers_per_stage"] == [9, 8, 8, 7]
    parts = {"pp_interleave_num": 2, "offset": [[1, 0, 0, 0], [0, 0, 0, 1]]}
    values = converted(tmp_path, with_blocks(parallel_config=STAGES, config=parts)).values
    assert values["parallel_config.offset"] == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert values["parallel_config.pp_interleave_num"] == 2
    one = converted(tmp_path, with_blocks(config=config))
    assert "there are no stages" in line_of(one, "model.model_config.layers_per_stage")


def test_ranks_that_do_not_fit_are_told_with_those_that_do(tmp_path: Path) -> None:
    tree = with_blocks(parallel_config={"data_parallel": 8, "model_parallel": 2})
    outcome = converted(tmp_path, tree, 6)
    key = "parallel_config.data_parallel"
    assert "8 rows do not go into 3 replicas; write --ranks 4" in line_of(outcome, key)
    tree["runner_config"]["batch_size"] = 4
    few = converted(tmp_path, tree, 2 * 16)
    assert few.values["training.micro_batch_size"] == 2
    assert few.values["training.global_batch_size"] == 32


# Samples


def loader(**keys: Any) -> dict[str, Any]:
    return with_blocks(train_dataset={"data_loader": keys})


def test_alpaca_becomes_packed_rows(tmp_path: Path) -> None:
    tree = loader(
        type="HFDataLoader",
        load_func="load_dataset",
        path="json",
        data_files="alpaca.json",
        split="train",
        handler=[
            {"type": "take", "n": 2000},
            {
                "type": "AlpacaInstructDataHandler",
                "seq_length": 4096,
                "padding": False,
                "tokenizer": {"vocab_file": "/models/base/vocab.json"},
            },
            {"type": "PackingHandler", "seq_length": 4096, "pack_strategy": "pack"},
        ],
    )
    outcome = converted(tmp_path, tree)
    found = {key: one for key, one in outcome.values.items() if key.startswith("data.")}
    assert found == {
        "data.sequence_length": 4096,
        "data.train": [{"path": "alpaca.json", "max_samples": 2000, "format": "prompt_completion"}],
        "data.prompt_template": "alpaca_mindspore",
        "data.packing": "best_fit",
        "data.overlong": "truncate",
    }
    assert outcome.values["model.tokenizer"] == "/models/base"
    del tree["train_dataset"]["data_loader"]["handler"][2]
    assert converted(tmp_path, tree).values["data.packing"] == "none"


SOURCES: dict[str, tuple[dict[str, Any], Any]] = {
    "a hub id with a split": (
        {"path": "org/set", "split": "test"},
        [{"path": "org/set", "split": "test"}],
    ),
    "the first of a split": (
        {"path": "org/set", "split": "train[:100]"},
        [{"path": "org/set", "split": "train", "max_samples": 100}],
    ),
    "several files": (
        {"path": "json", "data_files": ["a.json", "b.json"]},
        [{"path": "a.json"}, {"path": "b.json"}],
    ),
    "files by split": (
        {"path": "json", "data_files": {"train": "a.json", "test": "b.json"}, "split": "train"},
        [{"path": "a.json"}],
    ),
    "a file inside a folder": (
        {"path": "/data/set", "data_files": "a.json"},
        [{"path": "/data/set/a.json"}],
    ),
    "a saved folder": (
        {"load_func": "load_from_disk", "path": "saved"},
        [{"path": "saved"}],
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_load_dataset_reads(name: str, tmp_path: Path) -> None:
    keys, want = SOURCES[name]
    outcome = converted(tmp_path, loader(type="CommonDataLoader", **keys))
    assert outcome.values.get("data.train") == want, outcome.lines()


TAKE, PACKING = {"type": "take", "n": 5}, {"type": "PackingHandler", "seq_length": 4096}
UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "MindRecord": ({"type": "MindDataset", "dataset_dir": "x"}, "as JSON Lines there first"),
    "TFRecord": ({"type": "TFRecordDataset", "dataset_dir": "x"}, "as JSON Lines there first"),
    "a part of a split": ({"type": "HFDataLoader", "path": "o/n", "split": "train[5:]"}, "[:1000]"),
    "a split of files": (
        {"type": "HFDataLoader", "path": "json", "data_files": "a.json", "split": "test"},
        "name the files",
    ),
    "rows that are taken": (
        {"type": "HFDataLoader", "path": "o/n", "handler": [PACKING, TAKE]},
        "where it counts rows",
    ),
    "several files that are taken of": (
        {"type": "HFDataLoader", "data_files": ["a.json", "b.json"], "handler": [TAKE]},
        "of several files together",
    ),
    "another handler": (
        {"type": "HFDataLoader", "path": "o/n", "handler": [{"type": "MyHandler"}]},
        "MyHandler",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_samples_that_are_not_read_say_what_to_do(name: str, tmp_path: Path) -> None:
    keys, said = UNREAD[name]
    outcome = converted(tmp_path, loader(**keys))
    lines = [str(remark) for remark in outcome.remarks if remark.weight == "refused"]
    assert any(said in line for line in lines), lines


def blend(**config: Any) -> dict[str, Any]:
    kind = "BlendedMegatronDatasetDataLoader"
    return loader(type=kind, datasets_type="GPTDataset", sizes=[100, 0, 0], config=config)


def test_a_blend_becomes_sources_with_weights(tmp_path: Path) -> None:
    tree = blend(
        seed=1234,
        split="90, 10, 0",
        seq_length=4096,
        eod_mask_loss=True,
        reset_position_ids=True,
        reset_attention_mask=False,
        create_compressed_eod_mask=True,
        eod_pad_length=128,
        eod=0,
        pad=1,
        data_path=["0.3", "a_text_document", 0.7, "b_text_document"],
    )
    tree["runner_config"] |= {"batch_size": 2, "gradient_accumulation_steps": 4}
    outcome = converted(tmp_path, tree)
    assert not outcome.refused, outcome.lines()
    assert outcome.values["data.train"] == [
        {"path": "a_text_document", "weight": 0.3, "format": "megatron", "eod": 0},
        {"path": "b_text_document", "weight": 0.7, "format": "megatron", "eod": 0},
    ]
    assert outcome.values["data.eval_fraction"] == 0.1
    assert outcome.values["data.overlong"] == "split"
    assert outcome.values["data.packing"] == "best_fit"
    assert outcome.values["training.steps"] == 2 * (100 // 8), "epochs × rows ÷ batch"
    assert "training.epochs" not in outcome.values
    at = "train_dataset.data_loader.config"
    assert "sees no other" in line_of(outcome, f"{at}.reset_attention_mask")
    told = {remark.key for remark in outcome.remarks}
    assert {f"{at}.{key}" for key in ("seed", "pad", "eod_pad_length", "eod")} <= told
    lone = converted(tmp_path, blend(data_path=["a_text_document"], split="1, 0, 0"))
    assert lone.values["data.train"] == [{"path": "a_text_document", "format": "megatron"}]
    assert "data.eval_fraction" not in lone.values


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"data_path": ["0.3", "a", "0.7"]}, "data_path"),
        ({"data_path": ["a", "b"]}, "data_path"),
        ({"data_path": [0, "a"]}, "data_path"),
        ({}, "data_path"),
        ({"data_path": ["a"], "split": "some"}, "split"),
        ({"data_path": ["a"], "split": "0, 1, 0"}, "split"),
    ],
)
def test_a_blend_that_says_nothing_is_told(
    config: dict[str, Any], key: str, tmp_path: Path
) -> None:
    outcome = converted(tmp_path, blend(**config))
    assert outcome.refused
    assert line_of(outcome, f"train_dataset.data_loader.config.{key}")


def test_refusals_come_first_and_leave_nothing(tmp_path: Path) -> None:
    tree = with_blocks(optimizer={"type": "Came"}, context={"mode": 0}, run_mode="train")
    lines = converted(tmp_path, tree).lines()
    weights = [line.partition(":")[0] for line in lines if not line.startswith(" ")]
    assert weights == ["refused", "changed", "ignored"]
