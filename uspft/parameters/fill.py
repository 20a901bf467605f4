"""Loading a module on the meta device, one parameter after another, from files or by random
initialisation; under ZeRO-3 each parameter is partitioned at once."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from uspft.families.table import FAMILIES
from uspft.parameters.experts import corrections, is_experts, is_router
from uspft.parameters.names import plain_name
from uspft.parameters.source import Weights, WeightsError
from uspft.tensor.parts import Part

if TYPE_CHECKING:
    from uspft.parameters.names import ParametersByName
    from uspft.parameters.shards import Holders

BATCH_BYTES = 1 << 28
"""Bytes of parameters that are whole on a rank at a time while a ZeRO-3 model is loaded.

A larger parameter is loaded by itself.
"""

Partition = Callable[[dict[str, nn.Parameter]], None]
"""A function that partitions loaded parameters, by name, and frees their memory (ZeRO-3).

Parameters without elements on this rank are not passed.
"""


def fill(
    model: nn.Module,
    parameters: ParametersByName,
    dtype: torch.dtype,
    source: Weights,
    holders: Holders,
    partition: Partition | None = None,
) -> None:
    """Load this rank's parts of a module's parameters from the meta device, and the untrained bias
    of its routers; collective.

    Values are read on one of the ranks with the same part; the engine broadcasts them to the
    others. Where they are drawn, routers have no bias. parameters: those of the module. partition:
    None leaves them whole. Raises WeightsError.
    """
    biases, pending = corrections(model), dict[str, nn.Parameter]()
    for name, (empty, owners) in parameters.items():
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
        sizes = (p.numel() * p.element_size() for p in pending.values())
        if partition and sum(sizes) >= BATCH_BYTES:
            partition(pending)
            pending = {}
    if partition and pending:
        partition(pending)
    for name, buffer in biases.items():
        if not source.draws(name):
            buffer.copy_(source.read(name, Part.whole(buffer.shape)))


def _read(name: str, part: Part, source: Weights, holders: Holders) -> Tensor:
    """Read a part of a parameter, on one of the ranks that store the part."""
    if part.is_whole or not source.draws(name):
        return source.read(name, part)
    # Random weights can only be drawn whole: one rank draws them, and sends the parts.
    tensor, own = holders.tensor, torch.empty(part.size)
    if tensor.index:
        dist.recv(own, src=tensor.ranks[0], group=tensor.handle)
        return own
    whole = source.read(name, Part.whole(part.shape))
    for rank in tensor.ranks[1:]:
        other = holders.shards.part(name, part.shape, rank).cut(whole).contiguous()
        dist.send(other, dst=rank, group=tensor.handle)
    return part.cut(whole)


def generator(seed: int, name: str) -> torch.Generator:
    """Return a generator that depends only on the seed and a parameter's name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class RandomWeights:
    """Random weights that depend only on the seed and each parameter's name.

    They are initialised as in transformers: projections, embeddings, experts and their routers are
    normal(0, initializer_range), and so are attention's sinks and a router's bias. The padding
    token's embedding is 0, norms are 1 (0 where 1 is added to them), other biases are 0. In a gated
    delta net the convolution is normal too, and `decays` initialises the gates.
    """

    def __init__(self, model: nn.Module, seed: int, std: float) -> None:
        # A projection and its adapter's wrapper share a name; the projection comes last and wins.
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
    """Return the initial `A_log` or `dt_bias` of a gated delta net, as in transformers.

    OLMo Hybrid's config has ranges for both; elsewhere A is uniform(0.01, 16) and the bias is 1.
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
    return step + torch.log(-torch.expm1(-step))  # its softplus is the step


class SplitWeights:
    """Weights that take trained parameters from one source, and frozen ones from another."""

    def __init__(self, trained: Collection[str], source: Weights, rest: Weights) -> None:
        self._trained, self._source, self._rest = trained, source, rest

    def draws(self, name: str) -> bool:
        return self._of(name).draws(name)

    def read(self, name: str, part: Part) -> Tensor:
        return self._of(name).read(name, part)

    def _of(self, name: str) -> Weights:
        return self._source if name in self._trained else self._rest
