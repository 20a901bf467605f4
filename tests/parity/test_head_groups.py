"""Attention in groups of heads gives what all heads at once give, forward and every gradient, and
sends what its algorithm's cost says.

One spawn for each number of ranks; models in float64 run through the modules of a run, without an
engine. Each control is a fault that must show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.attention import KINDS, busiest
from tests.support.ranks import spawn
from uspft.layout import Layout
from uspft.sequence import Cost, Traffic
from uspft.sequence.rows.traffic import FORWARDS, ONCE

ROW, TILE = 96, 7
PACKED = (0, 17, 40, 41, 95)
EXACT = 1e-12
NOTHING: Mapping[str, Any] = {}


class Model(NamedTuple):
    """A tiny model: transformers' name, its heads, and what of its config is not LLaMA's."""

    name: str
    heads: int
    kv_heads: int
    more: Mapping[str, Any] = NOTHING
    trained: Mapping[str, Any] = NOTHING


class Case(NamedTuple):
    """A model under a layout, with what memory says."""

    model: str
    layout: str
    at_once: int
    packed: bool = False
    memory: Mapping[str, Any] = NOTHING


_WINDOW = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}
_LORA = {"adapter": {"rank": 3, "alpha": 6.0, "dropout": 0.3}}
MODELS = {
    "llama 16/4": Model("Llama", 16, 4),
    "llama biases 8/2": Model("Llama", 8, 2, {"attention_bias": True, "mlp_bias": True}),
    "llama 6/3": Model("Llama", 6, 3),
    "llama lora 8/4": Model("Llama", 8, 4, {}, _LORA),
    "llama lora of some 8/4": Model(
        "Llama", 8, 4, {}, {"adapter": {**_LORA["adapter"], "target_modules": ["q_proj", "o_proj"]}}
    ),
    "frozen norms 8/2": Model("Llama", 8, 2, {}, {"freeze": ["norm", "k_proj"]}),
    "qwen3 window 16/4": Model(
        "Qwen3", 16, 4, {"use_sliding_window": True, "max_window_layers": 0, **_WINDOW}
    ),
    "granite 4/2": Model(
        "Granite", 4, 2, {"residual_multiplier": 0.5, "attention_multiplier": 0.3}
    ),
    "gemma2 8/4": Model("Gemma2", 8, 4, {"attn_logit_softcapping": 1.5, **_WINDOW}),
    "gemma3 4/1": Model("Gemma3Text", 4, 1, _WINDOW),
    "gpt-oss 8/2": Model(
        "GptOss",
        8,
        2,
        {"sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "smollm3 8/2": Model("SmolLM3", 8, 2, {"no_rope_layers": [1, 0]}),
}
LAYOUTS = {
    "whole": (Layout(), "whole"),
    "ulysses 2": (Layout(ulysses=2), "ulysses_cp"),
    "ring 2": (Layout(ring=2), "ring_cp"),
    "planned 2": (Layout(ring=2), "planned_cp"),
    "allgather 2": (Layout(ring=2), "allgather_cp"),
    "tensor 2": (Layout(mesh_columns=2), "whole"),
    "tensor 2, tokens split": (Layout(mesh_columns=2), "whole"),
    "ulysses 4": (Layout(ulysses=4), "ulysses_cp"),
    "hybrid 2 x 2": (Layout(ulysses=2, ring=2), "hybrid_cp"),
    "planned 2 x 2": (Layout(ulysses=2, ring=2), "planned_cp"),
    "tensor 2, ring 2": (Layout(mesh_columns=2, ring=2), "ring_cp"),
}
KEPT = {"recompute": "nothing", "offload_activations": "cpu"}
ALONE = [
    Case("llama 16/4", "whole", 1, True),
    Case("llama biases 8/2", "whole", 4),
    Case("llama lora 8/4", "whole", 1),
    Case("granite 4/2", "whole", 1, memory={"gradient_checkpointing": False}),
    Case("gemma2 8/4", "whole", 1, True),
    Case("smollm3 8/2", "whole", 2, memory=KEPT),
    Case("frozen norms 8/2", "whole", 3),
]
PAIRS = [
    Case("llama 16/4", "ulysses 2", 1, True),
    Case("llama 16/4", "planned 2", 2, memory=KEPT),
    Case("llama biases 8/2", "ring 2", 1, memory={"gradient_checkpointing": 1}),
    Case("llama lora 8/4", "ulysses 2", 2, True),
    Case("gpt-oss 8/2", "ulysses 2", 1, True),
    Case("qwen3 window 16/4", "tensor 2, tokens split", 2, True, KEPT),
    Case("llama 16/4", "ring 2", 4, True),
    Case("llama 16/4", "allgather 2", 3),
    Case("llama 6/3", "ulysses 2", 1, True),
    Case("llama lora of some 8/4", "ring 2", 1),
    Case("qwen3 window 16/4", "ulysses 2", 2, True, KEPT),
    Case("qwen3 window 16/4", "planned 2", 1, True),
    Case("gemma2 8/4", "ulysses 2", 2, True),
    Case("frozen norms 8/2", "planned 2", 2, True),
    Case("granite 4/2", "allgather 2", 2, True, KEPT),
    Case("llama 16/4", "tensor 2", 2, True),
    Case("llama lora 8/4", "tensor 2, tokens split", 1),
    Case("gemma3 4/1", "tensor 2", 1),
    Case("gemma3 4/1", "ulysses 2", 1),
    Case("smollm3 8/2", "ulysses 2", 4, memory={"mlp_tile_tokens": "none"}),
    Case("gpt-oss 8/2", "planned 2", 2, True),
    Case("gpt-oss 8/2", "tensor 2", 1, memory=KEPT),
]
FOURS = [
    Case("llama 16/4", "hybrid 2 x 2", 1, True),
    Case("llama biases 8/2", "planned 2 x 2", 2),
    Case("gemma3 4/1", "ulysses 4", 1, True),
    Case("llama 6/3", "ulysses 4", 1, True),
    Case("qwen3 window 16/4", "tensor 2, ring 2", 1, memory=KEPT),
    Case("llama lora 8/4", "planned 2 x 2", 1, True),
    Case("gpt-oss 8/2", "ulysses 4", 1, True),
]


class Ran(NamedTuple):
    """The loss of a row, what this rank makes of it, and every gradient; what this rank sent; what
    the algorithm says that each layer costs."""

    found: dict[str, Tensor]
    sent: dict[str, Traffic]
    costs: list[Cost]


def gradients(case: Case, at_once: int | None) -> Ran:
    """A row's forward and backward. at_once: None for all heads."""
    from benchmarks.memory.count import module_of, world_of
    from uspft.config.recipe import MemoryBlock
    from uspft.kernels.capped import TorchCapped
    from uspft.kernels.torch_cpu import TorchCpu
    from uspft.mesh import Groups
    from uspft.model.hf_config import heads_of, layer_windows
    from uspft.segments import Segments

    layout, algorithm = LAYOUTS[case.layout]
    name, heads, kv_heads, more, trained = MODELS[case.model]
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=heads * 8,
        head_dim=8,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        dtype=torch.float64,
        experts_implementation="eager",  # no other one takes float64
        **more,
    )
    block = {
        "recompute": "attention",
        "mlp_tile_tokens": TILE,
        "loss_tile_tokens": 16,
        **case.memory,
    }
    if block.get("gradient_checkpointing") is False:
        block["recompute"] = "auto"
    memory = MemoryBlock.model_validate({**block, "attention_heads": at_once or "all"})
    groups, parallel = Groups(), {"use_seq_parallel": True} if "tokens" in case.layout else {}
    cap = getattr(config, "attn_logit_softcapping", None)
    kernel = TorchCapped(cap) if cap else TorchCpu()
    world = world_of(layout, algorithm, torch.device("cpu"), kernel, parallel, groups=groups)
    module = module_of(config, memory, world, groups, trained)
    materialise(module)
    for number, parameter in enumerate(module.parameters()):
        draw = torch.Generator().manual_seed(number)
        with torch.no_grad():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
            parameter.copy_(0.2 * noise)
    row = Segments(PACKED, ROW) if case.packed else Segments.single(ROW)
    batch = batch_of(world, row)
    loss = module(batch, (1.0 / ROW,) * len(module.objective.terms)).sum()
    loss.backward()
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    sent = {k: Traffic(world.books.bytes[k], world.books.messages[k]) for k in KINDS}
    again, costs = memory.gradient_checkpointing, []
    for layer, window in enumerate(layer_windows(config)):
        runs = FORWARDS[memory.recompute] if again is True or again > layer else ONCE
        of_rank, runs = heads_of(config).on(layout.mesh_columns), runs._replace(at_once=at_once)
        costs.append(world.algorithm.cost(row, of_rank, 8, window, runs))
    return Ran({"loss": loss.detach(), **found}, sent, costs)


