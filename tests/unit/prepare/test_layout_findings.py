"""What speaks against a recipe's stages and the keys of `memory`, by key, value and remedy; and how
stages are settled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.launch import ROOT
from tests.support.shapes import TINY, hub
from uspft.config import MemoryBlock, ParallelBlock, Recipe, RecipeError, dump, load
from uspft.layout import Layout
from uspft.pipeline.stages import stages_of
from uspft.planner.memory.formula import USABLE_SHARE, memory_of
from uspft.planner.options import options_of
from uspft.prepare.examine import Examined, examine
from uspft.prepare.layout_findings import group_findings, run_findings, tile_findings
from uspft.prepare.resolve import fitting_heads
from uspft.segments import Segments

MODEL = {**TINY, "model_type": "llama", "num_hidden_layers": 9}


def written(folder: Path, model: dict[str, Any], **blocks: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**MODEL, **model}))
    (folder / "d.jsonl").write_text('{"input_ids": [1, 2]}\n')
    base: dict[str, Any] = {
        "model": {"config": str(folder / "config.json"), "dtype": "float32"},
        "data": {"train": str(folder / "d.jsonl"), "sequence_length": 32},
        "parallel_config": {"pipeline_stage": 2},
        "training": {"steps": 1, "global_batch_size": 7, "micro_batch_size": 1},
        "launch": {"device": "cpu", "processes": 4},
    }
    tree = {key: {**base.get(key, {}), **blocks.get(key, {})} for key in {**base, **blocks}}
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def examined(folder: Path, model: dict[str, Any] | None = None, /, **blocks: Any) -> Examined:
    return examine(written(folder, model or {}, **blocks), [], 1, None)


def zero(**more: Any) -> dict[str, Any]:
    return {"zero_optimization": more}


LAYOUT = {"max_length": 32, "context_parallel": 2, "context_parallel_algo": "ring_cp"}
STAGED = {"max_length": 32, "pipeline_stage": 2}
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("deepspeed.zero_optimization.stage", {"deepspeed": zero(stage=0)}, "is 0, with", "1, 2 or"),
    (
        "parallel_config.strategies[0].pipeline_stage",
        {"parallel_config": {"strategies": [STAGED], "switching": "in_place"}},
        "is 2, and with switching: in_place ranks keep their layers",
        "write switching: move, or 1",
    ),
    *(
        (
            f"parallel_config.strategies[0].{key}",
            {"parallel_config": {"pipeline_stage": 1, "strategies": [{**one, key: value}]}},
            said,
            remedy,
        )
        for one, key, value, said, remedy in (
            (STAGED, "pp_interleave_num", 2, "layouts that switch have no virtual", "write 1"),
            (STAGED, "seq_split_num", 2, "is 2, and layouts that switch have no chunks", "write 1"),
            (STAGED, "micro_batch_num", 4, "is 4, and it follows from a step's", "write auto"),
            (LAYOUT, "layers_per_stage", [2], "is [2], and its pipeline_stage is 1", "leave it"),
        )
    ),
    (
        "parallel_config.strategies[1].layers_per_stage",
        {
            "parallel_config": {
                "pipeline_stage": 1,
                "strategies": [
                    {"max_length": 16, "pipeline_stage": 2, "layers_per_stage": [4, 5]},
                    {**STAGED, "layers_per_stage": [5, 4]},
                ],
            }
        },
        "differs from that of another strategy with pipeline_stage 2",
        "write the same in both",
    ),
    (
        "parallel_config.offset",
        {"parallel_config": {"offset": 1, "strategies": [STAGED]}},
        "is 1, with layouts that each have their own stages",
        "layers_per_stage, or leave it out",
    ),
    (
        "memory.gradient_checkpointing",
        {"parallel_config": {"strategies": [STAGED]}, "memory": {"gradient_checkpointing": 2}},
        "is 2 of a stage's layers, and layouts that switch have different stages",
        "write true or false",
    ),
    (
        "deepspeed.zero_optimization.zero_hpz_partition_size",
        {"deepspeed": zero(stage=3, zero_hpz_partition_size=2)},
        "is 2, which is not available with parallel_config.pipeline_stage 2",
        "leave it out",
    ),
    *(
        (
            f"deepspeed.zero_optimization.{key}",
            {"deepspeed": zero(stage=3, **{key: value})},
            f"is {str(value).lower()}, and DeepSpeed has no MiCS any more",
            "leave it out: with stages ZeRO divides what a stage has over the ranks of that",
        )
        for key, value in (("mics_shard_size", 2), ("mics_hierarchical_params_gather", True))
    ),
    (
        "deepspeed.zero_optimization.offload_optimizer",
        {
            "deepspeed": zero(stage=2, offload_optimizer={"device": "cpu"}),
            "parallel_config": {"pp_interleave_num": 2},
        },
        "loses gradients at stage 2",
        "write 1 virtual stage",
    ),
    (
        "parallel_config.pipeline_stage",
        {"parallel_config": {"pipeline_stage": 4, "pp_interleave_num": 3}},
        "is 4, with 3 virtual stages each 12, and the model has 9 layers",
        "write at most 3",
    ),
    (
        "parallel_config.layers_per_stage",
        {"parallel_config": {"layers_per_stage": [4, 4]}},
        "gives stages of [4, 4], 8 layers in all, and the model has 9",
        "add up to 9",
    ),
    (
        "parallel_config.layers_per_stage",
        {"parallel_config": {"layers_per_stage": [3, 3, 3]}},
        "is [3, 3, 3], which is not a number for each of 2 stages",
        "write a list of 2 numbers",
    ),
    (
        "parallel_config.offset",
        {"parallel_config": {"offset": [1, 1]}},
        "is [1, 1], 2 in all, and 9 layers over 2 stages of 4 leave 1",
        "add up to 1",
    ),
    (
        "parallel_config.offset",
        {"parallel_config": {"offset": [1, 0], "layers_per_stage": [5, 4]}},
        "is set together with `parallel_config.layers_per_stage`",
        "keep one",
    ),
    (
        "parallel_config.micro_batch_num",
        {"parallel_config": {"micro_batch_num": 3}},
        "is 3, and training.global_batch_size 7 ÷ (micro_batch_size 1 × data_parallel 2) makes 4",
        "write auto or 4, or change the batch",
    ),
    (
        "parallel_config.micro_batch_num",
        {"parallel_config": {"micro_batch_num": 1}},
        "is 1, and",
        "write auto or 4",
    ),
    (
        "parallel_config.micro_batch_num",
        {"parallel_config": {"micro_batch_num": 3, "pipeline_stage": 1}},
        "× data_parallel 4) makes 2",
        "write auto or 2, or 1",
    ),
    (
        "parallel_config.pipeline_scheduler",
        {"parallel_config": {"pipeline_scheduler": "1f1b", "seq_split_num": 2}},
        "is 1f1b, which takes rows whole, with parallel_config.seq_split_num 2",
        "write seqpipe, or seq_split_num: 1",
    ),
    (
        "parallel_config.pipeline_scheduler",
        {"parallel_config": {"pipeline_scheduler": "gpipe", "seq_split_num": 2}},
        "is gpipe, which takes rows whole, with parallel_config.seq_split_num 2",
        "write seqpipe, or seq_split_num: 1",
    ),
    (
        "parallel_config.seq_split_num",
        {"parallel_config": {"seq_split_num": 2, "pipeline_stage": 1}},
        "is 2, and parallel_config.pipeline_stage is 1",
        "write 1, or pipeline_stage above 1",
    ),
    (
        "parallel_config.sequence_chunks",
        {"parallel_config": {"sequence_chunks": "tokens"}},
        "is tokens, and parallel_config.seq_split_num is 1",
        "leave it out",
    ),
    (
        "memory.attention_heads",
        {"parallel_config": {"seq_split_num": 2}, "memory": {"attention_heads": 1}},
        "is 1, which is not available with parallel_config.seq_split_num 2",
        "write all",
    ),
    (
        "memory.offload_activations",
        {"parallel_config": {"seq_split_num": 2}, "memory": {"offload_activations": "cpu"}},
        "is cpu, which is not available with",
        "write none",
    ),
    (
        "data.sequence_length",
        {"parallel_config": {"seq_split_num": 1000}},
        "tokens do not make 1000 chunks (parallel_config.seq_split_num)",
        "or fewer chunks",
    ),
    (
        "parallel_config.pipeline_scheduler",
        {"parallel_config": {"pipeline_scheduler": "gpipe", "pipeline_stage": 1}},
        "is gpipe, and parallel_config.pipeline_stage is 1",
        "write null",
    ),
    (
        "parallel_config.pp_interleave_num",
        {"parallel_config": {"pp_interleave_num": 2, "pipeline_stage": 1}},
        "is 2, and parallel_config.pipeline_stage is 1",
        "write 1, or",
    ),
    (
        "parallel_config.layers_per_stage",
        {"parallel_config": {"layers_per_stage": [9], "pipeline_stage": 1}},
        "is [9], and parallel_config.pipeline_stage is 1",
        "write null",
    ),
    (
        "parallel_config.pipeline_interleave",
        {"parallel_config": {"pipeline_interleave": True}},
        "is true, and parallel_config.pp_interleave_num is 1",
        "write pp_interleave_num above 1",
    ),
    (
        "parallel_config.pipeline_interleave",
        {"parallel_config": {"pipeline_interleave": False, "pp_interleave_num": 2}},
        "is false, and parallel_config.pp_interleave_num is 2",
        "write true",
    ),
    (
        "memory.gradient_checkpointing",
        {"memory": {"gradient_checkpointing": [2, 1, 0]}},
        "is [2, 1, 0], and there are 2 stages",
        "write a list of 2 numbers, or one number for all",
    ),
    (
        "memory.gradient_checkpointing",
        {
            "memory": {"gradient_checkpointing": [[2, 1], [1, 0], [0, 0]]},
            "parallel_config": {"pp_interleave_num": 2},
        },
        "is [[2, 1], [1, 0], [0, 0]], and there are 2 stages (parallel_config.pipeline_stage) of 2",
        "write a list of 2 numbers, or 2 such lists",
    ),
    (
        "memory.gradient_checkpointing",
        {"memory": {"gradient_checkpointing": 10}},
        "is 10, and the model has 9 layers",
        "write true for all, or at most 9",
    ),
    (
        "memory.gradient_checkpointing",
        {"memory": {"gradient_checkpointing": [1, 9]}},
        "is [1, 9], and a stage has at most 8 of the model's 9 layers",
        "write true for all, or at most 8",
    ),
    (
        "memory.gradient_checkpointing",
        {"memory": {"gradient_checkpointing": 0}},
        "expected true or false, got 0",
        "write false",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "blocks", "what", "remedy"), WRONG)
def test_what_is_wrong_names_key_value_and_remedy(
    key: str, blocks: dict[str, Any], what: str, remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as raised:
        examined(tmp_path, **blocks)
    found = [one for one in raised.value.problems if one.key == key]
    (problem,) = found
    assert what in problem.what and remedy in problem.remedy


def test_what_a_model_speaks_against_is_named(tmp_path: Path) -> None:
    routed = {"model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True}
    with pytest.raises(RecipeError) as raised:
        examined(tmp_path, routed)
    (problem,) = raised.value.problems
    assert problem.key == "model.overrides.output_router_logits"
    assert "with parallel_config.pipeline_stage 2" in problem.what


def settled(folder: Path, **blocks: Any) -> Any:
    found = examined(folder, **blocks).recipe
    # What ranks read is what was settled, and is right as a recipe too.
    (folder / "settled.yaml").write_text(dump(found))
    again = load(folder / "settled.yaml").recipe
    assert again.parallel_config == found.parallel_config
    assert again.memory == found.memory
    return found


def test_without_stages_nothing_is_said_of_them(tmp_path: Path) -> None:
    parallel = settled(tmp_path, parallel_config={"pipeline_stage": 1}).parallel_config
    assert parallel.micro_batch_num == 1
    assert parallel.pipeline_scheduler is parallel.pipeline_interleave is None
    assert parallel.layers_per_stage is parallel.offset is None


def test_stages_are_settled_for_ranks_to_read(tmp_path: Path) -> None:
    found = settled(tmp_path)
    parallel = found.parallel_config
    assert (parallel.micro_batch_num, parallel.data_parallel) == (4, 2)
    assert (parallel.pipeline_scheduler, parallel.pipeline_interleave) == ("1f1b", False)
    stages = stages_of(found)
    assert stages and stages.sizes == parallel.layers_per_stage and sum(stages.sizes) == 9
    virtual = settled(tmp_path, parallel_config={"pp_interleave_num": 2})
    stages = stages_of(virtual)
    assert stages and virtual.parallel_config.pipeline_interleave is True
    assert virtual.parallel_config.layers_per_stage == (stages.sizes[:2], stages.sizes[2:])


@pytest.mark.parametrize(
    ("parallel", "sizes"),
    [
        ({"layers_per_stage": [2, 7]}, (2, 7)),
        ({"layers_per_stage": [[1, 2], [3, 3]], "pp_interleave_num": 2}, (1, 2, 3, 3)),
        ({"offset": [1, 0]}, (5, 4)),
        ({"offset": [[0, 1], [0, 0]], "pp_interleave_num": 2}, (2, 3, 2, 2)),
        ({"offset": [-1, 2]}, (3, 6)),
    ],
)
def test_stages_that_are_stated_are_taken(
    parallel: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    found = settled(tmp_path, parallel_config=parallel)
    stages = stages_of(found)
    assert stages and stages.sizes == sizes and found.parallel_config.offset is None


def test_a_head_that_weighs_as_layers_do_has_fewer_of_them(tmp_path: Path) -> None:
    small = stages_of(examined(tmp_path, {"vocab_size": 64}).recipe)
    large = stages_of(examined(tmp_path, {"vocab_size": 64_000}).recipe)
    assert small and small.sizes == (5, 4)
    assert large and large.sizes == (8, 1)
    # A layer whose forward is made again weighs a third more.
    kept = {"memory": {"gradient_checkpointing": False}}
    sizes = []
    for vocabulary in range(64, 4096, 64):
        both = [examined(tmp_path, {"vocab_size": vocabulary}, **one).recipe for one in ({}, kept)]
        again, once = (stages_of(one) for one in both)
        assert again and once
        sizes.append((again.sizes[1], once.sizes[1]))
    assert all(again >= once for again, once in sizes) and any(a > b for a, b in sizes)


def test_documents_of_the_data_deal_layers_out_and_check_says_that_it_has_not_seen_them(
    tmp_path: Path,
) -> None:
    data = {"data": {"sequence_length": 4096}}
    found = examined(tmp_path, {"vocab_size": 2000, "max_position_embeddings": 4096}, **data)
    short = found.knowing(rows=[Segments(tuple(range(0, 4097, 16)), 4096)])
    sizes = [one.recipe.parallel_config.layers_per_stage for one in (found, short)]
    assert sizes == [(5, 4), (6, 3)]
    doubt = "; layers are dealt out for rows of one document, which the data may change"
    stated = {"parallel_config": {"layers_per_stage": [5, 4]}}
    for one, doubtful in (
        (found, True),
        (short, False),
        (examined(tmp_path, {"max_position_embeddings": 4096}, **data, **stated), False),
        (examined(tmp_path, data={"packing": "none"}), False),
    ):
        (line,) = [line for line in one.settled if line.startswith("stages: ")]
        assert line.endswith(doubt) is doubtful, line


CHUNKS = {"seq_split_num": 4}
STATES = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def sentence(found: Examined) -> str:
    (line,) = [line for line in found.settled if line.startswith("stages: ")]
    return line


def test_chunks_of_rows_are_settled_and_told(tmp_path: Path) -> None:
    parallel = settled(tmp_path, parallel_config=CHUNKS).parallel_config
    assert (parallel.pipeline_scheduler, parallel.seq_split_num) == ("seqpipe", 4)
    assert settled(tmp_path).parallel_config.pipeline_scheduler == "1f1b"
    found = examined(tmp_path, parallel_config=CHUNKS)
    assert "seqpipe over 4 micro-batches in 4 chunks of equal time: ranks wait 6%" in sentence(
        found
    )
    assert "in 4 chunks" in sentence(examined(tmp_path, STATES, parallel_config=CHUNKS))
    assert "with" not in sentence(found) and "sends" not in sentence(found)
    shared = {**CHUNKS, "context_parallel": 2, "context_parallel_algo": "ring_cp"}
    found = examined(tmp_path, parallel_config={**shared, "sequence_chunks": "tokens"})
    assert "equal tokens (ring_cp sends keys 2.50 times as often as for whole rows" in sentence(
        found
    )
    by_heads = {**shared, "context_parallel_algo": "ulysses_cp"}
    assert "sends" not in sentence(examined(tmp_path, parallel_config=by_heads))
    coarse = {**CHUNKS, "model_parallel": 2, "use_seq_parallel": True}
    one = {"data": {"sequence_length": 10}, "training": {"global_batch_size": 4}}
    found = examined(tmp_path, {"num_key_value_heads": 2}, parallel_config=coarse, **one)
    assert "one takes 1." in sentence(found) and "have multiples of 2 tokens" in sentence(found)
    other = {**CHUNKS, "sequence_chunks": "tokens", "pp_interleave_num": 2}
    found = examined(tmp_path, parallel_config=other)
    assert "interleaved seqpipe over 4 micro-batches in 4 chunks of equal tokens" in sentence(found)
    alone = examined(tmp_path, parallel_config={"pipeline_scheduler": "seqpipe"})
    assert "seqpipe of 1 chunk (seq_split_num), which is 1f1b, over 4" in sentence(alone)


@pytest.mark.parametrize(
    ("model", "parallel", "key", "what"),
    [
        (
            {},
            {"context_parallel": 2, "context_parallel_algo": "ring_cp", "seq_split_num": 9},
            "sequence_length",
            "32 tokens do not make 9 chunks (parallel_config.seq_split_num), each of a multiple",
        ),
        (
            STATES,
            {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"},
            "seq_split_num",
            "is 4, and layers with a state of `qwen3_5_text` carry it from chunk to chunk on one "
            "rank, where 2 share a row",
        ),
        (
            {},
            {"context_parallel": 2, "context_parallel_algo": "ulysses_cp", "seq_split_num": 17},
            "sequence_length",
            "32 tokens do not make 17 chunks (parallel_config.seq_split_num), each of a multiple",
        ),
    ],
)
def test_chunks_beside_what_they_cannot_be_beside(
    model: dict[str, Any], parallel: dict[str, Any], key: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as raised:
        examined(tmp_path, model, parallel_config={**CHUNKS, **parallel})
    (problem,) = [one for one in raised.value.problems if one.key.endswith(key)]
    assert what in problem.what


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (STATES, "is 2, and layers with a state of `qwen3_5_text` take their tokens at once"),
        (EXPERTS, "is 2, and layers with experts of `qwen3_moe` take their tokens at once"),
    ],
)
def test_copies_of_layers_that_take_their_tokens_at_once(
    model: dict[str, Any], what: str, tmp_path: Path
) -> None:
    parallel = {"pipeline_stage": 1, "model_parallel": 2, "use_seq_parallel": True}
    batch = {"global_batch_size": 4}
    examined(tmp_path, model, parallel_config=parallel, training=batch)
    several = {**parallel, "fine_grain_interleave": 2}
    with pytest.raises(RecipeError) as raised:
        examined(tmp_path, model, parallel_config=several, training=batch)
    (problem,) = raised.value.problems
    assert problem.key.endswith("parallel_config.fine_grain_interleave")
    assert (problem.what, problem.remedy) == (what, "write 1")


def test_copies_of_layers_with_heads_of_two_sizes_are_refused() -> None:
    """Their layers are called with an embedding of their own, which no copy has."""
    shape = replace(hub("meta-llama/Llama-3.1-8B"), seeing_all=(2, 256), model_type="gemma4_text")
    words = ["parallel_config.fine_grain_interleave=2", "parallel_config.model_parallel=8"]
    file = ROOT / "recipes" / "llama3.1-70b-lora-tensor-32k.yaml"
    recipe = load(file, [*words, "parallel_config.use_seq_parallel=true"]).recipe
    found = run_findings(recipe, Layout(mesh_columns=8), shape)
    what = "is 2, and layers with heads of two sizes of `gemma4_text` take their tokens at once"
    assert ("parallel_config.fine_grain_interleave", what, "write 1") in [
        tuple(one) for one in found
    ]


@pytest.mark.parametrize("asked", [True, False, 1, 3, [2, 0], [[2, 0], [1, 1]]])
def test_checkpointed_layers_are_kept_as_they_are_asked_for(asked: Any, tmp_path: Path) -> None:
    virtual = 2 if isinstance(asked, list) and isinstance(asked[0], list) else 1
    found = settled(
        tmp_path,
        memory={"gradient_checkpointing": asked},
        parallel_config={"pp_interleave_num": virtual},
    )
    given = found.memory.gradient_checkpointing
    assert json.loads(json.dumps(given)) == asked and type(given) is not list


HEADS = "memory.attention_heads"


def asking(heads: object, **parallel: Any) -> Any:
    memory = MemoryBlock.model_validate({"attention_heads": heads})
    return SimpleNamespace(memory=memory, parallel_config=ParallelBlock(**parallel))


def test_more_heads_at_once_than_share_a_kv_head_are_refused() -> None:
    shape = hub("meta-llama/Llama-3.1-8B")
    for heads in ("all", 1, 3, 4):
        assert group_findings(asking(heads), shape) == []
    what = "is 5, and 4 query heads of the model share a KV head"
    assert group_findings(asking(5), shape) == [(HEADS, what, "write 4 or fewer, or all")]
    assert group_findings(asking(5), None) == []


def test_layers_with_heads_of_two_sizes_keep_all_heads() -> None:
    shape = replace(hub("meta-llama/Llama-3.1-8B"), seeing_all=(2, 256), model_type="gemma4_text")
    what = "is 1, and layers of `gemma4_text` have heads of two sizes"
    assert group_findings(asking(1), shape) == [(HEADS, what, "write all")]
    assert group_findings(asking("all"), shape) == []


def test_ranks_that_share_the_rows_of_a_kv_head_keep_all_heads() -> None:
    shape = replace(hub("meta-llama/Llama-3.1-8B"), model_type="phi3")
    assert group_findings(asking(1), shape, 8) == []
    what = "is 1, and 16 tensor ranks share the rows that make a KV head"
    assert group_findings(asking(1), shape, 16) == [
        (HEADS, what, "write all, or model_parallel: 8")
    ]
    assert group_findings(asking(1), replace(shape, model_type="llama"), 16) == []


def test_a_mesh_takes_all_heads() -> None:
    mesh = {"tensor_parallel_algo": "meshslice", "tensor_mesh": (2, 1), "model_parallel": 2}
    ((key, what, _),) = tile_findings(asking(2, **mesh))
    assert key == HEADS and "meshslice would move its matrices again" in what
    assert tile_findings(asking(2, model_parallel=2)) == []


def test_auto_is_the_least_on_the_wire_that_fits() -> None:
    """All heads, then those that share a KV head, and the fewer the more is to be saved."""
    shape, layout, row = hub("meta-llama/Llama-3.1-8B"), Layout(ulysses=8), 1 << 22
    memory = {"attention_heads": "auto", "recompute": "attention", "mlp_tile_tokens": 2340}
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": "x"},
            "data": {"train": "x", "sequence_length": row},
            "training": {"steps": 1, "global_batch_size": 1},
            "parallel_config": {"context_parallel": 8, "context_parallel_algo": "ulysses_cp"},
            "memory": {**memory, "offload_activations": "cpu", "loss_tile_tokens": 1024},
        }
    )
    options = options_of(recipe, layout)
    needs = {
        at: memory_of(shape, layout, row, options=replace(options, at_once=at)).peak_bytes
        for at in (None, 4, 2, 1)
    }
    assert needs[None] > needs[4] > needs[2] > needs[1]

    def found(card: float, device: str = "H100") -> object:
        hardware: Any = SimpleNamespace(device=device, memory=SimpleNamespace(bytes=card))
        return fitting_heads(recipe, shape, layout, hardware)

    for at, need in needs.items():
        assert found(need / USABLE_SHARE + 1) == (at or "all")
    assert found(1e9) == 1
    assert found(1e9, device="") == "all"
