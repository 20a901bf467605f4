"""How often each rank's own gradient is in the sum over those that hold the same part, by the kind
of parameter and of layout: a table, beside parameters/counting.py and the gradients of one process.

Ranks' gradients are taken as their backward passes make them, before anything is summed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import known
from tests.support.mesh import on_mesh
from tests.support.models import Documents, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, small_recipe
from uspft.comm import Books
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.parameters import counting
from uspft.parameters.fill import generator
from uspft.parameters.shards import Holders
from uspft.tensor.parts import Part

ROW, ROWS = 24, 4
RING = {"context_parallel_algo": "ring_cp"}
TWO: dict[str, Any] = {"model_parallel": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], Layout | None]] = {
    "data 4": ({}, None),
    "ring 4": ({"context_parallel": 4, **RING}, None),
    "tensor 2": (TWO, None),
    "tokens": ({**TWO, "use_seq_parallel": True, "context_parallel": 2, **RING}, None),
    "tensor 4": ({"model_parallel": 4}, None),
    "mesh 2x2": (on_mesh(2, 2), None),
    "2 of whole": ({}, Layout(mesh_columns=2, data=2)),
    "4 of 2": (TWO, Layout(mesh_columns=4)),
}
"""A `parallel_config`, and the layout of rows where they divide matrices over more ranks."""
ONCE = {layout: (1, 1) for layout in LAYOUTS}
INSIDE = ONCE | {
    "tensor 2": (1, 2),
    "tokens": (1, 2),
    "tensor 4": (1, 4),
    "mesh 2x2": (1, 4),
    "4 of 2": (1, 2),
}
SHARED = ONCE | {"tensor 4": (1, 2)}
TABLE: dict[str, dict[str, tuple[int, int]]] = {
    "table": ONCE,
    "column": ONCE,
    "row": ONCE,
    "fused": ONCE,
    "shared heads": SHARED,
    "norm of heads": INSIDE,
    "norm": ONCE
    | {
        "tensor 2": (2, 1),
        "tokens": (1, 2),
        "tensor 4": (4, 1),
        "mesh 2x2": (1, 2),
        "2 of whole": (2, 1),
        "4 of 2": (4, 1),
    },
    "A of a column": INSIDE | {"mesh 2x2": (1, 2)},
    "B of a column": ONCE | {"mesh 2x2": (1, 2)},
    "B of shared heads": SHARED | {"mesh 2x2": (1, 2)},
    "A of a row": ONCE | {"mesh 2x2": (1, 2)},
    "B of a row": INSIDE | {"mesh 2x2": (1, 2)},
}
"""By kind and layout: how often a gradient is in the sum over all that hold the same part, and how
many tensor ranks sum theirs in the backward pass."""
ADAPTER = {"adapter": {"type": "lora", "rank": 4, "alpha": 6.0}}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "qwen3": ({"kind": "qwen3", "heads": 8, "kv_heads": 2}, {}, tuple(LAYOUTS)),
    "phi3": (
        {"kind": "phi3", "heads": 8, "kv_heads": 2},
        {},
        ("tokens", "tensor 4", "mesh 2x2", "4 of 2"),
    ),
    "llama": (
        {"kind": "llama", "heads": 8, "kv_heads": 2},
        ADAPTER,
        ("data 4", "tensor 2", "tokens", "tensor 4", "mesh 2x2", "2 of whole"),
    ),
}
"""How it is made, what trains, and its layouts."""
CASES = [(model, layout) for model, (_, _, layouts) in MODELS.items() for layout in layouts]


def kind_of(name: str) -> str:
    words = {
        "table": "embed_tokens|lm_head",
        "norm of heads": "[qk]_norm",
        "norm": "norm",
        "fused": "qkv_proj|gate_up_proj",
        "shared heads": "[kv]_proj",
        "row": "o_proj|down_proj",
        "column": "q_proj|gate_proj|up_proj",
    }
    found = next(kind for kind, word in words.items() if re.search(word, name))
    if ".lora_A." in name:  # which takes the same features, whoever shares what comes out
        return f"A of a {found.replace('shared heads', 'column')}"
    return f"B of {'' if found == 'shared heads' else 'a '}{found}" if ".lora_B." in name else found


class Made(NamedTuple):
    """What a rank has made of a parameter's gradient, and what is said of it."""

    part: Part
    gradient: Tensor
    times: int
    summed: int
    counted: bool
    tensor: tuple[int, ...]
    """The tensor ranks of this one."""


