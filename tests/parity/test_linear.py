"""Layers with a state over ranks that hold any pieces of packed rows: loss and every gradient are
those of plain transformers with each document by itself in one process, in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.support.attention import GROUPS
from tests.support.models import MROPE
from tests.support.ranks import spawn
from tests.support.rows import packed
from tests.support.wide import widened
from uspft.comm import Books
from uspft.config.algorithms import CONTEXT
from uspft.families import StateSizes
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import make_mesh
from uspft.model.attention import NAME, Bound
from uspft.model.linear import bind_linear_layers
from uspft.model.recompute import Recompute
from uspft.segments import Segments
from uspft.sequence import FORWARDS, Heads, make_algorithm, mixing, states
from uspft.sequence.planned import Planned
from uspft.sequence.rows import fragments
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import heads_traffic, state_cost
from uspft.tensor.megatron import Megatron
from uspft.world import World

RANKS, BYTES = 4, 8
LENGTHS = [5, 130, 2, 1, 80, 30]
"""Documents of one and of two tokens among them; a row ends in padding."""
ROW = Segments(packed(LENGTHS).bounds, 256)
MODELLING = (
    modeling_qwen3_5,
    modeling_qwen3_5_moe,
    modeling_qwen3_next,
    modeling_olmo_hybrid,
)
SLOW = (0.005, 0.05)
"""Of A: with transformers' own start a state is forgotten within a few tokens, and nothing that
enters a fragment shows."""


@dataclass(frozen=True)
class Model:
    """A tiny hybrid."""

    kind: str = "qwen3_5_text"
    heads: tuple[int, int] = (2, 4)
    """Key heads and value heads of its layers with a state."""
    dims: tuple[int, int] = (8, 8)
    again: Recompute | None = None
    """What of them is made again where its layers are checkpointed."""


class Case(NamedTuple):
    """One comparison; order: how tokens are dealt out."""

    order: str
    ulysses: int
    model: Model = Model()
    fault: str = ""


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "use_cache": False,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"rope_parameters": MROPE},
    "qwen3_5_moe_text": {
        "rope_parameters": MROPE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_next": {"mlp_only_layers": [0, 1, 2, 3]},
    "olmo_hybrid": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_allow_neg_eigval": True,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
}


def make(model: Model, attention: str) -> Any:
    """The model in float64 with slow gates; the same weights at every call."""
    torch.manual_seed(0)
    keys, values = model.heads
    sizes = SIZES | {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": model.dims[0],
        "linear_value_head_dim": model.dims[1],
    }
    sizes |= OWN[model.kind]
    if model.kind == "olmo_hybrid":
        sizes.pop("head_dim")
    config = transformers.AutoConfig.for_model(model.kind, **sizes)
    net = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float64,
        attn_implementation=attention,
        experts_implementation="eager",  # the others have no float64
    )
    net = net.to(torch.float64)  # OLMo's A_log is float32 whatever is asked for
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in net.named_parameters():
            drawn = torch.rand(p.shape, generator=generator, dtype=p.dtype)
            if name.endswith("A_log"):
                p.copy_((SLOW[0] + drawn * (SLOW[1] - SLOW[0])).log())
            elif "norm" in name or name.endswith("dt_bias"):
                p.add_(0.4 * (drawn - 0.5))
            elif "conv1d" in name:
                p.copy_(drawn - 0.5)
    if model.again:
        enable = getattr(net, "activation_checkpointing_enable", None)
        (enable or net.gradient_checkpointing_enable)({"use_reentrant": False})
    return net.train()


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels (−100: none) and positions of the row's tokens."""
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, 97, (ROW.length,), generator=generator) for _ in range(2))
    positions = torch.zeros(ROW.length, dtype=torch.long)
    for start, stop in ROW:
        positions[start:stop] = torch.arange(stop - start)
    labels[ROW.bounds[-1] :] = -100
    return ids, labels, positions


def loss_of(net: Any, index: Tensor, **more: Any) -> Tensor:
    ids, labels, positions = (x[index] for x in tokens())
    base = net.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **more)
    logits = net.lm_head(base.last_hidden_state)[0]
    found: Tensor = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return found / ROW.bounds[-1]


