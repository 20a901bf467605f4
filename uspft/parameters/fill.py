"""The filling of a module on meta, one parameter after another, partitioned at once in ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from uspft.parameters.names import plain_name
from uspft.parameters.part import Part, Shape

if TYPE_CHECKING:
    from uspft.parameters.shards import Holders
    from uspft.parameters.source import Weights

BATCH_BYTES = 1 << 28
"""Bytes of parameters that are whole on a rank at one time while a ZeRO-3 model is filled.

A larger parameter is whole alone.
"""

Partition = Callable[[dict[str, nn.Parameter]], None]
"""A function that is called with filled parameters, by name, and takes their memory away (ZeRO-3).

Those of which this rank holds nothing are not among them.
"""


def places(model: nn.Module) -> dict[str, tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Return every parameter by its first name in files, with all its (module, attribute) places.

    Tied parameters have several places.
    """
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = plain_name(f"{prefix}.{attribute}" if prefix else attribute)
            found.setdefault(id(parameter), (name, parameter, []))[2].append((module, attribute))
    return {name: (parameter, owners) for name, parameter, owners in found.values()}


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """Return the whole shape of every parameter of a model on meta, by its name in files."""
    return {name: tuple(parameter.shape) for name, (parameter, _) in places(model).items()}


def fill(
    model: nn.Module,
    dtype: torch.dtype,
    source: Weights,
    holders: Holders,
    partition: Partition | None = None,
) -> None:
    """Give a module on meta the parts of its parameters that this rank holds; collective.

    Values are read on one of the ranks that hold a part; the others' parameters are left for the
    engine's broadcast. partition: None leaves parameters whole. Raises WeightsError.
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
