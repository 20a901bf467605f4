"""Attention in groups of heads gives what all heads at once give, forward and every gradient, and
sends what its algorithm's cost says.

One spawn for each number of ranks; models in float64 run through the modules of a run, without an
engine. Each control is a fault that must show.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.attention import KINDS, busiest
from tests.support.linear import TARGETS
from tests.support.models import MROPE
from tests.support.pairwise import pairwise
from tests.support.ranks import spawn
from tests.support.wide import widened
from uspft.families import NO_KEYS, StateSizes
from uspft.layout import Layout
from uspft.sequence import Cost, Traffic
from uspft.sequence.rows.traffic import FORWARDS, ONCE, state_cost
from uspft.tensor.parts import divide_heads

ROW, TILE = 96, 7
PACKED = (0, 17, 40, 41, 95)
EXACT = 1e-12
STATES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
"""The fields of a config for the heads of layers with a state."""
SENT = (*KINDS, "state")
NOTHING: Mapping[str, Any] = {}


class Model(NamedTuple):
    """A tiny model: transformers' name, its heads, and what of its config is not LLaMA's."""

    name: str
    heads: int
    kv_heads: int
    more: Mapping[str, Any] = NOTHING
    trained: Mapping[str, Any] = NOTHING

    @property
    def shared(self) -> int:
        """How many query heads share a KV head."""
        return self.heads // self.kv_heads


class Case(NamedTuple):
    """A model under a layout, with what memory says."""

    model: str
    layout: str
    at_once: int
    packed: bool = False
    memory: Mapping[str, Any] = NOTHING
    row: int = ROW
    """Its tokens."""
    later: int = 0
    """The tokens of another row whose forward comes before this one's backward, as in a pipeline;
    0: none."""


_WINDOW = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}
_HALF = {**MROPE, "partial_rotary_factor": 0.5}
_STATES = {
    **{"layer_types": ["linear_attention", "full_attention"], "rope_parameters": _HALF},
    **{"linear_num_key_heads": 6, "linear_num_value_heads": 12},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 4},
}
_LORA = {"adapter": {"rank": 3, "alpha": 6.0, "dropout": 0.3}}
_OF_STATES = {"adapter": {**_LORA["adapter"], "target_modules": TARGETS["uneven"]}}
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
    "phi3 8/2": Model("Phi3", 8, 2, {"sliding_window": 11}),
    "phi3 lora 8/4": Model(
        "Phi3", 8, 4, {}, {"adapter": {**_LORA["adapter"], "target_modules": ["qkv_proj"]}}
    ),
    "olmo2 8/2": Model("Olmo2", 8, 2),
    "olmo2 lora 8/4": Model("Olmo2", 8, 4, {}, _LORA),
    "olmoe 8/4": Model(
        "Olmoe", 8, 4, {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.4}
    ),
    "qwen3.5 8/2": Model("Qwen3_5Text", 8, 2, _STATES),
    "qwen3.5 lora 4/2": Model("Qwen3_5Text", 4, 2, _STATES, _OF_STATES),
    "qwen3 next 4/2": Model(
        "Qwen3Next",
        4,
        2,
        {
            **_STATES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "olmo hybrid 8/2": Model(
        "OlmoHybrid",
        8,
        2,
        {**_STATES, "rope_parameters": None, "linear_allow_neg_eigval": True},
    ),
    "granite moe 8/2": Model(
        "GraniteMoe", 8, 2, {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
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
SAVING: dict[str, Mapping[str, Any]] = {
    "again": NOTHING,
    "kept away": KEPT,
    "one layer again": {"gradient_checkpointing": 1},
    "no layer again": {"gradient_checkpointing": False},
    "no tiles": {"mlp_tile_tokens": "none"},
}
FEW = [
    Case("llama 16/4", "ulysses 2", 1, True),
    Case("llama 16/4", "planned 2", 2, memory=KEPT),
    Case("llama biases 8/2", "ring 2", 1, memory=SAVING["one layer again"]),
    Case("phi3 lora 8/4", "ulysses 2", 2, True),
    Case("gpt-oss 8/2", "ulysses 2", 1, True),
    Case("olmo2 lora 8/4", "tensor 2, tokens split", 1, True, KEPT),
    Case("gemma2 8/4", "ulysses 2", 1),
    Case("llama biases 8/2", "tensor 2", 1, memory=SAVING["one layer again"]),
    Case("qwen3.5 8/2", "ring 2", 1, True),
    Case("qwen3 next 4/2", "ulysses 2", 2, True, KEPT),
    Case("olmo hybrid 8/2", "tensor 2, tokens split", 1, memory=SAVING["one layer again"]),
    Case("granite 4/2", "tensor 2, tokens split", 1, memory=SAVING["one layer again"], later=31),
    Case("llama lora 8/4", "tensor 2, tokens split", 1, True, KEPT, 97),
    Case("qwen3.5 8/2", "tensor 2, tokens split", 1),
    Case("qwen3 next 4/2", "tensor 2", 2, memory=SAVING["no layer again"]),
]


def pairs(ranks: int) -> list[Case]:
    """Cases of so many ranks in which every two of all models, layouts and options meet."""
    layouts = [name for name, (layout, _) in LAYOUTS.items() if layout.ranks == ranks]

    def legal(traits: tuple[Any, ...]) -> bool:
        model, layout, *_ = traits
        name, heads, kv_heads, *_ = MODELS[model]
        tensor = LAYOUTS[layout][0].mesh_columns
        if name == "Phi3" and tensor > kv_heads:  # where ranks share the rows of a KV head
            return False
        return bool(divide_heads(heads, kv_heads, tensor))

    few = (True, False), (False, True)  # one query head at once or all of a KV head; packed
    found = pairwise(tuple(MODELS), layouts, *few, tuple(SAVING), legal=legal)
    return [
        Case(model, layout, 1 if one else MODELS[model].shared, packed, SAVING[saving])
        for model, layout, one, packed, saving in found
    ]


class Ran(NamedTuple):
    """The loss of a row, what this rank makes of it, and every gradient; what this rank sent, and
    the bytes of it to tensor ranks; what the algorithm says that each layer costs."""

    found: dict[str, Tensor]
    sent: dict[str, Traffic]
    to_tensor_ranks: int
    costs: list[Cost]


def gradients(case: Case, at_once: int | None) -> Ran:
    """A row's forward and backward. at_once: None for all heads."""
    from benchmarks.memory.count import module_of, world_of
    from uspft.config.recipe import MemoryBlock
    from uspft.kernels.plain import TorchCapped
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
    made = layout, algorithm, torch.device("cpu"), kernel, parallel
    world, other = (world_of(*made, groups=groups) for _ in range(2))
    module = module_of(config, memory, world, groups, trained)
    materialise(module)
    for number, (name, parameter) in enumerate(module.named_parameters()):
        draw = torch.Generator().manual_seed(number)
        with torch.no_grad():
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
            # A state that is soon forgotten would not show what enters a fragment.
            parameter.data = 0.2 * noise - 3.0 * name.endswith("A_log")
    row = Segments(PACKED, case.row) if case.packed else Segments.single(case.row)
    batch = batch_of(world, row)
    modelling = {sys.modules[type(one).__module__] for one in module.modules()}
    with widened(*(one for one in modelling if ".models." in one.__name__)):
        scales = (1.0 / case.row,) * len(module.objective.terms)
        loss = module(batch, scales).sum()
        if case.later:
            module(batch_of(other, Segments.single(case.later)), scales)
        loss.backward()
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    sent = {k: Traffic(world.books.bytes[k], world.books.messages[k]) for k in SENT}
    again, costs = memory.gradient_checkpointing, []
    states = more.get("linear_num_key_heads") and StateSizes(*(more[f"linear_{n}"] for n in STATES))
    for layer, window in enumerate(layer_windows(config)):
        runs = FORWARDS[memory.recompute] if again is True or again > layer else ONCE
        of_rank, runs = heads_of(config).on(layout.mesh_columns), runs._replace(at_once=at_once)
        if states and window == NO_KEYS:
            order = world.algorithm.token_order(row)
            of_rank = states.on(layout.mesh_columns)
            costs.append(state_cost(row, order, layout.ulysses, of_rank, 8, runs))
        else:
            costs.append(world.algorithm.cost(row, of_rank, 8, window, runs))
    to_tensor_ranks = world.books.bytes["tensor"]
    return Ran({"loss": loss.detach(), **found}, sent, to_tensor_ranks, costs)


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
    ids, labels = (torch.randint(0, 64, (row.length,), generator=draw) for _ in range(2))
    places = torch.zeros(row.length, dtype=torch.int64)
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
    from uspft.model.attention_groups import AttentionCall

    plain: Callable[..., Any] = AttentionCall.backward

    def fault(call: Any, qkv: Any, saved: Any, turn: Any) -> Any:
        dq, dk, *others = plain(call, qkv, saved, turn)
        return dq, dk * (turn is not call.turns[1]), *others

    with patch.object(AttentionCall, "backward", fault):
        yield


