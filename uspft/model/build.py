"""Recipe → model: on meta first, then each parameter filled and, under ZeRO-3, split at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM

from uspft.model.attention import NAME
from uspft.model.experts import is_experts
from uspft.model.names import plain_name
from uspft.model.weights import Weights

BATCH_BYTES = 1 << 28
"""Parameters whole at one time on a rank while a ZeRO-3 model is filled (one, if larger)."""

Partition = Callable[[list[nn.Parameter]], None]


def build_model(
    config: Any,
    dtype: torch.dtype,
    weights: Callable[[nn.Module], Weights],
    *,
    fill: bool,
    partition: Partition | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> Any:
    """A causal language model whose attention is uspft's, in training mode.

    prepare: adds to the model on meta, and says what trains; weights are asked for afterwards.
    fill: read values on this rank; otherwise parameters are left for the engine's broadcast from
    rank 0. partition, where given, is called with parameters as soon as they are filled and takes
    their memory away (ZeRO-3). Raises WeightsError.
    """
    model = empty_model(config, dtype)
    if prepare:
        prepare(model)
    source = weights(model)
    pending: list[nn.Parameter] = []
    for name, (empty, owners) in places(model).items():
        shape = empty.shape
        values = source.read(name, shape).to(dtype) if fill else torch.empty(shape, dtype=dtype)
        parameter = nn.Parameter(values.contiguous(), empty.requires_grad)
        for module, attribute in owners:
            setattr(module, attribute, parameter)
        pending.append(parameter)
        if partition and _bytes(pending) >= BATCH_BYTES:
            partition(pending)
            pending = []
    if partition and pending:
        partition(pending)
    return model.train()


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The model with parameters on meta, tied ones tied, and attention that is uspft's."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    model.tie_weights()  # outside: making a parameter empty makes it another object
    for buffer in model.buffers():
        if buffer.is_floating_point():  # Gemma's embedding scale, made in dtype and used in it
            buffer.data = buffer.data.float()
    return model


def places(model: nn.Module) -> dict[str, tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Every parameter by its first name in files, and all its places: tied ones have several."""
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = plain_name(f"{prefix}.{attribute}" if prefix else attribute)
            found.setdefault(id(parameter), (name, parameter, []))[2].append((module, attribute))
    return {name: (parameter, owners) for name, parameter, owners in found.values()}


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def parameter_count(model: nn.Module, *, embedding: bool = True, trained_only: bool = False) -> int:
    """Number of parameters, tied ones once. embedding False: without the embedding look-up where it
    is not tied, and of the experts those that a token meets."""
    counts = {
        id(p): getattr(p, "ds_numel", p.numel())
        for p in model.parameters()
        if p.requires_grad or not trained_only
    }
    if not embedding:
        for name, parameter in model.named_parameters():
            if is_experts(name) and id(parameter) in counts:
                met: Any = model.config
                share = counts[id(parameter)] * met.num_experts_per_tok
                counts[id(parameter)] = share // met.num_local_experts
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        if table.weight is not head.weight:
            counts.pop(id(table.weight), None)
    return sum(counts.values())
