"""What is predicted of activations beside what is counted, storage by storage, on fake tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from benchmarks.memory.count import count
from benchmarks.memory.peers import count_alst
from tests.support.ranks import spawn
from tests.support.shapes import hub
from uspft.config.algorithms import CONTEXT, WHOLE, row_of
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.activations import activations

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
}
TOKENS = 4096
"""Of one rank."""
TILED = {"mlp_tile_tokens": 512, "loss_tile_tokens": 1024}
OFFLOADED = {**TILED, "offload_activations": "cpu"}
ULYSSES = Layout(ulysses=4)
COPIED = Layout(ulysses=16)
"""Four ranks copy each key-value head, and attention's backward needs more than the MLP's."""
MANY = {
    "": {},
    "many words": {"vocab_size": 8192},
    "many heads": {"num_attention_heads": 64, "num_key_value_heads": 16},
    "many keys": {"num_key_value_heads": 16},
}
"""What other models have, where the loss, or attention's backward, needs more than the MLP."""
AGAIN = {**TILED, "recompute": "attention"}
CASES: list[tuple[str, str, Layout, dict[str, Any]]] = [
    ("whole", "", Layout(), {}),
    ("whole", "many words", Layout(), TILED),
    ("whole", "many words", Layout(), {"loss_tile_tokens": "none"}),
    ("whole", "", Layout(), {"recompute": "attention"}),
    ("whole", "", Layout(), TILED),
    ("ulysses_cp", "", ULYSSES, {"loss_tile_tokens": 1024}),
    ("ulysses_cp", "", ULYSSES, TILED),
    ("ulysses_cp", "", ULYSSES, {**TILED, "recompute": "exchange"}),
    ("ulysses_cp", "", ULYSSES, {**OFFLOADED, "recompute": "attention"}),
    ("ulysses_cp", "", ULYSSES, OFFLOADED),
    ("ulysses_cp", "", COPIED, TILED),
    ("ulysses_cp", "", COPIED, {**TILED, "recompute": "exchange"}),
    ("ulysses_cp", "", COPIED, {**OFFLOADED, "recompute": "attention"}),
    ("whole", "many words", Layout(), OFFLOADED),
    ("whole", "many heads", Layout(), TILED),
    ("whole", "many heads", Layout(), AGAIN),
    ("ring_cp", "", Layout(ring=2), {**OFFLOADED, "recompute": "attention"}),
    ("ring_cp", "many keys", Layout(ring=2), TILED),
    ("ring_cp", "many heads", Layout(ring=4), AGAIN),
    ("hybrid_cp", "many keys", Layout(ulysses=2, ring=3), {**TILED, "recompute": "exchange"}),
    ("planned_cp", "many keys", Layout(ring=2), AGAIN),
    ("planned_cp", "", Layout(ring=3), TILED),
    ("planned_cp", "many heads", Layout(ulysses=4, ring=4), OFFLOADED),
]
NORMED: list[tuple[str, str, Layout, dict[str, Any]]] = [
    ("whole", "", Layout(), {}),
    ("whole", "many heads", Layout(), AGAIN),
    ("ulysses_cp", "", COPIED, {**OFFLOADED, "recompute": "attention"}),
    ("ring_cp", "many keys", Layout(ring=2), TILED),
]
"""Of Qwen3, which norms each head of queries and keys."""
STAGES = "planned_cp", "many keys", Layout(ring=4), AGAIN
"""Whose keys come in so many stages, of one rank at a time or of several."""


def sizes_of(name: str) -> dict[str, Any]:
    return SIZES | MANY[name]


def shape_of(sizes: dict[str, Any], kind: str = "llama") -> ModelShape:
    return ModelShape(
        kind,
        sizes["hidden_size"],
        sizes["num_hidden_layers"],
        sizes["num_attention_heads"],
        sizes["num_key_value_heads"],
        sizes["head_dim"],
        sizes["intermediate_size"],
        sizes["vocab_size"],
        sizes["max_position_embeddings"],
        rope=None,
        tied=False,
        attention_bias=False,
        raw={},
    )


def counts() -> list[Any]:
    """In a process of its own, which has no process group yet."""
    return [
        *(_count(*case) for case in CASES),
        *(_count(*STAGES, stages=n) for n in (1, 2)),
        *(_count(*case, kind="Qwen3") for case in NORMED),
    ]


def _count(
    algorithm: str, name: str, layout: Layout, memory: Any, kind: str = "Llama", **options: Any
) -> Any:
    config = getattr(transformers, f"{kind}Config")(**sizes_of(name))
    config.dtype = torch.bfloat16
    row = config, TOKENS * layout.ranks, MemoryBlock(**memory), layout, algorithm
    return count(*row, **options)