@contextmanager
def twice() -> Iterator[None]:
    """As if weight gradients of one tile were added twice."""
    import uspft.model.group_call as module

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
    from uspft.model.attention_groups import AttentionCall

    plain, before = AttentionCall.forward, list[Any]()

    def fault(call: Any, q: Any, k: Any, v: Any, turn: Any) -> Any:
        before.append((k, v))
        return plain(call, q, *before[0], turn)

    with patch.object(AttentionCall, "forward", fault):
        yield


@contextmanager
def own_tokens() -> Iterator[None]:
    """As if the gradient of what attention gives came from this rank's tokens alone."""
    from uspft.model.attention import Bound

    plain: Callable[..., Any] = Bound.enter

    def fault(bound: Any, x: Any) -> Any:
        found = plain(bound, x)
        return found if torch.is_grad_enabled() else x.repeat(1, bound.ranks, 1)

    with patch.object(Bound, "enter", fault):
        yield


@contextmanager
def gates_lost() -> Iterator[None]:
    """As if what gates say of the gradient of the input were lost."""
    from uspft.model.group_call import BlockCall

    plain: Callable[..., Any] = BlockCall.last_projection

    def fault(ways: Any, *, wanted: bool) -> None:
        plain(ways, wanted=wanted)
        ways.gates.zero_()

    with patch.object(BlockCall, "last_projection", fault):
        yield


