"""A model whose gradients are known, for ranks of which some hold nothing of a parameter.

Its loss is Σ ⟨p, G⟩ over what a rank holds of each parameter p, with a G for each: no layer runs,
and no runner of stages is needed. G is shared out among the ranks that hold the same part as ranks
do that divide the tokens, or the matrices, of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.stages import ZERO
from uspft.comm import Books
from uspft.config.recipe import Recipe
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.objective.causal import LOSS as LOSS_TERM
from uspft.objective.causal import ROUTERS
from uspft.parameters.fill import generator
from uspft.parameters.names import places
from uspft.parameters.shards import Holders, MatrixSplit, Shards
from uspft.tensor.megatron import Megatron

LAYERS, RATE, CLIP, DECAY = 4, 1e-2, 0.5, 0.1
OF_LAYER = {
    "norm": (6,),
    "up": (8, 6),
    "kv": (4, 6),
    "per_head": (2,),
    "down": (6, 8),
    "experts": (4, 5, 3),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "table.weight": (10, 6),
    **{f"layers.{n}.{kind}.weight": s for n in range(LAYERS) for kind, s in OF_LAYER.items()},
    "norm.weight": (6,),
    "head.weight": (10, 6),
}
OF_KIND = {
    "table": MatrixSplit(0, (10,)),
    "head": MatrixSplit(0, (10,)),
    "up": MatrixSplit(0, (8,)),
    "kv": MatrixSplit(0, (4,), (1,)),
    "down": MatrixSplit(1, (8,)),
}
EXPERTS = MatrixSplit(0, (4,), in_order=True)
LOSS, ROUTER = 3.0, 2.0
"""The loss of each target and the routers' of each row, whatever the parameters."""


def kind_of(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def is_frozen(name: str) -> bool:
    """What has one dimension in the first half: its ranks have fewer kinds of parameters that
    train than others, as stages do."""
    return name.startswith(("layers.0.", "layers.1.")) and len(SHAPES[name]) == 1


TRAINED = [name for name in SHAPES if not is_frozen(name)]


def shards(layout: Layout, *, splits_tokens: bool = False) -> Shards:
    """Two layers on each of two stages, the table with the first and the head with the last.

    Experts that ranks divide are divided by tensor ranks too, unless these split tokens.
    """
    both = {"experts": MatrixSplit(1, (5,))} if layout.experts > 1 and not splits_tokens else {}
    of_kind = OF_KIND | both
    split = {name: of_kind[kind] for name in SHAPES if (kind := kind_of(name)) in of_kind}
    inside = frozenset(name for name in SHAPES if kind_of(name) in ("per_head", "experts"))
    experts = {name: EXPERTS for name in SHAPES if kind_of(name) == "experts"}
    stages = {name: _stage(name, layout.pipeline) for name in SHAPES}
    return Shards(
        layout,
        split,
        experts=experts if layout.experts > 1 else {},
        stages=stages,
        inside=inside,
        splits_tokens=splits_tokens,
    )


def _stage(name: str, stages: int) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) * stages // LAYERS
    return 0 if name == "table.weight" else stages - 1


def values() -> dict[str, Tensor]:
    return {n: torch.empty(s).normal_(generator=generator(3, n)) for n, s in SHAPES.items()}


def gradient(name: str, step: int) -> Tensor:
    return torch.empty(SHAPES[name]).normal_(generator=generator(100 + step, name))


