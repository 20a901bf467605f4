"""The filling of a module on meta, one parameter after another, partitioned at once in ZeRO-3, with
values of files or drawn from the seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from uspft.families.table import FAMILIES
from uspft.parameters.experts import corrections, is_experts, is_router
from uspft.parameters.names import places, plain_name
from uspft.parameters.source import Weights, WeightsError
from uspft.tensor.parts import Part

if TYPE_CHECKING:
    from uspft.parameters.shards import Holders

BATCH_BYTES = 1 << 28
"""Bytes of parameters that are whole on a rank at one time while a ZeRO-3 model is filled.

A larger parameter is whole alone.
"""

Partition = Callable[[dict[str, nn.Parameter]], None]
"""A function that is called with filled parameters, by name, and takes their memory away (ZeRO-3).

Those of which this rank holds nothing are not among them.
"""


def fill(
    model: nn.Module,
    dtype: torch.dtype,
    source: Weights,
    holders: Holders,
    partition: Partition | None = None,
) -> None:
    """Give a module on meta the parts of its parameters that this rank holds, and the values of the
    untrained buffers that files contain; collective.

    Values are read on one of the ranks that hold a part; the others' parameters are left for the
    engine's broadcast. Buffers stay as they are where values are drawn. partition: None leaves
    parameters whole. Raises WeightsError.
    """
    pending: dict[str, nn.Parameter] = {}
    for name, (empty, owners) in places(model).items():
        part = holders.part(name)
        if holders.zero_of(name).index or not part.count:
            values = torch.empty(part.size, dtype=dtype)
        else:
            values = _read(name, part, source, holders).to(dtype).contiguous()
        parameter = nn.Parameter(values, empty.requires_grad)
        for module, attribute in owners:
            setattr(module, attribute, parameter)
        if part.count:
            pending[name] = parameter
        if partition and _bytes(pending.values()) >= BATCH_BYTES:
            partition(pending)
            pending = {}
    if partition and pending:
        partition(pending)
    for name, buffer in corrections(model).items():
        if not source.draws(name):
            buffer.copy_(source.read(name, Part.whole(buffer.shape)))


def _read(name: str, part: Part, source: Weights, holders: Holders) -> Tensor:
    """Read a part of a parameter, on this rank alone of those that hold the part."""
    if part.is_whole or not source.draws(name):
        return source.read(name, part)
    # Drawn whole or not at all: on one rank, which hands out the parts.
    tensor, own = holders.tensor, torch.empty(part.size)
    if tensor.index:
        dist.recv(own, src=tensor.ranks[0], group=tensor.handle)
        return own
    whole = source.read(name, Part.whole(part.shape))
    for rank in tensor.ranks[1:]:
        other = holders.shards.part(name, part.shape, rank).cut(whole).contiguous()
        dist.send(other, dst=rank, group=tensor.handle)
    return part.cut(whole)


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def generator(seed: int, name: str) -> torch.Generator:
    """Return a generator whose draws are a function of the seed and a parameter's name alone."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class RandomWeights:
    """Random weights as a function of the seed and each parameter's name alone.

    They are drawn as transformers initialises them: projections, embeddings, experts and their
    routers are normal(0, initializer_range), and so are attention's sinks and a router's bias. The
    padding token's embedding is 0, norms are 1 (0 where 1 is added to them), other biases are 0. Of
    a gated delta net the convolution is normal too, and `decays` says how its gates start.
    """

    def __init__(self, model: nn.Module, seed: int, std: float) -> None:
        # Of a projection and its adapter's wrapper, which share a name, the projection comes last.
        self._modules = {plain_name(name): module for name, module in model.named_modules()}
        self._seed, self._std = seed, std
        self._config: Any = getattr(model, "config", None)
        kind = getattr(self._config, "model_type", None)
        self._norm = FAMILIES[kind].norm_start if kind in FAMILIES else 1.0

    def draws(self, name: str) -> bool:
        return True

    def read(self, name: str, part: Part) -> Tensor:
        return part.cut(self.draw(name, part.shape))

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        owner, _, kind = name.rpartition(".")
        module = self._modules[owner]
        routes = is_router(module)
        if kind in ("A_log", "dt_bias"):
            return decays(kind, shape, generator(self._seed, name), self._config)
        if kind.endswith("bias") and not routes:
            return torch.zeros(shape)
        projects = isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d)
        if projects or routes or kind == "sinks" or is_experts(name):
            source = generator(self._seed, name)
            value = torch.empty(shape).normal_(0.0, self._std, generator=source)
            padding = getattr(module, "padding_idx", None)
            if padding is not None:
                value[padding] = 0.0
            return value
        of = type(module).__name__.lower()
        if kind.endswith("scale") and of.endswith("router"):
            return torch.ones(shape)
        if len(shape) == 1 and "norm" in of:
            return torch.full(shape, 1.0 if of.endswith("gated") else self._norm)
        what = f"no rule to initialise {name} of {type(module).__name__}"
        raise WeightsError(what, "name a folder with weights")


def decays(kind: str, shape: tuple[int, ...], source: torch.Generator, config: Any) -> Tensor:
    """Return a new `A_log` or `dt_bias` of a gated delta net, as transformers starts it.

    Both are drawn from ranges that OLMo Hybrid's config has; elsewhere A is uniform(0.01, 16) and
    the bias of the step is 1.
    """
    least, most = (
        getattr(config, "linear_a_log_min", 0.01),
        getattr(config, "linear_a_log_max", 16.0),
    )
    if kind == "A_log":
        return torch.empty(shape).uniform_(least, most, generator=source).log_()
    if not hasattr(config, "linear_dt_min"):
        return torch.ones(shape)
    first, last = math.log(config.linear_dt_min), math.log(config.linear_dt_max)
    step = torch.empty(shape).uniform_(first, last, generator=source).exp_()
    step.clamp_(min=config.linear_dt_init_floor)
    return step + torch.log(-torch.expm1(-step))  # softplus of it is the step


class SplitWeights:
    """Weights that take what trains from one source, and what is frozen from another."""

    def __init__(self, trained: Collection[str], source: Weights, rest: Weights) -> None:
        self._trained, self._source, self._rest = trained, source, rest

    def draws(self, name: str) -> bool:
        return self._of(name).draws(name)

    def read(self, name: str, part: Part) -> Tensor:
        return self._of(name).read(name, part)

    def _of(self, name: str) -> Weights:
        return self._source if name in self._trained else self._rest