@contextmanager
def lost_state() -> Iterator[None]:
    """As if the gradients of one group of value heads were lost."""
    import uspft.model.state_groups as module

    plain, seen = module.mixed_backward, [0]

    def fault(*args: Any) -> Any:
        seen[0] += 1
        return tuple(one * (seen[0] != 2) for one in plain(*args))

    with patch.object(module, "mixed_backward", fault):
        yield


@contextmanager
def wrong_heads() -> Iterator[None]:
    """As if a group worked with what the first one's projections make."""
    from uspft.model.state_groups import StateCall

    plain: Callable[..., Any] = StateCall.made

    def fault(call: Any, x: Any, keys: Any) -> Any:
        return plain(call, x, call.key_groups[0])

    with patch.object(StateCall, "made", fault):
        yield


@contextmanager
def forgotten() -> Iterator[None]:
    """As if the backward had other states than those that entered fragments."""
    import uspft.model.state_groups as module

    plain: Callable[..., Any] = module.mixed_backward

    def fault(x: Any, kept: Any, *others: Any) -> Any:
        return plain(x, [one * 0 for one in kept], *others)

    with patch.object(module, "mixed_backward", fault):
        yield


class Log:
    """How many exchanges are under way, to the members of a group and home, while a turn is
    attended with in the forward, while it is projected in the backward, and while the gradient of
    its output is."""

    def __init__(self, *, at_once: bool = False) -> None:
        """at_once: as if each were awaited when it has begun."""
        self._at_once, self._going = at_once, {"there": 0, "home": 0}
        self.found: dict[str, list[tuple[int, int]]] = {"attends": [], "made": [], "slopes": []}
        self._back = False

    @contextmanager
    def of_all(self) -> Iterator[None]:
        import uspft.model.attention_groups as groups
        import uspft.sequence.ulysses as turns

        take = groups.AttentionCall.take

        def backward(*args: Any) -> None:
            self._back = True
            take(*args)
            self._back = False

        with ExitStack() as stack:
            for name, way in (("start_exchange", "there"), ("start_exchange_back", "home")):
                stack.enter_context(patch.object(turns, name, self._counts(turns, name, way)))
            stack.enter_context(patch.object(groups.AttentionCall, "take", backward))
            for owner, name, what in (
                (groups.AttentionCall, "forward", "attends"),
                (groups.AttentionCall, "made", "made"),
                (groups.AttentionCall, "out_slope", "slopes"),
            ):
                stack.enter_context(patch.object(owner, name, self._notes(owner, name, what)))
            yield

    def _counts(self, module: Any, name: str, way: str) -> Callable[..., Any]:
        start = getattr(module, name)

        def begin(*args: Any) -> Callable[[], Any]:
            self._going[way] += not self._at_once
            wait = start(*args)
            found = [wait()] if self._at_once else []

            def arrive() -> Any:
                self._going[way] -= not self._at_once
                return found.pop() if found else wait()

            return arrive

        return begin

    def _notes(self, owner: Any, name: str, what: str) -> Callable[..., Any]:
        plain = getattr(owner, name)

        def note(*args: Any) -> Any:
            if what != "made" or self._back:
                self.found[what].append((self._going["there"], self._going["home"]))
            return plain(*args)

        return note