def fake_and_real() -> list[tuple[Any, Any]]:
    """Of fewer tokens, counted both ways."""
    config = transformers.LlamaConfig(**SIZES)
    config.dtype = torch.bfloat16
    found = []
    for algorithm, _, layout, memory in (CASES[0], CASES[5]):
        block = MemoryBlock(**{**memory, "mlp_tile_tokens": 50})
        row = (config, 256 * layout.ranks, block, layout, algorithm)
        found.append((count(*row), count(*row, fake=False)))
        found.append((count(*row), count(*row, every_tile=False)))
    return found


def alst() -> dict[bool, Any]:
    """ALST's pieces on four ranks: whether offloaded, and what is counted."""
    config = transformers.LlamaConfig(**SIZES)
    config.dtype = torch.bfloat16
    return {away: count_alst(config, TOKENS * 4, 4, offload=away) for away in (False, True)}


def counted(rank: int) -> list[Any]:
    torch.distributed.destroy_process_group()
    found = [counts(), fake_and_real(), alst()]
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return found


def test_the_formula_predicts_the_count_within_two_percent() -> None:
    answers, both, peers = spawn(1, counted)[0]
    unit = TOKENS * SIZES["hidden_size"] * 2
    assert peers[False].layer_bytes == (unit, 0)
    assert peers[True].host_bytes == SIZES["num_hidden_layers"] * unit
    saved = peers[False].most_bytes["all"] - peers[True].most_bytes["all"]
    assert saved == peers[True].host_bytes
    for one, other in both:
        # But for scalars that are made outside of fake tensors' sight.
        assert abs(one.kept_bytes - other.kept_bytes) < 64 < one.kept_bytes
        assert abs(one.most_bytes["all"] - other.most_bytes["all"]) < 64
    off = {}
    every = [
        *((*case, 0, "llama") for case in CASES),
        *((*STAGES, stages, "llama") for stages in (1, 2)),
        *((*case, 0, "qwen3") for case in NORMED),
    ]
    for (algorithm, name, layout, memory, stages, kind), found in zip(every, answers, strict=True):
        want = activations(
            shape_of(sizes_of(name), kind),
            layout,
            TOKENS,
            MemoryBlock(**memory),
            row_of(algorithm if layout.ranks > 1 else None, layout.ranks),
            stages=stages,
        )
        assert want is not None
        assert found.host_bytes == pytest.approx(want.host_bytes, rel=1e-3), (name, memory)
        ratio = want.peak_bytes / found.most_bytes["all"]
        if abs(ratio - 1) > 0.02:
            off[algorithm, name, str(layout), str(memory), stages, kind] = ratio
    assert off == {}


def test_kept_by_a_layer_of_llama_8b() -> None:
    """In tensors of a layer's input, beside 1/64 for the log-sum-exp."""
    shape, tokens = hub("meta-llama/Llama-3.1-8B"), 1 << 17
    for layout, recompute, kept in (
        (Layout(ulysses=8), "nothing", 4.5),
        (Layout(ulysses=8), "exchange", 2.0),
        (Layout(ulysses=8), "attention", 1.0),
        (Layout(ring=8), "nothing", 2.0),
        (Layout(ring=8), "attention", 1.0),
    ):
        memory = MemoryBlock(recompute=recompute)  # type: ignore[arg-type]
        found = activations(shape, layout, tokens, memory, WHOLE)
        assert found is not None
        lse = 0.0 if recompute == "attention" else 1 / 64
        assert found.kept_bytes / found.input_bytes == kept + lse


def test_what_the_formula_does_not_know() -> None:
    shape, memory = hub("meta-llama/Llama-3.1-8B"), MemoryBlock()
    assert activations(shape, Layout(2), 1024, memory, WHOLE) is None
    assert activations(shape, Layout(ring=2), 1024, memory, CONTEXT["allgather_cp"]) is None
    kept = MemoryBlock(gradient_checkpointing=False)
    assert activations(shape, Layout(), 1024, kept, WHOLE) is None
    assert activations(replace(shape, model_type="granite"), Layout(), 1024, memory, WHOLE) is None
    windows = shape_of(SIZES, "mistral")  # of 4,096 keys, as transformers has them
    for tokens, known in ((2048, True), (2049, False)):
        found = activations(windows, Layout(ulysses=2), tokens, memory, WHOLE)
        assert (found is not None) == known
