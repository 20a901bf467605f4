"""What is predicted of activations beside what is counted, storage by storage, on fake tensors: in
pairs of layout, model, type, what trains and what saves memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import transformers

from benchmarks.memory.count import count
from benchmarks.memory.predicted import predicted
from tests.support.models import BESIDE_MLP
from tests.support.pairwise import pairwise
from tests.support.ranks import alone, spawn
from tests.support.shapes import TWO_LAYERS, hub
from uspft.config.algorithms import CONTEXT, WHOLE
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.families import FAMILIES, ModelShape, read_shape
from uspft.layout import Layout
from uspft.planner.layer_kinds import LAYER_KINDS
from uspft.planner.memory.formula import fits, longest_row, memory_of, row_memory
from uspft.planner.options import Options
from uspft.prepare.host import CONFIGS

TOKENS = 4096
"""Of one rank."""
SIZES = {**TWO_LAYERS, "head_dim": 16, "max_position_embeddings": 1 << 20}
MANY = {"num_attention_heads": 64, "num_key_value_heads": 16}
"""Heads with which attention's backward needs more than the MLP's."""
STATES = {"linear_num_key_heads": 4, "linear_num_value_heads": 16}
STATES |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
STATES |= {"layer_types": ["linear_attention", "full_attention"]}
TWO_SIZES = {**MANY, "sliding_window": 512, "global_head_dim": 32, "attention_k_eq_v": True}
TWO_SIZES |= {"num_global_key_value_heads": 4, "hidden_size_per_layer_input": 0}
TWO_SIZES |= {"layer_types": ["sliding_attention", "full_attention"]}
EMBEDDINGS = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 512}
BORROWED = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_hidden_layers": 6}
BORROWED |= {"attention_k_eq_v": False, "layer_types": [*TWO_SIZES["layer_types"]] * 3}
BESIDE = {**BESIDE_MLP, "num_experts": 8, "moe_intermediate_size": 320}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
SHARED = {"num_experts_per_tok": 2, "num_experts": 8, "moe_intermediate_size": 320}
SHARED |= {"shared_expert_intermediate_size": 448}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 320}
ERNIE = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 320}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "many words": ("Llama", {"vocab_size": 8192}),
    "many heads": ("Llama", MANY),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", MANY),
    "window": ("Mistral", {**MANY, "sliding_window": 512}),
    "long window": ("Mistral", {**MANY, "sliding_window": 6000}),
    "gemma2": ("Gemma2", {**MANY, "sliding_window": 512}),
    "gemma3": ("Gemma3Text", {"sliding_window": 512, "num_hidden_layers": 6}),
    "gemma4": ("Gemma4Text", TWO_SIZES),
    "gemma4 moe": ("Gemma4Text", {**TWO_SIZES, **BESIDE}),
    "gemma4 embeddings": ("Gemma4Text", {**TWO_SIZES, **EMBEDDINGS}),
    "gemma4 joined": ("Gemma4Text", {**TWO_SIZES, **EMBEDDINGS, **BORROWED}),
    "granite": ("Granite", {"attention_bias": True}),
    "olmo2": ("Olmo2", MANY),
    "phi3": ("Phi3", {**MANY, "partial_rotary_factor": 0.5, "pad_token_id": None}),
    "smollm3": ("SmolLM3", {**MANY, "num_hidden_layers": 4, "pad_token_id": None}),
    "mixtral": ("Mixtral", {**EXPERTS, "sliding_window": None, "output_router_logits": True}),
    "qwen3 moe": ("Qwen3Moe", {**EXPERTS, **MANY, "num_experts": 8, "moe_intermediate_size": 320}),
    "minimax": ("MiniMaxM2", {**EXPERTS, **MANY, "rotary_dim": 8}),
    "gpt-oss": ("GptOss", {**EXPERTS, **MANY, "sliding_window": 512}),
    "states": ("Qwen3_5Text", STATES),
    "states by groups": ("Qwen3Next", {**STATES, **SHARED}),
    "states, experts": ("Qwen3_5MoeText", {**STATES, **SHARED, "linear_num_key_heads": 16}),
    "states, norms behind": (
        "OlmoHybrid",
        {**STATES, "rope_parameters": None, "pad_token_id": None},
    ),
    "shared": ("Qwen2Moe", SHARED),
    "granite moe": ("GraniteMoe", {**EXPERTS, "attention_bias": True}),
    "glm": ("Glm4Moe", {**GLM, **MANY, "use_qk_norm": True, "num_hidden_layers": 3}),
    "ernie": ("Ernie4_5_Moe", {**ERNIE, **MANY, "num_hidden_layers": 3}),
}
GATED = ("mixtral", "qwen3 moe")
HYBRIDS = ("states", "states by groups", "states, experts", "states, norms behind")
ROUTED = (
    "mixtral",
    "qwen3 moe",
    "minimax",
    "gpt-oss",
    "shared",
    "granite moe",
    "glm",
    "ernie",
    "gemma4 moe",
    *HYBRIDS[1:3],
)
CALLED_OTHERWISE = ("granite moe", "gemma4 moe")
"""Models whose experts have other names than most."""
FUSED = ("phi3",)


def on_mesh(rows: int, columns: int, *slices: int) -> dict[str, Any]:
    asked = {"tensor_parallel_algo": "meshslice", "tensor_mesh": (rows, columns)}
    return {"parallel": {**asked, "tensor_slices": slices}}


LAYOUTS: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "whole": (Layout(), "ulysses_cp", {}),
    "ulysses 3": (Layout(ulysses=3), "ulysses_cp", {}),
    "ulysses 4": (Layout(ulysses=4), "ulysses_cp", {}),
    "ulysses 16": (Layout(ulysses=16), "ulysses_cp", {}),
    "ring 2": (Layout(ring=2), "ring_cp", {}),
    "ring 4": (Layout(ring=4), "ring_cp", {}),
    "hybrid": (Layout(ulysses=2, ring=3), "hybrid_cp", {}),
    "allgather": (Layout(ring=4), "allgather_cp", {}),
    "planned 2": (Layout(ring=2), "planned_cp", {}),
    "planned 4": (Layout(ulysses=2, ring=4), "planned_cp", {}),
    "experts 2": (Layout(ring=2, experts=2), "ring_cp", {}),
    "experts 4": (Layout(ulysses=4, experts=4), "ulysses_cp", {}),
    "planned, stages": (Layout(ring=4), "planned_cp", {"stages": 2}),
    "tensor": (Layout(mesh_columns=2), "ulysses_cp", {}),
    "tensor, tokens": (
        Layout(mesh_columns=2),
        "ulysses_cp",
        {"parallel": {"use_seq_parallel": True}},
    ),
    "tensor, ring": (
        Layout(mesh_columns=2, ring=2),
        "ring_cp",
        {"parallel": {"use_seq_parallel": True}},
    ),
    "tensor, experts": (Layout(mesh_columns=2, ring=2, experts=2), "ring_cp", {}),
    "mesh 1 2": (Layout(mesh_columns=2, blocks=True), "ulysses_cp", on_mesh(1, 2, 1, 1, 1, 1)),
    "mesh 2 1": (Layout(ulysses=2, mesh_rows=2), "ulysses_cp", on_mesh(2, 1, 2, 2, 2, 2)),
    "mesh 2 2": (Layout(2, ring=2, mesh_rows=2), "ring_cp", on_mesh(2, 2, 2, 4, 1, 4)),
    "mesh 2 4": (Layout(4, ulysses=2, ring=2, mesh_rows=2), "hybrid_cp", on_mesh(2, 4, 1, 1, 2, 1)),
}
TILED = {"mlp_tile_tokens": 512, "loss_tile_tokens": 1024}
SAVING: dict[str, dict[str, Any]] = {
    "none": {"gradient_checkpointing": False, "loss_tile_tokens": "none"},
    "none, tiles": {"gradient_checkpointing": False, **TILED},
    "nothing": {"recompute": "nothing", "loss_tile_tokens": 1024},
    "exchange": {"recompute": "exchange", **TILED},
    "attention": {"recompute": "attention", "loss_tile_tokens": 1024},
    "attention, tiles": {"recompute": "attention", **TILED},
    "two tiles": {"recompute": "attention", "mlp_tile_tokens": 3000, "loss_tile_tokens": 3000},
    "offload": {"offload_activations": "cpu", "recompute": "attention", **TILED},
    "offload more": {"offload_activations": "cpu", "loss_tile_tokens": 1024},
    "offload of one layer": {
        **{"offload_activations": "cpu", "gradient_checkpointing": 1},
        **{"recompute": "exchange", "loss_tile_tokens": 1024},
    },
    "groups": {"attention_heads": 4, "recompute": "attention", **TILED},
    "groups kept": {"attention_heads": 2, "recompute": "nothing", **TILED},
    "groups away": {"attention_heads": 1, "offload_activations": "cpu", **TILED},
    "groups, whole": {"attention_heads": 3, "recompute": "attention", "loss_tile_tokens": 1024},
    "groups, no layer again": {"attention_heads": 4, "gradient_checkpointing": False, **TILED},
}
STACKED = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ROUTER = {"target_parameters": ["mlp.gate.weight"]}
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"adapter": {"type": "lora", "rank": 8}},
    "some lora": {
        "adapter": {"type": "lora", "rank": 4, "target_modules": ["q_proj", "down_proj"]}
    },
    "experts lora": {"adapter": {"type": "lora", "rank": 8, "target_modules": [], **STACKED}},
    "router lora": {"adapter": {"type": "lora", "rank": 8, "target_modules": [], **ROUTER}},
    "no mlp": {"freeze": ["mlp", "norm"]},
    "last layer": {"freeze": [r"layers\.0\.", "embed"]},
}
DTYPES = ("bfloat16", "float32")
ROWS = (1, 2)
"""Of a micro-batch."""


class Case(NamedTuple):
    """What is counted."""

    model: str
    layout: str
    saving: str
    trained: str
    dtype: str
    rows: int = 1


FEW = [
    Case("llama", "whole", "none", "all", "bfloat16"),
    Case("many words", "tensor", "none, tiles", "lora", "float32"),
    Case("many heads", "ulysses 4", "exchange", "no mlp", "bfloat16"),
    Case("qwen2", "ulysses 16", "offload", "all", "float32"),
    Case("qwen3", "tensor, tokens", "nothing", "lora", "bfloat16"),
    Case("window", "planned 2", "offload more", "last layer", "float32"),
    Case("long window", "planned, stages", "attention", "some lora", "float32"),
    Case("gemma2", "tensor, ring", "attention, tiles", "all", "bfloat16"),
    Case("gemma3", "mesh 1 2", "nothing", "no mlp", "bfloat16"),
    Case("gemma4", "tensor, ring", "exchange", "all", "bfloat16"),
    Case("gemma4 moe", "experts 4", "attention, tiles", "all", "bfloat16"),
    Case("gemma4 moe", "tensor, experts", "none, tiles", "lora", "bfloat16"),
    Case("gemma4 embeddings", "tensor, tokens", "nothing", "lora", "bfloat16"),
    Case("gemma4 embeddings", "ulysses 4", "none, tiles", "last layer", "float32"),
    Case("gemma4 joined", "hybrid", "attention, tiles", "all", "bfloat16"),
    Case("gemma4 joined", "ring 2", "offload", "lora", "bfloat16"),
    Case("gemma4 joined", "ulysses 16", "none, tiles", "all", "float32"),
    Case("granite", "mesh 2 1", "attention", "some lora", "float32"),
    Case("olmo2", "tensor, tokens", "exchange", "all", "bfloat16"),
    Case("phi3", "mesh 2 2", "none", "all", "bfloat16"),
    Case("smollm3", "mesh 2 4", "nothing", "lora", "bfloat16"),
    Case("mixtral", "ring 2", "none", "lora", "bfloat16"),
    Case("qwen3 moe", "hybrid", "offload", "all", "bfloat16"),
    Case("gpt-oss", "allgather", "nothing", "no mlp", "bfloat16"),
    Case("minimax", "experts 4", "none, tiles", "all", "bfloat16"),
    Case("mixtral", "experts 2", "offload", "lora", "bfloat16"),
    Case("qwen3 moe", "experts 4", "attention, tiles", "all", "bfloat16"),
    Case("gpt-oss", "experts 2", "nothing", "all", "bfloat16"),
    Case("gpt-oss", "tensor, tokens", "attention, tiles", "all", "bfloat16"),
    Case("qwen3 moe", "tensor, ring", "offload", "lora", "bfloat16"),
    Case("qwen3 moe", "tensor, experts", "nothing", "all", "bfloat16"),
    Case("mixtral", "whole", "none", "experts lora", "bfloat16"),
    Case("qwen3 moe", "experts 2", "nothing", "experts lora", "bfloat16"),
    Case("gpt-oss", "tensor, experts", "attention, tiles", "experts lora", "bfloat16"),
    Case("mixtral", "ring 2", "none", "router lora", "bfloat16"),
    Case("glm", "tensor, experts", "attention, tiles", "all", "bfloat16"),
    Case("glm", "whole", "none", "experts lora", "bfloat16"),
    Case("ernie", "experts 2", "none, tiles", "all", "bfloat16"),
    Case("ernie", "tensor, tokens", "nothing", "lora", "bfloat16"),
    Case("states", "planned 4", "exchange", "all", "bfloat16"),
    Case("states by groups", "ulysses 4", "exchange", "all", "bfloat16"),
    Case("states, experts", "tensor", "none, tiles", "lora", "bfloat16"),
    Case("states, norms behind", "ring 2", "none, tiles", "last layer", "float32"),
    Case("shared", "tensor, tokens", "attention, tiles", "all", "bfloat16"),
    Case("states", "ring 4", "offload", "some lora", "float32"),
    Case("states", "tensor, tokens", "nothing", "lora", "bfloat16"),
    Case("granite moe", "tensor, experts", "attention, tiles", "lora", "bfloat16"),
    Case("many heads", "planned 4", "groups", "all", "bfloat16"),
    Case("qwen3", "tensor, tokens", "groups kept", "lora", "bfloat16"),
    Case("gpt-oss", "ulysses 4", "groups away", "no mlp", "bfloat16"),
    Case("window", "ulysses 4", "groups, whole", "last layer", "float32"),
    Case("gemma2", "allgather", "groups, no layer again", "some lora", "bfloat16"),
    Case("olmo2", "whole", "groups", "all", "bfloat16"),
    Case("phi3", "ulysses 4", "groups kept", "all", "float32"),
    Case("many heads", "tensor", "groups", "lora", "bfloat16"),
    Case("many heads", "tensor, ring", "groups", "all", "bfloat16"),
    Case("states", "hybrid", "groups", "all", "bfloat16"),
    Case("states by groups", "ring 2", "groups kept", "all", "bfloat16"),
    Case("states, norms behind", "ulysses 16", "groups, whole", "all", "float32"),
    Case("states, norms behind", "ulysses 16", "none, tiles", "last layer", "float32"),
    Case("states", "tensor, tokens", "groups, whole", "all", "bfloat16"),
    Case("states, norms behind", "tensor, tokens", "groups, whole", "all", "bfloat16"),
    Case("states by groups", "planned 4", "groups, whole", "all", "bfloat16"),
    Case("granite moe", "tensor, experts", "groups away", "lora", "bfloat16"),
    Case("states, experts", "planned 2", "groups away", "all", "bfloat16"),
    Case("gemma4", "tensor", "exchange", "last layer", "bfloat16"),
    Case("many heads", "whole", "two tiles", "last layer", "bfloat16"),
    Case("many heads", "planned 4", "none", "all", "bfloat16"),
    Case("many heads", "ulysses 3", "none, tiles", "all", "bfloat16"),
    Case("gemma4", "ulysses 3", "none, tiles", "last layer", "bfloat16"),
    Case("llama", "ulysses 4", "offload of one layer", "all", "bfloat16", 2),
    Case("many heads", "hybrid", "none, tiles", "all", "float32", 2),
    Case("states", "ulysses 4", "attention, tiles", "all", "bfloat16", 2),
    Case("many heads", "ulysses 4", "groups", "all", "bfloat16", 2),
    Case("states", "ulysses 4", "groups", "all", "bfloat16", 2),
]
"""Every value of each is among them."""


def in_copies(copies: int, *, splits: bool) -> dict[str, Any]:
    return {"parallel": {"use_seq_parallel": splits, "fine_grain_interleave": copies}}


COPIES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "tokens, copies": (Layout(mesh_columns=2), "ulysses_cp", in_copies(2, splits=True)),
    "ring, copies": (Layout(mesh_columns=2, ring=2), "ring_cp", in_copies(4, splits=False)),
}
FEW_IN_COPIES = [
    Case("many heads", "tokens, copies", "none", "all", "bfloat16"),
    Case("many heads", "tokens, copies", "offload", "all", "bfloat16"),
    Case("gemma2", "ring, copies", "none", "all", "bfloat16"),
    Case("llama", "ring, copies", "nothing", "no mlp", "bfloat16"),
    Case("qwen3", "tokens, copies", "nothing", "lora", "bfloat16"),
    Case("gemma2", "ring, copies", "nothing", "all", "bfloat16"),
    Case("many heads", "ring, copies", "attention", "all", "bfloat16"),
]


PARTS = 10
"""Of all pairs, which together take longer than a test may."""


@cache
def cases(*, full: bool) -> list[Case]:
    factors = tuple(MODELS), tuple(LAYOUTS), tuple(SAVING), tuple(TRAINED), DTYPES, ROWS
    return [Case(*case) for case in pairwise(*factors, legal=legal)] if full else FEW


def legal(traits: tuple[Any, ...]) -> bool:
    """Whether a recipe may ask for it, and it can be counted."""
    case = Case(*traits)
    if case.model in ROUTED and "mesh" in case.layout:
        return False
    if case.model in ROUTED and case.dtype == "float32":  # grouped products on meta have one type
        return False
    if case.trained == "no mlp" and case.model == "granite moe":
        return False
    if "experts" in case.layout and case.model not in ROUTED:
        return False
    if case.trained == "experts lora" and case.model not in ROUTED:
        return False
    if case.trained == "experts lora" and case.model in CALLED_OTHERWISE:
        return False
    if case.trained == "router lora" and case.model not in GATED:
        return False
    grouped = "attention_heads" in SAVING[case.saving]
    if "mesh" in case.layout and (grouped or "mlp_tile_tokens" in SAVING[case.saving]):
        return False
    if case.model in HYBRIDS and "mesh" in case.layout:
        return False
    if case.model.startswith("gemma4") and ("mesh" in case.layout or grouped):
        return False
    return case.trained != "some lora" or case.model not in ROUTED + FUSED


def config_of(model: str, dtype: str, sizes: dict[str, Any] | None = None) -> Any:
    kind, changes = MODELS[model]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes, **(sizes or {})})
    config.dtype = getattr(torch, dtype)
    return config


def counted(rank: int, wanted: list[Case], every_tile: bool, folder: Path) -> dict[Case, Any]:
    """What is counted, in a process that has no process group yet."""
    found = {}
    with alone():
        for case in wanted:
            config = config_of(case.model, case.dtype)
            config.save_pretrained(folder / case.model)
            layout, algorithm, options = {**LAYOUTS, **COPIES}[case.layout]
            memory, trained = MemoryBlock(**SAVING[case.saving]), TRAINED[case.trained]
            of = {"rows": case.rows, "every_tile": every_tile, "trained": trained}
            row = TOKENS * layout.context
            found[case] = count(config, row, memory, layout, algorithm, **of, **options)
    return found


def predicted_of(case: Case, shape: ModelShape, **others: Any) -> Any:
    layout, algorithm, options = {**LAYOUTS, **COPIES}[case.layout]
    return predicted(
        shape,
        layout,
        TOKENS * layout.context,
        MemoryBlock(**SAVING[case.saving]),
        algorithm,
        dtype=case.dtype,
        rows=case.rows,
        trained=TRAINED[case.trained],
        **options | others,
    )


@pytest.mark.parametrize(
    "part", [None, *(pytest.param(part, marks=pytest.mark.full) for part in range(PARTS))]
)
def test_the_formula_predicts_the_count_within_two_percent(
    part: int | None, tmp_path: Path
) -> None:
    full = part is not None
    every = cases(full=full)
    for number, values in enumerate((MODELS, LAYOUTS, SAVING, TRAINED, DTYPES, ROWS)):
        assert {case[number] for case in every} == set(values)
    found = spawn(1, counted, every[part::PARTS] if full else every, full, tmp_path)[0]
    off: dict[Case, Any] = {}
    for case, one in found.items():
        shape = read_shape(ModelBlock(config=tmp_path / case.model), CONFIGS)
        assert isinstance(shape, ModelShape)
        want = predicted_of(case, shape)
        ratio = want.activation_bytes / one.most_bytes["all"]
        if abs(ratio - 1) > 0.02:
            off[case] = ratio
        if want.host_bytes != pytest.approx(one.host_bytes, rel=1e-3):
            off[case] = want.host_bytes, one.host_bytes
        if not full:  # where the loss is not all there is, another type is found out
            other = case._replace(dtype="float32" if case.dtype == "bfloat16" else "bfloat16")
            unlike = predicted_of(other, shape).activation_bytes / one.most_bytes["all"]
            assert abs(unlike - 1) > 0.1
    assert not off, "\n".join(f"{case}: {found}" for case, found in off.items())


def test_layers_in_copies_and_what_they_put_off_are_predicted(tmp_path: Path) -> None:
    off, gains = {}, []
    for case, one in spawn(1, counted, FEW_IN_COPIES, False, tmp_path)[0].items():
        shape = read_shape(ModelBlock(config=tmp_path / case.model), CONFIGS)
        assert isinstance(shape, ModelShape)
        have, want = one.most_bytes["all"], predicted_of(case, shape).activation_bytes
        if abs(want / have - 1) > 0.02:
            off[case] = want / have
        parallel = COPIES[case.layout][2]["parallel"] | {"fine_grain_interleave": 1}
        whole = predicted_of(case, shape, parallel=parallel)
        gains.append(have / whole.activation_bytes)
    assert off == {}
    assert max(gains) > 1.2, "layers that take all tokens at once are found out"


def counted_under_zero_3(rank: int, *wanted: Any) -> dict[Case, Any]:
    with patch.object(torch.nn.Parameter, "ds_id", 0, create=True):
        return counted(rank, *wanted)


def test_under_zero_3_copies_put_nothing_off(tmp_path: Path) -> None:
    case = Case("qwen3", "tokens, copies", "nothing", "lora", "bfloat16")
    have = spawn(1, counted_under_zero_3, [case], False, tmp_path)[0][case].most_bytes["all"]
    shape = read_shape(ModelBlock(config=tmp_path / case.model), CONFIGS)
    assert isinstance(shape, ModelShape)
    off = [abs(predicted_of(case, shape, zero_stage=n).activation_bytes / have - 1) for n in (1, 3)]
    assert off[1] <= 0.02 < off[0]


def test_a_card_fits_what_is_at_most_its_usable_share() -> None:
    shape, options = hub("meta-llama/Llama-3.1-8B"), Options(CONTEXT["ulysses_cp"], zero_stage=3)
    layout = Layout(ulysses=8)
    longest = longest_row(shape, layout, 80e9, options=options)
    assert longest % (1024 * 8) == 0
    for tokens, there in ((longest, True), (longest + 8192, False)):
        need = memory_of(shape, layout, tokens, options=options)
        assert fits(need, 80e9) == there == (need.peak_bytes <= 0.92 * 80e9)
    assert longest_row(shape, layout, 8e9, options=options) == 0
    away = replace(options, offload_activations=True)
    assert longest_row(shape, layout, 80e9, options=away) > longest


def test_several_rows_take_at_most_what_is_said_of_each() -> None:
    """Within a hundredth; of a line through one row and two many rows would take more."""
    one_rank, ring = (WHOLE, Layout()), (CONTEXT["ring_cp"], Layout(ring=4))
    ulysses = CONTEXT["ulysses_cp"], Layout(ulysses=4)
    steeper = set[bool]()
    for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B"):
        for row, layout in (one_rank, ring, ulysses):
            each, once = row_memory(Options(), hub(name), row, layout, TOKENS)
            found = {}
            for rows in (1, 2, 3, 8, 40, 100):
                options = Options(algorithm=row, micro_batch=rows, zero_stage=0)
                of = memory_of(hub(name), layout, TOKENS, options=options)
                found[rows] = of.activation_bytes
                assert 0.99 * found[rows] < once + rows * each < 1.3 * found[rows], (name, layout)
            through_two = found[1] + 39 * (found[2] - found[1])
            steeper.add(through_two < 0.99 * found[40])
    assert steeper == {True, False}


def test_groups_of_heads_save_what_the_rank_with_most_heads_has() -> None:
    """Of 32 heads over three ranks 11, in other turns than the first rank's 10: on the host wait
    their log-sum-exps and the output of all heads."""
    options = Options(CONTEXT["ulysses_cp"], at_once=1, offload_activations=True)
    shape, layout = hub("meta-llama/Llama-3.1-8B"), Layout(ulysses=3)
    kept, again = (
        memory_of(shape, layout, 3 * TOKENS, options=replace(options, recompute=one)).host_bytes
        for one in ("nothing", "attention")
    )
    assert kept - again == 32 * TOKENS * (2 * 32 * 128 + 4 * 3 * 11)


def test_a_checkpoint_that_waits_on_the_host_is_counted() -> None:
    """Weight and moments in float32 of each parameter, dealt out over ranks that hold the same."""
    shape = hub("meta-llama/Llama-3.1-8B")
    parameters = 8_030_261_248
    for layout, zero in ((Layout(data=4), 1), (Layout(ulysses=4), 3)):
        options = Options(zero_stage=zero)
        one, other = (
            memory_of(shape, layout, 8192, options=replace(options, saves_beside=beside))
            for beside in (False, True)
        )
        assert other.host_bytes - one.host_bytes == 12 * parameters // 4
        assert other.peak_bytes == one.peak_bytes


def test_with_several_layouts_zero_2_takes_a_layers_gradients_together() -> None:
    shape, elements = hub("meta-llama/Llama-3.1-8B"), {}
    for switches in (False, True):
        options = Options(zero_stage=2, switches=switches)
        parts = memory_of(shape, Layout(data=4), 8192, options=options).parts
        elements[switches] = parts["buckets"] / 2
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336 + 2)
    assert elements[True] - elements[False] == layer - 4096 * 14336


def test_of_divided_experts_a_rank_holds_a_part() -> None:
    """The optimizer's state is as large, whoever has it; weights, and what ZeRO-3 gathers, are
    not."""
    shape = hub("Qwen/Qwen3-30B-A3B")
    experts = 48 * 3 * 128 * 2048 * 768
    rest = 30_532_122_624 - experts
    state, gathered = {}, {}
    for stage in (1, 3):
        for degree in (1, 2, 8):
            options = Options(zero_stage=stage, live=0, reuse=0, bucket=2)
            found = memory_of(shape, Layout(data=8, experts=degree), 4096, options=options).parts
            state[stage, degree] = found["optimizer"], found["weights"]
            gathered[stage, degree] = found.get("gathered", 0)
    for degree in (2, 8):
        assert state[3, degree] == pytest.approx(state[3, 1], rel=1e-6)
        optimizer, weights = state[1, degree]
        assert optimizer == pytest.approx(12 * (rest + experts) / 8, rel=1e-3)
        assert weights == pytest.approx(2 * (rest + experts / degree), rel=1e-3)
    assert gathered[3, 8] == pytest.approx(2 * 151_936 * 2048, rel=1e-3)  # the head, at the loss
    assert gathered[3, 1] > 2 * gathered[3, 8]


def test_the_formula_knows_every_family() -> None:
    assert {*FAMILIES} == {*LAYER_KINDS}


HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
WIDTHS: dict[str, dict[str, Any]] = {
    "7B": {
        **{"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000},
        **{**HEADS, "num_key_value_heads": 32},
    },
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, **HEADS},
    "70B": {
        **{"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256},
        **{**HEADS, "num_attention_heads": 64},
    },
}
WIDE = [
    ("8B", "tensor, tokens", "groups", "all"),
    ("7B", "ring 4", "none, tiles", "all"),
    ("8B", "ulysses 4", "nothing", "all"),
    ("8B", "planned 4", "offload", "no mlp"),
    ("70B", "tensor, tokens", "attention", "lora"),
    ("70B", "tensor, ring", "exchange", "all"),
    ("70B", "mesh 2 4", "nothing", "lora"),
]


def counted_wide(rank: int) -> list[int]:
    torch.distributed.destroy_process_group()
    found = []
    for width, place, saving, trained in WIDE:
        config = config_of("llama", "bfloat16", WIDTHS[width])
        layout, algorithm, options = LAYOUTS[place]
        memory, row = MemoryBlock(**SAVING[saving]), TOKENS * layout.context
        one = count(config, row, memory, layout, algorithm, trained=TRAINED[trained], **options)
        found.append(one.most_bytes["all"])
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return found


def test_two_layers_of_real_widths_are_predicted_within_one_percent() -> None:
    off, llama = {}, hub("meta-llama/Llama-3.1-8B")
    for (width, place, saving, trained), one in zip(WIDE, spawn(1, counted_wide)[0], strict=True):
        sizes = WIDTHS[width]
        shape = replace(
            llama,
            layers=2,
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            vocab_size=sizes["vocab_size"],
            heads=sizes["num_attention_heads"],
            kv_heads=sizes["num_key_value_heads"],
        )
        layout, algorithm, options = LAYOUTS[place]
        want = predicted(
            shape,
            layout,
            TOKENS * layout.context,
            MemoryBlock(**SAVING[saving]),
            algorithm,
            trained=TRAINED[trained],
            **options,
        )
        if abs(want.activation_bytes / one - 1) > 0.01:
            off[width, place, saving, trained] = want.activation_bytes / one
    assert off == {}
