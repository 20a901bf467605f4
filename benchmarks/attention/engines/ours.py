"""This project's algorithms, through the seam that training uses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.engines.engine import Attention, Cannot, Make
from benchmarks.attention.layer import Layer
from uspft.comm import Books
from uspft.config.algorithms import row_of
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.sequence import Heads, Rule, Share, Split, make_algorithm
from uspft.sequence.ulysses import attend_over_heads


def ours(name: str, ulysses: int | None = None, **options: Any) -> Make:
    """This makes an algorithm over all ranks; ulysses: its degree, None: all of them."""

    def make(layer: Layer) -> Attention:
        layout = _layout(ulysses, dist.get_world_size())
        algorithm = make_algorithm(
            row_of(name, layout.context),
            layout.ulysses,
            layout.ring,
            per_host=_per_host(layer, layout),
            **options,
        )
        heads = Heads(layer.query_heads, layer.kv_heads, layer.dim)
        for _, what, _ in algorithm.problems(layer.tokens, heads):
            raise Cannot(what)
        mesh = make_mesh(layout, Groups(), Books())
        order = algorithm.token_order(layer.documents)
        share = Share([layer.documents], [order], (layout.ulysses, mesh.context.index))
        passes = algorithm.passes(share, keeps=True)
        split = Split(mesh.ulysses, mesh.ring, TorchCpu())
        rule = Rule(layer.scale)
        held = [torch.arange(start, stop) for start, stop in order[mesh.context.index]]
        return Attention(
            torch.cat(held),
            lambda q, k, v: attend_over_heads(passes, (q, k, v), share, rule, split),
        )

    return make


def _per_host(layer: Layer, layout: Layout) -> int | None:
    """Ring ranks of a host, where several hosts have more than one each."""
    here = layout.ring // layer.hosts
    return here if layer.hosts > 1 and here > 1 else None


def _layout(ulysses: int | None, world: int) -> Layout:
    if ulysses is None:
        return Layout(ulysses=world)
    if ulysses > 1 and world < 2 * ulysses:
        raise Cannot(f"Ulysses {ulysses} × 2 needs {2 * ulysses} processes")
    return Layout(ulysses=ulysses, ring=world // ulysses)
