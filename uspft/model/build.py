"""The making of a causal language model from its config, on meta and with uspft's attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from uspft.model.attention import NAME
from uspft.model.linear import bind_linear_layers
from uspft.parameters.experts import CORRECTION, is_experts

CPU = torch.device("cpu")


def empty_model(config: Any, dtype: torch.dtype, device: torch.device = CPU) -> Any:
    """Return a config's model with parameters on meta, tied ones tied, and uspft's attention.

    device: where its buffers are, such as the frequencies of rotary positions. DeepSpeed leaves
    them where they are in stage 3, and each forward pass would copy them.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    _hold_corrections(model)
    bind_linear_layers(model)
    model.tie_weights()  # not above, where making a parameter empty makes a new object
    for buffer in model.buffers():
        # In float32 too: Gemma's embedding scale, made in dtype and used in it.
        wide = torch.float32 if buffer.is_floating_point() else buffer.dtype
        buffer.data = buffer.data.to(device, wide)
    return model


def _hold_corrections(model: nn.Module) -> None:
    """Make buffers of corrections that transformers has as parameters, and trains no more than
    those: a parameter would be rounded to the model's type, and partitioned."""
    for module in model.modules():
        if (held := module._parameters.pop(CORRECTION, None)) is not None:
            module.register_buffer(CORRECTION, torch.zeros(held.shape))


def parameter_count(
    model: nn.Module,
    *,
    embedding: bool = True,
    active_only: bool = False,
    trained_only: bool = False,
    sizes: Mapping[int, int] | None = None,
) -> int:
    """Count a model's parameters, tied ones once.

    embedding: False leaves out the embedding look-up where it is not tied. active_only: whether of
    the experts only those are counted that a token meets. trained_only: whether only parameters
    that train are counted. sizes: those of whole parameters by identity, where ranks hold parts.
    """
    counts = {
        id(p): sizes[id(p)] if sizes else getattr(p, "ds_numel", p.numel())
        for p in model.parameters()
        if p.requires_grad or not trained_only
    }
    for name, parameter in model.named_parameters() if active_only else ():
        if is_experts(name) and id(parameter) in counts:
            met: Any = model.config
            experts = getattr(met, "num_local_experts", None) or met.num_experts
            counts[id(parameter)] = counts[id(parameter)] * met.num_experts_per_tok // experts
    if not embedding:
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        if table.weight is not head.weight:
            counts.pop(id(table.weight), None)
    return sum(counts.values())