def said(holders: Holders, name: str, gradient: Tensor, rows: Layout, *, tokens: bool) -> Made:
    held = holders.shards
    times = counting.times(held, name, rows.tensor, splits_tokens=tokens)
    divisor = counting.divisor(held, name, rows.tensor, splits_tokens=tokens)
    group, same = counting.summed_over(holders, name), len(held.replicas(name)[0])
    assert times == (divisor if group else divisor * same), "who does not sum has others beside it"
    summed = group.size if group else 1
    counted = counting.is_counted(holders, name)
    return Made(holders.part(name), gradient, times, summed, counted, holders.tensor.ranks)


def start_adapter(engine: Any) -> None:
    """Give an adapter's B values: where they are 0, as at its start, A has no gradient."""
    for name, parameter in engine.trained().items():
        if ".lora_B." in name:
            part = engine.part_of(name)
            drawn = torch.empty(part.shape).normal_(0.0, 0.05, generator=generator(3, name))
            parameter.data.copy_(part.cut(drawn))


def made(
    rank: int, folder: Path, data: Documents, cases: list[tuple[str, str]]
) -> dict[Any, dict[str, Made]]:
    """Every rank's own gradients of one step by case and name; in one process those of the step."""
    from tests.support.degrees import Case, world_of
    from uspft.data.rows.loader import StepLoader
    from uspft.engine.step import counted, scales_of

    found: dict[Any, dict[str, Made]] = {}
    for model, layout in cases:
        parallel, rows = LAYOUTS[layout] if dist.get_world_size() > 1 else ({}, None)
        blocks = {"model": MODELS[model][1], "parallel_config": parallel}
        blocks["deepspeed"] = {"zero_optimization": {"stage": 0}}
        training = {"steps": 1, "global_batch_size": ROWS}
        recipe = small_recipe(folder / model, data.path, ROW, training=training, **blocks)
        output = folder / f"{dist.get_world_size()} {model} {layout}"
        run = prepared(recipe, output, tensor_of_rows=rows.tensor if rows else 1)
        loader, world = run.loader, run.world
        if rows:
            world = world_of(rows, Case(model, 1, "zero0"), run.world)
            sizes = {"row_tokens": ROW, "rows_per_step": ROWS, "rows_per_batch": 1}
            loader = StepLoader(run.loader.stream, world, **sizes)
        run.engine.replicas.close()
        start_adapter(run.engine)
        batches = loader.batches(1)
        objective, everyone = run.engine.module.objective, run.engine.holders.everyone
        scales = scales_of(objective, counted(objective, batches, everyone, torch.device("cpu")))
        for batch in batches:
            run.engine.module(batch, scales).sum().backward()
        tokens = world.tensor.splits_tokens or world.layout.is_mesh
        found[model, layout] = {
            name: said(run.engine.holders, name, p.grad.clone(), world.layout, tokens=tokens)
            for name, p in run.engine.trained().items()
        }
        close(run)
    return found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("counting")
    for name, (kind, _, _) in MODELS.items():
        make_model(folder / name, **kind)
    return folder, make_documents(folder / "d.jsonl", [ROW, 17, ROW, 9], masked=[0.0, 0.9, 0.4])


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, Documents]) -> list[dict[Any, dict[str, Made]]]:
    return spawn(4, made, *setting, CASES)


@pytest.fixture(scope="module")
def alone(setting: tuple[Path, Documents]) -> dict[str, dict[str, Tensor]]:
    (found,) = spawn(1, made, *setting, [(model, "data 4") for model in MODELS])
    return {
        model: {n: one.gradient for n, one in every.items()} for (model, _), every in found.items()
    }


def sums_of(ranks: list[Made]) -> dict[Part, Tensor]:
    """What ranks have made of each part, added up."""
    found: dict[Part, Tensor] = {}
    for one in ranks:
        found[one.part] = found.get(one.part, torch.zeros(())) + one.gradient
    return found


