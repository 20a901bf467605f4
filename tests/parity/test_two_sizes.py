"""Gemma 4's layers over ranks, packed rows of them: heads of two sizes, keys that are values,
experts beside an MLP, embeddings of each layer, keys that other layers made. Loss and every
gradient are those of plain transformers with each document by itself in one process, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4

from tests.support.attention import GROUPS
from tests.support.models import BESIDE_MLP, VOCABULARY, settle
from tests.support.ranks import spawn
from tests.support.rows import packed
from tests.support.wide import widened
from uspft.comm import Books
from uspft.config.algorithms import CONTEXT
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import make_mesh
from uspft.model.attention import NAME, Bound
from uspft.model.causal import CausalModel, ForwardPass
from uspft.model.recompute import Recompute
from uspft.segments import Segments
from uspft.sequence import make_algorithm
from uspft.tensor.megatron import Megatron
from uspft.world import World

RANKS = 4
ROW = Segments(packed([5, 90, 2, 1, 60, 30]).bounds, 192)
"""A row ends in padding."""
DEGREES = {
    "ulysses_cp": (4, 1),
    "ring_cp": (1, 4),
    "hybrid_cp": (2, 2),
    "allgather_cp": (1, 4),
    "planned_cp": (2, 2),
}
MODELS: dict[str, dict[str, Any]] = {
    "experts": {
        **{"num_global_key_value_heads": 1, "attention_k_eq_v": True, **BESIDE_MLP},
        "hidden_size_per_layer_input": 0,
    },
    "joined": {
        **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCABULARY},
        **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    },
}
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 8, "global_head_dim": 12, "sliding_window": 11},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    **{"initializer_range": 0.3, "final_logit_softcapping": 3.0, "use_cache": False},
}


class Case(NamedTuple):
    """One comparison."""

    model: str
    algorithm: str
    again: Recompute | None = None
    """What of attention is made again where layers are checkpointed."""
    fault: str = ""


CASES = [
    Case(model, algorithm, (None, "nothing", "attention")[number % 3])
    for number, (model, algorithm) in enumerate(product(MODELS, DEGREES))
]
CONTROLS = [
    Case("experts", "ring_cp", None, "no window"),
    Case("experts", "hybrid_cp", None, "no scalar"),
    Case("joined", "planned_cp", None, "keys of others detached"),
    Case("joined", "ulysses_cp", None, "embeddings of other tokens"),
]
UNSEEN_IN_LOSS = {"keys of others detached"}


def make(case: Case, attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gemma4_text", **SIZES, **MODELS[case.model])
    net = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float64,
        attn_implementation=attention,
        experts_implementation="eager",  # the others have no float64
    )
    net = net.to(torch.float64)
    settle(net)
    if case.again:
        enable = getattr(net, "activation_checkpointing_enable", None)
        (enable or net.gradient_checkpointing_enable)({"use_reentrant": False})
    return net.train()


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels (−100: none) and positions of the row's tokens."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(1, VOCABULARY, (ROW.length,), generator=generator) for _ in "ab")
    positions = torch.zeros(ROW.length, dtype=torch.long)
    for start, stop in ROW:
        positions[start:stop] = torch.arange(stop - start)
    labels[ROW.bounds[-1] :] = -100
    return ids, labels, positions


def loss_of(net: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    cap = SIZES["final_logit_softcapping"]
    logits = cap * torch.tanh(net.lm_head(hidden)[0] / cap)
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / ROW.bounds[-1]


Wanted = tuple[float, dict[str, Any]]


def alone(case: Case) -> Wanted:
    """Loss and gradients of one process, each document by itself."""
    net, total, (ids, labels, _) = make(case, "eager"), 0.0, tokens()
    with widened(modeling_gemma4):
        for start, stop in ROW:
            found = net.model(input_ids=ids[None, start:stop], use_cache=False)
            loss = loss_of(net, found.last_hidden_state, labels[start:stop])
            loss.backward()
            total += float(loss.detach())
    return total, {name: p.grad.numpy() for name, p in net.named_parameters()}


def faulty(fault: str, net: Any) -> list[Any]:
    """Patches that make one deliberate error."""
    attend = Bound.attend
    borrowers = {id(layer.self_attn) for layer in net.model.layers[2:]}

    def unwindowed(self: Bound, layer: int, qkv: Any, rule: Any) -> Tensor:
        return attend(self, layer, qkv, replace(rule, window=None))

    def detached(self: Bound, layer: int, qkv: Any, rule: Any) -> Tensor:
        q, k, v = qkv
        return attend(self, layer, (q, k.detach(), v.detach()) if layer in borrowers else qkv, rule)

    return {
        "no window": [mock.patch.object(Bound, "attend", unwindowed)],
        "keys of others detached": [mock.patch.object(Bound, "attend", detached)],
        "no scalar": [
            mock.patch.object(layer, "layer_scalar", torch.ones(1)) for layer in net.model.layers
        ],
    }.get(fault, [])


def world_of(algorithm: str) -> World:
    (ulysses, ring), row = DEGREES[algorithm], CONTEXT[algorithm]
    mesh = make_mesh(Layout(ulysses=ulysses, ring=ring), GROUPS, Books())
    made = make_algorithm(row, ulysses, ring)
    return World(mesh, row, made, Megatron(1), TorchCpu(), torch.device("cpu"))


def errors(case: Case, want: Wanted) -> tuple[float, float]:
    """How far the loss is off, and the worst gradient by its own size."""
    net, world = make(case, NAME), world_of(case.algorithm)
    share = world.share([ROW], [world.algorithm.token_order(ROW)])
    index = torch.cat([torch.arange(a, b) for a, b in share.held])
    ids, labels, positions = (x[index] for x in tokens())
    looked_up = ids.roll(1) if case.fault == "embeddings of other tokens" else ids
    batch: Any = SimpleNamespace(
        input_ids=looked_up[None], position_ids=positions[None], world=world
    )
    of = ForwardPass(batch, Bound(world, share, index, recompute=case.again), None)
    with ExitStack() as stack:
        for patch in faulty(case.fault, net):
            stack.enter_context(patch)
        stack.enter_context(widened(modeling_gemma4))
        parts = CausalModel(net, None)
        hidden = parts.layers(of, net.get_input_embeddings()(ids[None])).hidden
        loss = loss_of(net, hidden, labels)
        loss.backward()
    total, worst = loss.detach().clone(), 0.0
    dist.all_reduce(total)
    for name, p in net.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(grad)
        wanted = torch.from_numpy(want[1][name])
        worst = max(worst, float((grad - wanted).abs().max() / wanted.abs().max()))
    return abs(float(total) - want[0]), worst


def compare(rank: int, wants: dict[str, Wanted]) -> list[tuple[float, float]]:
    return [errors(case, wants[case.model]) for case in (*CASES, *CONTROLS)]


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[Case, tuple[float, float]]]:
    wants = {model: alone(Case(model, "")) for model in MODELS}
    found = spawn(RANKS, compare, wants)[0]
    yield dict(zip((*CASES, *CONTROLS), found, strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_one_process_a_document(case: Case, answers: Any) -> None:
    loss, gradient = answers[case]
    assert loss < 1e-12
    assert gradient < 1e-10


@pytest.mark.parametrize("case", CONTROLS, ids=str)
def test_a_deliberate_error_shows(case: Case, answers: Any) -> None:
    loss, gradient = answers[case]
    assert (loss < 1e-12) == (case.fault in UNSEEN_IN_LOSS)
    assert gradient > 1e-2