def alone(model: Model) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, each document by itself."""
    net, total = make(model, "eager"), 0.0
    with widened(*MODELLING):
        for start, stop in ROW:
            loss = loss_of(net, torch.arange(start, stop))
            loss.backward()
            total += float(loss.detach())
    return total, {name: p.grad.numpy() for name, p in net.named_parameters()}


def orders() -> dict[str, list[tuple[Span, ...]]]:
    """Ways to deal the row out to four ranks."""
    step = ROW.length // (2 * RANKS)
    found: dict[str, list[tuple[Span, ...]]] = {
        "zigzag": [
            ((i * step, (i + 1) * step), ((7 - i) * step, (8 - i) * step)) for i in range(RANKS)
        ],
        "contiguous": [((2 * i * step, 2 * (i + 1) * step),) for i in range(RANKS)],
    }
    cuts = sorted({0, ROW.length, *ROW.bounds, 2, 4, 7, 8, 9, 70, 100, 133, 150, 200})
    found["bounds"] = [
        tuple(span for i, span in enumerate(pairwise(cuts)) if i % RANKS == r) for r in range(RANKS)
    ]
    dice, cuts = random.Random(0), [0]
    while cuts[-1] < ROW.length:
        cuts.append(min(ROW.length, cuts[-1] + dice.choice([1, 1, 2, 3, 9, 20, 40])))
    pieces = [(span, dice.randrange(RANKS)) for span in pairwise(cuts)]
    found["random"] = [tuple(span for span, own in pieces if own == r) for r in range(RANKS)]
    found["padding alone"] = [((0, 100),), ((100, 200),), ((248, 256),), ((200, 248),)]
    found["dealt"] = Planned(RANKS).token_order(ROW)
    found["hybrid"] = Planned(2, 2).token_order(ROW)
    return found


BENCHES: dict[int, World] = {}


def world_of(ulysses: int) -> World:
    """Four ranks, alive; collective at the first call."""
    if ulysses not in BENCHES:
        layout = Layout(ulysses=ulysses, ring=RANKS // ulysses)
        row = CONTEXT["planned_cp"]
        algorithm = make_algorithm(row, ulysses, layout.ring)
        mesh = make_mesh(layout, GROUPS, Books())
        split = Megatron(1)
        BENCHES[ulysses] = World(mesh, row, algorithm, split, TorchCpu(), torch.device("cpu"))
    return BENCHES[ulysses]


def faulty(fault: str) -> list[Any]:
    """Patches that make one deliberate error."""
    chains, halo, pieces = fragments.chains_of, fragments.halo_of, fragments.fragments_of
    share = "uspft.sequence.rows.share."
    together = [(ROW.bounds[0], ROW.bounds[-1])]
    lay = mixing.laid_out

    def joined(make: Any) -> Any:
        """A patch of what enters fragments: `make` of the summaries, and of what comes of it."""
        real = states.carried
        changed = lambda *x, back=False: real(*x, back=True) if back else make(real, *x)  # noqa: E731
        return mock.patch.object(states, "carried", changed)

    return {
        "documents run on": [
            mock.patch(share + "chains_of", lambda held, _, n: chains(held, together, n)),
            mock.patch(share + "halo_of", lambda held, _, n, taps: halo(held, together, n, taps)),
        ],
        "no halo": [
            mock.patch(
                share + "halo_of",
                lambda held, docs, n, taps: halo(
                    held,
                    [
                        (f.start, f.stop)
                        for f in sorted(sum(pieces(held, docs), ()))
                        if f.document >= 0
                    ],
                    n,
                    taps,
                ),
            )
        ],
        "halo over a bound": [
            mock.patch(share + "halo_of", lambda held, _, n, taps: halo(held, together, n, taps))
        ],
        "halo by position": [
            mock.patch.object(fragments, "range", _before_by_position, create=True)
        ],
        "fragments in rank order": [
            mock.patch.object(fragments, "sorted", _by_holder, create=True)
        ],
        "halo detached": [
            mock.patch.object(mixing, "laid_out", lambda x, *rest: _detached_halo(lay, x, *rest))
        ],
        "no entering state": [joined(lambda real, *x: {f: 0 * s for f, s in real(*x).items()})],
        "transposed": [joined(lambda real, c, e: real(c, _changed(e, "mT")))],
        "nothing passes": [joined(lambda real, c, e: real(c, _changed(e, "zero")))],
        "states detached": [mock.patch.object(states, "carried", _no_gradient(states.carried))],
        "key heads dealt evenly": [
            mock.patch.object(mixing, "split_heads", _even_heads),
        ],
    }[fault]


def _before_by_position(*ends: int) -> range:
    """The tokens before a fragment that begins within three of its document's first, of another
    document too."""
    cut_off = len(ends) == 2 and 0 < ends[1] - ends[0] < 3
    return range(max(0, ends[1] - 3), ends[1]) if cut_off else range(*ends)


def _by_holder(items: Any) -> list[Any]:
    every = [*items]
    if every and isinstance(every[0], fragments.Fragment):
        return sorted(every, key=lambda f: (f.holder, f.start))
    return sorted(every)


def _changed(every: Any, how: str) -> Any:
    def passes(m: Any) -> Any:
        return None if m is None else (m.mT if how == "mT" else torch.zeros_like(m))

    return {f: s._replace(passes=passes(s.passes)) for f, s in every.items()}


def _no_gradient(real: Any) -> Any:
    return lambda *x, back=False: {} if back else real(*x)


def _detached_halo(lay: Any, x: Tensor, places: Any, *rest: Any) -> Tensor:
    laid = lay(x, places, *rest)
    mine = torch.from_numpy(places) < len(x)
    out = laid.detach().clone()
    out[mine] = laid[mine]
    return out


def _even_heads(value: int, key: int, members: int) -> Any:
    from uspft.sequence.rows.heads import split_heads

    found = split_heads(value, key, members)
    keys = tuple(
        (i * key // members, max(i * key // members + 1, (i + 1) * key // members))
        for i in range(members)
    )
    return type(found)(found.query, keys)


class Found(NamedTuple):
    """How far the loss is off, the worst gradient by its own size, and the bytes sent by kind."""

    loss: float
    gradient: float
    sent: dict[str, int]


def errors(case: Case, net: Any, want: tuple[float, dict[str, Tensor]]) -> Found:
    world = world_of(case.ulysses)
    order = orders()[case.order]
    with ExitStack() as stack:
        for patch in faulty(case.fault) if case.fault else []:
            stack.enter_context(patch)
        share = world.share([ROW], [order])
        held = [torch.arange(a, b) for a, b in share.held]
        index = torch.cat(held) if held else torch.arange(0)
        bound = Bound(world, share, index, recompute=case.model.again)
        stack.enter_context(widened(*MODELLING))
        loss = loss_of(net, index, uspft=bound)
        loss.backward()
    sent = world.books.close()
    total = loss.detach().clone()
    dist.all_reduce(total)
    worst = 0.0
    for name, p in net.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(grad)
        p.grad = None
        wanted = torch.from_numpy(want[1][name])
        size = float(wanted.abs().max())
        worst = max(worst, float((grad - wanted).abs().max()) / size)
    return Found(abs(float(total) - want[0]), worst, sent)


def compare(rank: int, cases: list[Case], wants: dict[Model, Any]) -> list[Found]:
    found, nets = [], {}
    for case in cases:
        if case.model not in nets:
            nets[case.model] = make(case.model, NAME)
            bind_linear_layers(nets[case.model])
        found.append(errors(case, nets[case.model], wants[case.model]))
    return found


PLAIN, ODD = Model(), Model(heads=(3, 6))
CASES = [
    *(
        Case(order, 1)
        for order in ("zigzag", "contiguous", "bounds", "random", "padding alone", "dealt")
    ),
    *(Case(order, 2) for order in ("zigzag", "hybrid", "random")),
    Case("contiguous", 4),
    Case("zigzag", 4, ODD),
    Case("hybrid", 2, ODD),
    Case("random", 1, Model(dims=(8, 12))),
    Case("random", 2, Model(dims=(8, 12))),
    Case("random", 2, Model(again="attention")),
    Case("contiguous", 1, Model(again="attention")),
    Case("random", 2, Model(again="nothing")),
    Case("contiguous", 1, Model(again="nothing")),
    Case("random", 2, Model(again="exchange")),
    *(Case("random", 2, Model(kind)) for kind in ("qwen3_next", "olmo_hybrid", "qwen3_5_moe_text")),
    Case("contiguous", 4, Model(heads=(1, 3))),
]
CONTROLS = [
    Case("random", 1, PLAIN, "documents run on"),
    Case("random", 1, PLAIN, "no halo"),
    Case("random", 1, PLAIN, "halo over a bound"),
    Case("bounds", 1, PLAIN, "halo by position"),
    Case("random", 1, PLAIN, "fragments in rank order"),
    Case("contiguous", 1, PLAIN, "halo detached"),
    Case("contiguous", 1, PLAIN, "no entering state"),
    Case("random", 1, PLAIN, "transposed"),
    Case("random", 1, PLAIN, "nothing passes"),
    Case("contiguous", 1, PLAIN, "states detached"),
    Case("zigzag", 4, ODD, "key heads dealt evenly"),
]
UNSEEN_IN_LOSS = {"halo detached", "states detached"}


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[Case, list[Found]]]:
    """By case what each rank found."""
    every = [*CASES, *CONTROLS]
    wants = {case.model: alone(case.model) for case in every}
    found = spawn(RANKS, compare, every, wants)
    yield dict(zip(every, map(list, zip(*found, strict=True)), strict=True))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pieces_of_documents_equal_one_process_a_document(case: Case, answers: Any) -> None:
    loss, gradient, _ = answers[case][0]
    assert loss < 1e-12
    assert gradient < 1e-10


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_books_have_what_the_formula_says(case: Case, answers: Any) -> None:
    """Of the busiest rank: three layers with a state, whose convolution is never remembered; and
    one of attention, which exchanges heads too."""
    made = FORWARDS[case.model.again or "nothing"]
    twice = 2 if case.model.again else 1
    sizes = StateSizes(*case.model.heads, *case.model.dims)
    order = orders()[case.order]
    cost = state_cost(ROW, order, case.ulysses, sizes, BYTES, made, twice)
    sent = [found.sent for found in answers[case]]
    assert max(one.get("state", 0) for one in sent) == 3 * cost.state.bytes
    assert cost.state.bytes > 0
    held = {sum(b - a for a, b in spans) for spans in order}
    if len(held) == 1:
        (tokens,) = held
        attention = heads_traffic(Heads(4, 2, 16), case.ulysses, tokens, BYTES, made)
        exchanged = 3 * cost.all_to_all.bytes + (case.ulysses > 1) * attention.bytes
        assert max(one.get("all_to_all", 0) for one in sent) == exchanged


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: case.fault)
def test_a_fault_shows(case: Case, answers: Any) -> None:
    loss, gradient, _ = answers[case][0]
    assert gradient > 1e-2
    assert (loss < 1e-12) == (case.fault in UNSEEN_IN_LOSS)