def off(ranks: list[Made], whole: Tensor, times: int) -> float:
    """How far the sums over those that hold the same are from a gradient so many times."""
    every = sums_of(ranks).items()
    assert sum(part.count for part, _ in every) == whole.numel(), "parts together are all of it"
    return max(float((s / times - part.cut(whole)).norm() / whole.norm()) for part, s in every)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_table_is_what_is_said_and_what_gradients_are(
    case: tuple[str, str],
    answers: list[dict[Any, dict[str, Made]]],
    alone: dict[str, dict[str, Tensor]],
) -> None:
    model, layout = case
    wrong, kinds = {}, set()
    for name, whole in alone[model].items():
        ranks = [answer[case][name] for answer in answers]
        kind = kind_of(name)
        kinds.add(kind)
        want = TABLE[kind][layout]
        told = {(one.times, one.summed) for one in ranks}
        error = off(ranks, whole, want[0])
        others = [off(ranks, whole, times) for times in (1, 2, 4) if times != want[0]]
        if told != {want} or not error < 1e-5 or min(others) < 0.1:
            wrong[name] = kind, told, error
        for part in {one.part for one in ranks}:
            for group in {one.tensor for one in ranks}:
                here = [one for rank, one in enumerate(ranks) if rank in group and one.part == part]
                if here and sum(one.counted for one in here) != 1:
                    wrong[name] = kind, "counted", float(len(here))
    assert wrong == {}
    assert len(kinds) >= 4


EXPERTS, FIRST, LAST = "layers.0.experts.weight", "layers.0.up.weight", "layers.3.down.weight"
TOKENS = 5


def tokens_of(rank: int, width: int) -> Tensor:
    return torch.empty(TOKENS, width).normal_(generator=generator(rank, "tokens"))


def by_experts(x_td: Tensor, experts_edf: Tensor) -> Tensor:
    return torch.einsum("td,efd->tef", x_td, experts_edf).tanh().sum()


def toys(rank: int) -> dict[str, Made]:
    """Experts that pairs of ranks divide, to whom tokens come; and layers of two stages."""
    found, groups = {}, Groups()

    def holders_of(layout: Layout) -> Holders:
        return Holders.of(
            known.shards(layout), make_mesh(layout, groups, Books()).rank, groups, known.SHAPES
        )

    def value(holders: Holders, name: str) -> Tensor:
        return holders.part(name).cut(known.values()[name]).clone().requires_grad_()

    layout = Layout(data=4, experts=2)
    holders = holders_of(layout)
    own, pair = value(holders, EXPERTS), holders.experts
    every = [torch.empty(TOKENS, 3) for _ in range(pair.size)]
    dist.all_gather(every, tokens_of(rank, 3), group=pair.handle)
    by_experts(torch.cat(every), own).backward()
    assert own.grad is not None
    found[EXPERTS] = said(holders, EXPERTS, own.grad, layout, tokens=False)

    layout = Layout(data=2, pipeline=2)
    holders = holders_of(layout)
    first, last = value(holders, FIRST), value(holders, LAST)
    peer = (rank + 2) % 4
    if rank < 2:
        hidden = (tokens_of(rank, 6) @ first.T).tanh()
        dist.send(hidden.detach().contiguous(), peer)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, peer)
        hidden.backward(gradient)
    else:
        came = torch.empty(TOKENS, 8)
        dist.recv(came, peer)
        came.requires_grad_()
        (came @ last.T).tanh().sum().backward()
        assert came.grad is not None
        dist.send(came.grad, peer)
    for name, one in ((FIRST, first), (LAST, last)):
        made_here = torch.zeros_like(one) if one.grad is None else one.grad
        found[name] = said(holders, name, made_here, layout, tokens=False)
    groups.close()
    return found


def test_experts_and_stages_are_counted_once() -> None:
    """The sum over those who hold some is the gradient; the others hold, make and count nothing."""
    answers = spawn(4, toys)
    want = {name: known.values()[name].requires_grad_() for name in (EXPERTS, FIRST, LAST)}
    loss = sum(by_experts(tokens_of(rank, 3), want[EXPERTS]) for rank in range(4))
    for rank in range(2):
        loss = loss + ((tokens_of(rank, 6) @ want[FIRST].T).tanh() @ want[LAST].T).tanh().sum()
    torch.as_tensor(loss).backward()
    holding = {
        EXPERTS: [True] * 4,
        FIRST: [True, True, False, False],
        LAST: [False, False, True, True],
    }
    for name, whole in want.items():
        ranks = [answer[name] for answer in answers]
        assert whole.grad is not None
        assert off(ranks, whole.grad, 1) < 1e-6 and off(ranks, whole.grad, 2) > 0.1
        assert {(one.times, one.summed) for one in ranks} == {(1, 1)}
        assert [one.part.count > 0 for one in ranks] == holding[name]
        assert [one.counted for one in ranks] == holding[name]


def test_every_kind_of_the_table_is_met(alone: dict[str, dict[str, Tensor]]) -> None:
    assert {kind_of(name) for every in alone.values() for name in every} == TABLE.keys()
