"""A world is a layout at run time: its process groups, its algorithm and its kernel.

Several may exist at once; a batch has the one that splits its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from uspft.comm import Books, said_by_all
from uspft.config.algorithms import AlgorithmRow, row_of
from uspft.config.strategies import layouts_of
from uspft.kernels import Kernel, Qkv, believed_kernel
from uspft.layout import Layout, settled_layout
from uspft.mesh import Groups, Mesh, make_mesh
from uspft.pipeline.schedules import PLAIN, Schedule
from uspft.pipeline.stages import Stages, schedule_of, stages_of
from uspft.segments import Segments
from uspft.sequence import (
    Algorithm,
    Heads,
    Inside,
    Rule,
    Share,
    Split,
    algorithm_options,
    cut_of,
    make_algorithm,
)
from uspft.sequence.chunk_states import convolve_chunk, mix_over_chunks
from uspft.sequence.chunked import Chunked, ChunkShare
from uspft.sequence.mixing import Convolution, convolve, mix
from uspft.sequence.rows.heads import head_shapes
from uspft.sequence.rows.share import Order
from uspft.sequence.states import Mixed, StateRule
from uspft.sequence.ulysses import attend_over_heads
from uspft.tensor import TensorAlgorithm, tensor_algorithm

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.job import ChunkPrices
    from uspft.sequence.kept_keys import LayerKeys, LayerStates


@dataclass(frozen=True, eq=False)
class World:
    """What a layout needs at run time."""

    mesh: Mesh
    row: AlgorithmRow
    """The algorithm's row in the table of algorithms."""
    algorithm: Algorithm
    tensor: TensorAlgorithm
    """The algorithm that splits matrices over tensor ranks."""
    kernel: Kernel
    device: torch.device
    stages: Stages | None = None
    """The layers of each pipeline stage; None: there is one stage."""
    schedule: Schedule = PLAIN
    """How the ranks of its pipeline work."""

    @property
    def books(self) -> Books:
        """The counters of what this layout's transfers send."""
        return self.mesh.context.books

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def replica(self) -> int:
        """The index of this rank's data-parallel replica."""
        return self.layout.coordinates(self.mesh.rank)["data"]

    @property
    def name(self) -> str:
        """The layout's short name, as in metrics.jsonl."""
        return self.layout.name(self.row.name)

    def layers_here(self, every: int) -> list[int]:
        """Return which of all layers of a model this rank computes."""
        stages = self.stages or Stages.of_sizes([every], 1)
        mine = range(self.mesh.pipeline.index, stages.count, stages.ranks)
        return [*chain.from_iterable(map(stages.layers, mine))]

    def share(self, rows: Sequence[Segments], orders: Sequence[Order] | None = None) -> Share:
        """Return this rank's share of a micro-batch.

        Rows are concatenated: position p of row i counts as p + the length of the rows before it.
        Every rank derives everybody's part from the same document bounds, without communication.
        orders: the rows' token orders, if they are known.
        """
        if orders is None:
            orders = [self.algorithm.token_order(row) for row in rows]
        place = self.layout.ulysses, self.mesh.context.index
        found = Share(rows, orders, place)
        if isinstance(self.algorithm, Chunked):
            found.chunks = self.algorithm.shares(rows, orders, place)
        return found

    def attend(
        self,
        qkv: Qkv,
        share: Share,
        rule: Rule,
        inside: Inside | None = None,
        earlier: LayerKeys | None = None,
    ) -> Tensor:
        """Return attention's output [T, H, D] for this rank's tokens, differentiable.

        qkv: q [T, H, D], k and v [T, G, D] of the same tokens. inside, earlier: as in Split.
        """
        split = Split(self.mesh.ulysses, self.mesh.ring, self.kernel, inside, earlier)
        share = share.with_window(rule.window)
        passes = self.algorithm.passes(share, keeps=True)
        return attend_over_heads(passes, qkv, share, rule, split)

    def mix(
        self,
        x: Mixed,
        share: Share,
        rule: StateRule,
        inside: Inside | None = None,
        earlier: LayerStates | None = None,
    ) -> Tensor:
        """Return a recurrent layer's output [T, H, V] for this rank's tokens, differentiable.
        inside: as in Split. earlier: the states that chunks pass on in this layer, if the share is
        of a chunk."""
        if earlier is not None:
            assert isinstance(share, ChunkShare) and self.mesh.context.size == 1
            return mix_over_chunks(x, share, rule, earlier)
        return mix(x, share, rule, (self.mesh.ulysses, self.mesh.ring), inside)

    def convolve(
        self,
        x: Tensor,
        share: Share,
        taps: int,
        convolution: Convolution,
        earlier: LayerStates | None = None,
    ) -> Tensor:
        """Return a causal convolution [1, C, T] of this rank's tokens, differentiable. earlier: as
        in `mix`."""
        if earlier is not None:
            assert isinstance(share, ChunkShare) and self.mesh.context.size == 1
            return convolve_chunk(x, share, taps, convolution, earlier)
        return convolve(x, share.halo(taps), convolution, self.mesh.context)


def live_worlds(
    recipe: Recipe,
    heads: Collection[Heads],
    window: int | None,
    softcap: float | None,
    device: torch.device,
    groups: Groups,
    prices: ChunkPrices | None = None,
) -> tuple[list[World], list[str]]:
    """Create the world of each of a recipe's strategies, or the only one; collective.

    heads: those of the model's layers. window: the sliding window that all its layers have, if any.
    softcap: the bound of its attention scores, if any. prices: by which rows are cut into chunks
    that take equal time. Every rank tests kernels on the heads of all ranks' attention calls, so
    that all choose the same. Returns the worlds, that of the longest rows last, with a line for
    each attention kernel that was tried first and failed.
    """
    every = [(one, settled_layout(one.parallel_config)) for one in layouts_of(recipe)]
    wish, dtype = recipe.model.attention, getattr(torch, recipe.model.dtype)
    at_once = recipe.memory.heads_at_once
    met = [(each, layout) for _, layout in every for each in {*heads}]
    shapes = sorted({one for of in met for one in head_shapes(*of, at_once)})
    kernel, refused = believed_kernel(wish, shapes, dtype, device, softcap, said_by_all=said_by_all)
    worlds = []
    for one, layout in every:
        parallel = one.parallel_config
        row = row_of(parallel.context_parallel_algo, layout.context)
        cut, options = cut_of(parallel, layout, prices), algorithm_options(one, row, layout)
        algorithm = make_algorithm(row, layout.ulysses, layout.ring, window=window, **options)
        world = World(
            make_mesh(layout, groups, Books()),
            row,
            Chunked(algorithm, cut) if cut else algorithm,
            tensor_algorithm(parallel, layout),
            kernel,
            device,
            stages_of(one),
            schedule_of(parallel),
        )
        worlds.append(world)
    return worlds, refused
