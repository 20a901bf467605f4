"""DeepSpeed's UlyssesSPAttentionHF around transformers' sdpa (arXiv 2309.14509, 2506.13996).

Packed rows: on a GPU transformers' flash attention finds the documents where the gathered
position_ids start anew. sdpa ignores them and lets documents see one another, so on CPU a function
that cuts the row at those places stands in for flash attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.engines.engine import Attention, Cannot
from benchmarks.attention.layer import Layer


def deepspeed_ulysses(layer: Layer) -> Attention:
    """The heads go over all ranks; the engine repeats KV heads that are fewer than ranks."""
    import deepspeed.comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rank, world = dist.get_rank(), dist.get_world_size()
    if layer.tokens % world:
        raise Cannot(f"{layer.tokens} tokens do not split into {world} equal parts")
    deepspeed.comm.init_distributed("gloo", verbose=False)
    packed = len(layer.lengths) > 1
    sizes = (1, layer.query_heads, layer.dim, layer.kv_heads, 1)
    try:
        ulysses = UlyssesSPAttentionHF(
            by_document(sdpa_attention_forward) if packed else sdpa_attention_forward,
            *sizes,
            dist.group.WORLD,
            seq_length_is_variable=True,
        )
    except ValueError as error:
        raise Cannot(str(error)) from error
    module = _Module(layer.query_heads // layer.kv_heads)
    positions = torch.arange(layer.tokens).chunk(world)[rank]
    since_start = torch.cat([torch.arange(n) for n in layer.lengths])[positions][None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_head = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, _ = ulysses(
            module, *by_head, None, position_ids=since_start, scaling=layer.scale, dropout=0.0
        )
        context: Tensor = out.view(q.shape)
        return context

    note = "sdpa a document, in flash attention's place" if packed else ""
    return Attention(positions, attend, note=note)


class _Module(torch.nn.Module):
    """What sdpa asks of the layer that calls it; the engine corrects it where it repeats heads."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def by_document(attend: Any) -> Any:
    """A transformers attention function over the documents that position_ids tell of."""

    def attend_each(
        module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **given: Any
    ) -> tuple[Tensor, None]:
        starts = (given.pop("position_ids")[0] == 0).nonzero().flatten().tolist()
        lengths = [b - a for a, b in zip(starts, [*starts[1:], q.shape[2]], strict=True)]
        documents = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        parts = [attend(module, *document, mask, **given)[0] for document in documents]
        return torch.cat(parts, dim=1), None

    return attend_each
