"""Plain transformers, and the pieces of Arctic Long Sequence Training in its model, counted alike.

ALST (arXiv 2506.13996) is driven as ArcticTraining does it, with the classes of the DeepSpeed that
is installed: attention by UlyssesSPAttentionHF, MLPs by TiledMLP in tiles of as many tokens as the
hidden size, the loss by TiledFusedLogitsLoss in tiles of 1 GiB of float32 logits, without Liger.
Its offloading keeps each layer's input on the host and takes it back when the layer runs again.
Layers are checkpointed without reentry, which needs no more memory than with it.

Attention's kernel allocates what it returns, out and lse, and in the backward dq, dk and dv.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from benchmarks.memory.livebytes import LiveBytes
from benchmarks.memory.measured import Counted, measure, one_of

NAME = "counted"
"""The attention, as transformers knows it."""
LOSS_TILE_BYTES = 1 << 30
"""What ArcticTraining's tiles of logits take in float32."""


def count_plain(config: Any, tokens: int) -> Counted:
    """Count transformers' own model and loss for one row on one rank, layers checkpointed.

    config: of transformers, with the compute type. tokens: of the row.
    """
    with one_of(1), torch.device("meta"):
        AttentionInterface.register(NAME, _attend)
        model = _model(config)
        batch = _batch(tokens)
        labels = batch.pop("labels")
        named = {**batch, "labels": labels, "shift_labels": labels}
        return measure(model, model.model.layers, lambda: model(**named).loss)


def count_alst(config: Any, tokens: int, ranks: int, *, offload: bool) -> Counted:
    """Count ALST's pieces for one row that so many ranks share.

    tokens: of the whole row. offload: whether inputs of layers wait on the host.
    """
    with one_of(ranks), torch.device("meta"):
        return count_alst_here(config, tokens // ranks, offload=offload)


def count_alst_here(config: Any, tokens: int, *, offload: bool) -> Counted:
    """Count the same on this rank of a world that is up; tokens: of the rank."""
    counting = LiveBytes()
    with tiled_mlps():
        model = alst_model(config, _attend)
        for layer in model.model.layers if offload else ():
            layer.forward = _Offloaded(layer.forward, counting)
        batch = _batch(tokens)
        return measure(model, model.model.layers, lambda: tiled_loss(model, batch), counting)


def tiled_mlps() -> Any:
    """Return a `with` block in which MLPs of LLaMA work tile by tile."""
    return patch.object(LlamaMLP, "forward", _tiled)


def alst_model(config: Any, attend: Any) -> Any:
    """Return a model of random weights, layers checkpointed, whose ranks exchange heads.

    attend: an attention function of transformers. torch.distributed must be up.
    """
    shared = dist.get_world_size() > 1
    AttentionInterface.register(NAME, _ulysses(config, attend) if shared else attend)
    return _model(config)


def _model(config: Any) -> Any:
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype, attn_implementation=NAME)
    model.train().activation_checkpointing_enable({"use_reentrant": False})
    return model


def _batch(tokens: int) -> dict[str, Any]:
    """Return one rank's part of a row, its labels shifted."""
    ids = torch.zeros((1, tokens), dtype=torch.int64)
    positions = torch.arange(tokens)[None]
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": torch.zeros_like(ids),
        "use_cache": False,
    }


def _ulysses(config: Any, attend: Any) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    from uspft.engine.quarantine import prepare_deepspeed

    prepare_deepspeed()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = (1, heads, config.head_dim, kv_heads, config.num_hidden_layers)
    return UlyssesSPAttentionHF(attend, *sizes, dist.group.WORLD, seq_length_is_variable=True)


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """Stand in for a flash-attention: q [1, H, T, D], k and v [1, G, T, D] → [1, T, H, D]."""
    out: Tensor = _Flash.apply(*(x.transpose(1, 2) for x in (q, k, v)))
    return out, None


class _Flash(torch.autograd.Function):
    """It computes nothing, keeps what a flash-attention keeps, and allocates what one returns."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty((q.shape[2], q.shape[1]), dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def _tiled(mlp: Any, x: Tensor) -> Tensor:
    """Stand in for the forward of transformers' MLP."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    shards = math.ceil(x.shape[1] / x.shape[2])
    weights = [mlp.down_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight]
    made: Tensor = TiledMLP.apply(_plain_mlp, mlp, x, shards, weights)
    return made


def _plain_mlp(mlp: Any, x: Tensor) -> Tensor:
    made: Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    return made


def tiled_loss(model: Any, batch: dict[str, Any], scale: float = 1.0) -> Tensor:
    """Return the summed loss of one rank's part of a row times a scale, from tiles of logits.

    batch: what the model takes, and `labels`, shifted. The head's gradient is made in the forward,
    and knows no other scale.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    rest = {name: value for name, value in batch.items() if name != "labels"}
    labels, hidden = batch["labels"], model.model(**rest).last_hidden_state
    shards = math.ceil(labels.numel() * model.config.vocab_size * 4 / LOSS_TILE_BYTES)
    weights = [model.lm_head.weight]
    loss: Tensor = TiledFusedLogitsLoss.apply(
        partial(_loss, scale=scale), model, hidden, labels, None, shards, weights, "sum"
    )
    return loss


def _loss(model: Any, hidden: Tensor, labels: Tensor, scale: float) -> Tensor:
    loss = cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")
    return loss * scale if scale != 1 else loss


class _Offloaded:
    """What stands in for a layer's forward, and keeps the layer's input on the host."""

    def __init__(self, plain: Any, counting: LiveBytes) -> None:
        self._plain, self._counting = plain, counting

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with self._on_host(hidden):
            return self._plain(hidden, *args, **kwargs)

    @contextmanager
    def _on_host(self, hidden: Tensor) -> Iterator[None]:
        storage = hidden.untyped_storage()._cdata

        def pack(x: Tensor) -> Any:
            if x.untyped_storage()._cdata != storage:
                return x
            with self._counting.on_host():
                return (x.detach().clone(),)

        def unpack(packed: Any) -> Tensor:
            return packed[0].clone() if isinstance(packed, tuple) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
