"""CPU seconds of one layer, forward and backward, in one process: with a state, and with
attention."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from benchmarks.linear.inputs import inputs, rule
from uspft.comm import Group
from uspft.families import StateSizes
from uspft.segments import Segments
from uspft.sequence.rows.share import Share
from uspft.sequence.states import Mixed, mix_over_states

HIDDEN, HEADS = 256, StateSizes(2, 4, 64, 64)
TOKENS = (1_024, 4_096, 16_384)


def timed(runs: int) -> list[dict[str, Any]]:
    """Return the median seconds by tokens: of layers, and of the rule alone at once and in pieces.

    The last is what a run does on a CPU: transformers' rule takes time by the square of its tokens
    in the backward.
    """
    torch.set_num_threads(1)
    layers = _layers()
    found = []
    for tokens in TOKENS:
        x = torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(0))
        mixed = Mixed(*(one.float() for one in inputs(tokens, HEADS)))
        ways: dict[str, Callable[[], Tensor]] = {
            **{name: partial(_layer, layer, x) for name, layer in layers.items()},
            "rule in pieces": partial(_rule, mixed, tokens),
            "rule at once": partial(_at_once, mixed),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(runs):
            for name, way in ways.items():
                seconds[name].append(_seconds(way))
        found.append({"tokens": tokens} | {name: median(each) for name, each in seconds.items()})
    return found


def _layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=HEADS.keys,
        linear_num_value_heads=HEADS.values,
        linear_key_head_dim=HEADS.key_dim,
        linear_value_head_dim=HEADS.value_dim,
        layer_types=["linear_attention", "full_attention"],
        attn_implementation="sdpa",
    )
    model = Qwen3_5ForCausalLM(config).model
    return {"with a state": _One(model, 0), "with attention": _One(model, 1)}


class _One(nn.Module):
    """One layer of a model, with the angles of its positions."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        self.layer, self._angles = model.layers[number], (model.rotary_emb,)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        angles = self._angles[0](x, places)
        out: Tensor = self.layer(x, position_embeddings=angles, attention_mask=None)
        return out


def _layer(layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out


def _rule(x: Mixed, tokens: int) -> Tensor:
    share = Share([Segments.single(tokens)], [[((0, tokens),)]], (1, 0))
    leaves = Mixed(*(one.detach().requires_grad_() for one in x))
    return mix_over_states(leaves, share.chains, rule(), Group())


def _at_once(x: Mixed) -> Tensor:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    leaves = Mixed(*(one.detach().requires_grad_()[None] for one in x))
    out: Tensor = torch_chunk_gated_delta_rule(
        *leaves[:3], g=leaves.g, beta=leaves.beta, use_qk_l2norm_in_kernel=True
    )[0]
    return out


def _seconds(run: Callable[[], Tensor]) -> float:
    gc.collect()
    began = time.process_time()
    out = run()
    out.sum().backward()
    return time.process_time() - began