def materialise(module: torch.nn.Module) -> None:
    """Give adapters, which are on meta, memory."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta:
                real = torch.empty_like(parameter, device="cpu")
                setattr(owner, name, torch.nn.Parameter(real, parameter.requires_grad))


def batch_of(world: Any, row: Any) -> Any:
    """This rank's share of a row of random tokens."""
    from uspft.batch import Batch

    draw = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, 64, (ROW,), generator=draw) for _ in range(2))
    places = torch.zeros(ROW, dtype=torch.int64)
    for start, stop in row:
        places[start:stop] = torch.arange(stop - start)
    share = world.share([row])
    at = torch.cat([torch.arange(a, b) for a, b in share.held])
    every, rows = torch.arange(len(at)), torch.zeros_like(at)
    mine = ids[at][None], places[at][None], labels[at], every, at, rows
    return Batch(world, share, *mine, len(at), (0,))


def differs(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest relative difference; infinite where other parameters have a gradient."""
    if got.keys() != want.keys():
        return float("inf")
    pairs = [(got[name], one) for name, one in want.items()]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in pairs)


@contextmanager
def lost() -> Iterator[None]:
    """As if the gradients of one turn's keys were lost."""
    from uspft.model.head_groups import GroupsCall

    plain: Callable[..., Any] = GroupsCall.backward

    def fault(call: Any, qkv: Any, saved: Any, turn: Any) -> Any:
        dq, dk, *others = plain(call, qkv, saved, turn)
        return dq, dk * (turn is not call.turns[1]), *others

    with patch.object(GroupsCall, "backward", fault):
        yield


@contextmanager
def twice() -> Iterator[None]:
    """As if weight gradients of one tile were added twice."""
    import uspft.model.head_groups as module

    plain, seen = module.add_up, [0]

    def fault(sums: Any, found: Any) -> None:
        seen[0] += 1
        for _ in range(1 + (seen[0] == 3)):
            plain(sums, [None if one is None else one.clone() for one in found])

    with patch.object(module, "add_up", fault):
        yield


@contextmanager
def wrong_keys() -> Iterator[None]:
    """As if a turn attended with the keys of the group before it."""
    from uspft.model.head_groups import GroupsCall

    plain, before = GroupsCall.forward, list[Any]()

    def fault(call: Any, q: Any, k: Any, v: Any, turn: Any) -> Any:
        before.append((k, v))
        return plain(call, q, *before[0], turn)

    with patch.object(GroupsCall, "forward", fault):
        yield


CONTROLS = {"lost": lost, "twice": twice, "wrong keys": wrong_keys}


def work(rank: int, cases: list[Case]) -> tuple[list[float], dict[str, float], list[Ran]]:
    """How far each case is from all heads at once, and the first with each fault; what was sent."""
    found, ran = [], []
    for case in cases:
        want, got = gradients(case, None), gradients(case, case.at_once)
        found.append(differs(got.found, want.found))
        ran.append(got._replace(found={}))
        if case is cases[0]:
            truth = want.found
    faults = {}
    for name, control in CONTROLS.items():
        with control():
            faults[name] = differs(gradients(cases[0], cases[0].at_once).found, truth)
    return found, faults, ran


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, PAIRS[:6]),
        pytest.param(1, ALONE, marks=pytest.mark.full),
        pytest.param(2, PAIRS, marks=pytest.mark.full),
        pytest.param(4, FOURS, marks=pytest.mark.full),
    ],
    ids=["few", "alone", "pairs", "fours"],
)
def test_groups_of_heads_give_what_all_heads_give(ranks: int, cases: list[Case]) -> None:
    answers = spawn(ranks, work, cases)
    for number, case in enumerate(cases):
        assert max(found[number] for found, *_ in answers) < EXACT, case
        every = [ran[number] for *_, ran in answers]
        assert busiest([one.sent for one in every]) == summed(every[0].costs), case
    for name in CONTROLS:
        assert max(faults[name] for _, faults, _ in answers) > 1e-3, name


def summed(costs: list[Cost]) -> Cost:
    """What layers cost together."""
    found = {}
    for kind in KINDS:
        every = [getattr(one, kind) for one in costs]
        found[kind] = Traffic(sum(t.bytes for t in every), sum(t.messages for t in every))
    return Cost(**found)