def gathered_again(case: Case) -> int:
    """The bytes of tokens that come from other tensor ranks once more than with all heads: those of
    attention in the backward, and those of an MLP in tiles where no second run has them."""
    model, again = MODELS[case.model], case.memory.get("gradient_checkpointing", True)
    if "tokens" not in case.layout or model.name in ("Gemma2", "Gemma3Text"):
        return 0
    states, routed = "linear_num_key_heads" in model.more, "num_experts_per_tok" in model.more
    once = 0 if again is True else 2 - again
    tiled = case.memory.get("mlp_tile_tokens") != "none" and not routed
    return ((0 if states else 2) + once * tiled) * -(-case.row // 2) * model.heads * 8 * 8


def orders(case: Case) -> list[dict[str, list[tuple[int, int]]]]:
    """What is under way when, and with everything awaited at once."""
    logs = Log(), Log(at_once=True)
    for log in logs:
        with log.of_all():
            gradients(case, case.at_once)
    return [log.found for log in logs]


CONTROLS: dict[str, dict[str, Callable[[], AbstractContextManager[None]]]] = {
    "llama": {"lost": lost, "twice": twice, "wrong keys": wrong_keys},
    "granite": {"own tokens": own_tokens},
    "qwen3.5": {
        "gates lost": gates_lost,
        "lost state": lost_state,
        "wrong heads": wrong_heads,
        "forgotten": forgotten,
    },
}
"""Faults that the first case of a model shows."""


def work(
    rank: int, cases: list[Case], few: bool
) -> tuple[list[float], dict[str, float], list[Ran], list[Any]]:
    """How far each case is from all heads at once, and a model's first with each fault; what was
    sent; of few cases also what is under way in the first."""
    found, ran, truths = [], [], dict[str, tuple[Case, Any]]()
    for case in cases:
        want, got = gradients(case, None), gradients(case, case.at_once)
        found.append(differs(got.found, want.found))
        # OLMo's norms ask for sums once more, and adapters' first layer for its input's gradient.
        if not any(name in case.model for name in ("olmo", "lora")):
            assert got.to_tensor_ranks == want.to_tensor_ranks + gathered_again(case), case
        ran.append(got._replace(found={}))
        truths.setdefault(case.model.split()[0], (case, want.found))
    faults = {}
    for name, controls in [*CONTROLS.items()][: len(CONTROLS) if few else 1]:
        case, truth = truths[name]
        for fault, control in controls.items():
            with control():
                faults[fault] = differs(gradients(case, case.at_once).found, truth)
    return found, faults, ran, orders(cases[0]) if few else []


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "few"),
    [(2, True), *(pytest.param(ranks, False, marks=pytest.mark.full) for ranks in (1, 2, 4))],
)
def test_groups_of_heads_give_what_all_heads_give(ranks: int, few: bool) -> None:
    cases = FEW if few else pairs(ranks)
    answers = spawn(ranks, work, cases, few)
    for number, case in enumerate(cases):
        assert max(found[number] for found, *_ in answers) < EXACT, case
        every = [ran[number] for *_, ran, _ in answers]
        assert busiest([one.sent for one in every]) == summed(every[0].costs), case
    for name in answers[0][1]:
        assert max(faults[name] for _, faults, *_ in answers) > 1e-3, name
    for *_, logs in answers if few else []:
        for number, log in enumerate(logs):
            assert (log == under_way(groups=2, turns=4, layers=2)) == (number == 0), log


def under_way(groups: int, turns: int, layers: int) -> dict[str, list[tuple[int, int]]]:
    """What a log finds where heads are exchanged, of layers that are run again: the next turn's are
    on their way while one is attended with, and what this gives while the next is; backwards, a
    turn's while the gradient of its output is made, and what it finds while the next one is."""
    every = [turn for _ in range(groups) for turn in range(turns)]
    comes = [3 if turn == 0 else 1 for turn in every]  # its queries; of the first, keys and values
    goes = [3 if turn == turns - 1 else 1 for turn in every]
    attends = [(there, min(n, 1)) for n, there in enumerate([*comes[1:], 0])]
    made = [(0, home) for home in [0, *goes[:-1]]]
    return {
        "attends": attends * (2 * layers),
        "made": made * layers,
        "slopes": [(there, 0) for there in comes] * layers,
    }


def summed(costs: list[Cost]) -> Cost:
    """What layers cost together."""
    found = {}
    for kind in SENT:
        every = [getattr(one, kind) for one in costs]
        found[kind] = Traffic(sum(t.bytes for t in every), sum(t.messages for t in every))
    return Cost(**found)