class Weight(nn.Module):
    """A parameter under the name that files have for it, and its part of the loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        empty = torch.empty(SHAPES[name], device="meta")
        self.weight = nn.Parameter(empty, not is_frozen(name))

    def forward(self, share: Tensor) -> Tensor:
        return (self.weight * share.to(self.weight)).sum().float()


class Known(nn.Module):
    """The model; its parameters are on meta until they are filled."""

    objective = SimpleNamespace(terms=(LOSS_TERM, ROUTERS), derived=lambda means: {})

    def __init__(self, holders: Holders) -> None:
        super().__init__()
        self.holders = holders
        for name in SHAPES:
            *path, last = name.removesuffix(".weight").split(".")
            owner: nn.Module = self
            for word in path:
                if not hasattr(owner, word):
                    owner.add_module(word, nn.Module())
                owner = owner.get_submodule(word)
            owner.add_module(last, Weight(name))

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())

    def forward(self, batch: Any, scales: tuple[float, float | None]) -> Tensor:
        scale, router_scale = scales
        found = torch.zeros(())
        for name in TRAINED:
            if self.holders.holds(name):
                module = self.get_submodule(name.removesuffix(".weight"))
                found = found + module(self._share(name, batch.step))
        found = found * (batch.share * batch.total * scale)
        loss = LOSS * batch.targets * scale + (found - found.detach())
        rows = sum(row >= 0 for row in batch.rows)
        return torch.stack([loss, torch.tensor(ROUTER * rows * (router_scale or 0.0))])

    def _share(self, name: str, step: int) -> Tensor:
        """What one rank makes of a gradient: all that do so together make it, and ranks that see
        the same tokens each make all of what stands between blocks."""
        held, shape = self.holders.shards, SHAPES[name]
        part = self.holders.part(name)
        ranks = len(held.parts(name, shape)[part])
        between = name not in held.splits and name not in held.inside
        alike = held.layout.tensor if between and not held.splits_tokens else 1
        return part.cut(gradient(name, step)) * alike / ranks


def recipe(zero: str, dtype: str = "float32", **block: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"config": "none", "dtype": dtype},
            "data": {"train": "none", "sequence_length": 4},
            "training": {"steps": 3, "global_batch_size": 2, "max_grad_norm": CLIP},
            "optimizer": {"learning_rate": RATE, "weight_decay": DECAY},
            "deepspeed": {"zero_optimization": {**ZERO[zero], **block}},
        }
    )


@dataclass
class Alive:
    """An engine on this rank, and what makes its batches."""

    engine: Any
    holders: Holders
    world: Any

    def step(self, number: int, **more: Any) -> Any:
        return self.engine.step(self.batches(number), RATE, False, **more)

    def batches(self, number: int) -> list[Any]:
        """Two micro-batches, of unequal shares of the gradient and of the targets."""
        return [self._batch(number, share, targets) for share, targets in ((0.25, 5), (0.75, 7))]

    def empty(self) -> Any:
        return self._batch(0, 0.0, 0)

    def _batch(self, step: int, share: float, targets: int) -> Any:
        layout = self.world.layout
        return SimpleNamespace(
            world=self.world,
            step=step,
            share=share,
            targets=targets,
            rows=(0,) if targets else (-1,),
            total=12 * layout.context * layout.data,
        )


def alive(
    setting: Recipe, held: Shards, groups: Groups, source: Any, *, moves: bool = False
) -> Alive:
    """An engine over this model; collective. moves: whether one whose weights move."""
    from uspft.engine.deepspeed_config import deepspeed_config
    from uspft.engine.quarantine import prepare_deepspeed
    from uspft.engine.zero import ZeroEngine, partitioner
    from uspft.parameters.fill import fill
    from uspft.switching.move.moving import MovingEngine

    prepare_deepspeed()
    mesh = make_mesh(held.layout, groups, Books())
    holders = Holders.of(held, mesh.rank, groups, SHAPES)
    module = Known(holders)
    dtype, device = getattr(torch, setting.model.dtype), torch.device("cpu")
    zero = deepspeed_config(setting, holders.zero.size, 2)
    partition = None if moves else partitioner(zero, holders)
    fill(module, places(module), dtype, source, holders, partition)
    engine: Any
    if moves:
        engine = MovingEngine(module, setting, holders, [held], device)
    else:
        engine = ZeroEngine(module, zero, setting.optimizer, holders, device)
    world = SimpleNamespace(layout=held.layout, mesh=mesh, tensor=_rows(held))
    return Alive(engine, holders, world)


def _rows(held: Shards) -> Megatron:
    return Megatron(held.layout.tensor, held.splits_tokens)


def one_process(
    start: Mapping[str, Tensor], steps: range, adam: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Norms before clipping; weights and moments after the steps, by kind and name; and Adam's own
    state."""
    named = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    trained = [named[name] for name in TRAINED]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    if adam:
        optimizer.load_state_dict(adam)
    norms = []
    for step in steps:
        for name in TRAINED:
            named[name].grad = gradient(name, step)
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
    found = {
        kind: {name: optimizer.state[named[name]][kind] for name in TRAINED}
        for kind in ("exp_avg", "exp_avg_sq")
    }
    found["weight"] = {name: value.detach().clone() for name, value in named.items()}
    return norms, found, optimizer.state_dict()
