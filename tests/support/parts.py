"""A small net whose matrices are split over tensor ranks, and the same in one process, whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.stages import ZERO
from uspft.comm import Books, Group
from uspft.config.recipe import Recipe
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.objective.causal import LOSS
from uspft.parameters.shards import Holders, MatrixSplit, Shards
from uspft.tensor.megatron import Megatron

WIDE, INNER, HEADS, TOKENS, STEPS = 12, 20, 4, 7, 3
# Five matrices in the fused one: no sum of neighbours' parts then is as large as a whole matrix.
SHAPES = {
    "norm.weight": (WIDE,),
    "up.weight": (INNER, WIDE),
    "gates.weight": (5 * INNER, WIDE),
    "per_head.weight": (INNER // HEADS,),
    "down.weight": (WIDE, INNER),
}
SPLITS = {
    "up.weight": MatrixSplit(0, (INNER,)),
    "gates.weight": MatrixSplit(0, (INNER,) * 5),
    "down.weight": MatrixSplit(1, (INNER,)),
}
PIECES = frozenset({"per_head.weight"})
MATRICES = {name: torch.Size(SHAPES[name]).numel() for name in SPLITS}
"""Elements of what is split."""
IN_TURN = "zero2 in turn"
STAGES = {**ZERO, IN_TURN: {"stage": 2, "round_robin_gradients": True}}
FOUR, LAST = Layout(mesh_columns=2, data=2), {"step": STEPS, "rate": 1e-2}


def shards(layout: Layout) -> Shards:
    return Shards(layout, SPLITS, inside=PIECES)


class _Enter(torch.autograd.Function):
    """Into what is split: the gradients of the ranks' parts add up (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return summed(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    """Out of it: the ranks' parts add up (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def summed(x: Tensor, group: Group) -> Tensor:
    x = x.clone()
    if group.size > 1:
        dist.all_reduce(x, group=group.handle)
    return x


class Weight(nn.Module):
    """A parameter under the name that files have for it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))


class Net(nn.Module):
    """A column-split, a fused, a row-split, a replicated parameter, and one whose replicas compute
    a piece of its gradient each."""

    objective = SimpleNamespace(terms=(LOSS,))

    def __init__(self, tensor: Group) -> None:
        super().__init__()
        self._tensor = tensor
        for name, shape in SHAPES.items():
            self.add_module(name.removesuffix(".weight"), Weight(shape))

    def forward(self, batch: Any, scales: tuple[float]) -> Tensor:
        ours = {name: module.weight for name, module in self.named_children()}
        h = _Enter.apply(batch.x * ours["norm"], self._tensor)
        by_head = (h @ ours["up"].T).view(len(h), -1, len(ours["per_head"]))
        up = (by_head * ours["per_head"]).flatten(1)
        gate, value, *plain = (h @ ours["gates"].T).chunk(5, dim=1)
        out = _Leave.apply((up + sum(plain) + F.silu(gate) * value) @ ours["down"].T, self._tensor)
        return (out - batch.y).pow(2).sum()[None] * scales[0]

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())


def values() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}


def rows(step: int) -> list[tuple[Tensor, Tensor]]:
    """Four rows of a step: input and target [TOKENS, WIDE]."""
    draws = torch.Generator().manual_seed(step)
    pairs = torch.randn(4, 2, TOKENS, WIDE, generator=draws)
    return [(x, 5 * y) for x, y in pairs]


def recipe(zero: str) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"config": "none", "dtype": "float32"},
            "data": {"train": "none", "sequence_length": TOKENS},
            "training": {"steps": STEPS, "global_batch_size": 4, "max_grad_norm": 0.5},
            "optimizer": {"learning_rate": LAST["rate"]},
            "deepspeed": {"zero_optimization": STAGES[zero]},
        }
    )


@dataclass
class Alive:
    """An engine on this rank, and what makes its batches."""

    engine: Any
    holders: Holders
    world: Any

    def step(self, number: int) -> Any:
        replica, replicas = self.holders.zero.index, self.holders.zero.size
        mine = [pair for n, pair in enumerate(rows(number)) if n % replicas == replica]
        batches = [self.batch(x, y, TOKENS) for x, y in mine]
        return self.engine.step(batches, LAST["rate"], stop=False)

    def batch(self, x: Tensor, y: Tensor, targets: int) -> Any:
        return SimpleNamespace(world=self.world, x=x, y=y, targets=targets, rows=(0,))

    def empty(self) -> Any:
        return self.batch(torch.zeros(1, WIDE), torch.zeros(1, WIDE), 0)


def alive(zero: str, layout: Layout, groups: Groups, source: Any, runner: Any = None) -> Alive:
    from uspft.engine.deepspeed_config import deepspeed_config
    from uspft.engine.quarantine import prepare_deepspeed
    from uspft.engine.zero import ZeroEngine, partitioner
    from uspft.parameters.fill import fill
    from uspft.parameters.names import places

    prepare_deepspeed()
    mesh = make_mesh(layout, groups, Books())
    holders = Holders.of(shards(layout), mesh.rank, groups, SHAPES)
    module = Net(holders.tensor)
    asked, device = recipe(zero), torch.device("cpu")
    config = deepspeed_config(asked, holders.zero.size, 4 // holders.zero.size)
    partition = partitioner(config, holders)
    fill(module, places(module), torch.float32, source, holders, partition)
    engine: Any = ZeroEngine(module, config, asked.optimizer, holders, device)
    if runner:
        engine.run = partial(runner, engine)
    world = SimpleNamespace(layout=layout, mesh=mesh, tensor=Megatron(layout.tensor))
    return Alive(engine, holders, world)


def one_process(
    start: dict[str, Tensor], steps: range, adam: dict[str, Any] | None = None
) -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Losses and norms, the first step's gradients before clipping, and the ends of weights and of
    Adam's state."""
    net = Net(Group())
    for name, module in net.named_children():
        module.weight = nn.Parameter(start[f"{name}.weight"].clone())
    named = net.named()
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LAST["rate"], betas=(0.9, 0.95), eps=1e-8)
    if adam:
        optimizer.load_state_dict(adam)
    numbers, first = [], {}
    for number in steps:
        optimizer.zero_grad()
        pairs = rows(number)
        losses = [net(SimpleNamespace(x=x, y=y), (1 / (4 * TOKENS),))[0] for x, y in pairs]
        loss = torch.stack(losses).sum()
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(named.values(), 0.5)
        optimizer.step()
        numbers.append((float(loss.detach()), float(norm)))
    end = {name: p.detach().clone() for name, p in named.items()}
    return numbers, first, end, optimizer.state_dict()


def off(got: dict[str, Tensor], want: dict[str, Tensor], whole: dict[str, Tensor] | None = None):  # type: ignore[no-untyped-def]
    """Names whose values differ by more than rounding, of their size or of `whole`'s."""
    scale = whole or want
    return [
        name
        for name in want
        if name not in got or not (got[name] - want[name]).norm() <= 1e-5 * scale[name].norm()
    ]
