"""The seconds that the traffic of attention takes on a cluster's links."""

from __future__ import annotations

from uspft.families import ModelShape
from uspft.families.projections import FUSED
from uspft.families.table import FAMILIES
from uspft.layout import Layout
from uspft.planner.machine import Hardware
from uspft.planner.spread import Spread
from uspft.planner.step_shape import StepPart
from uspft.sequence import Cost

EXCHANGES = 2
"""Of heads for tokens and back, each way through a layer's attention."""


def wire_of(cost: Cost, layout: Layout, hardware: Hardware, rows: int = 1) -> dict[str, StepPart]:
    """Return what one layer's attention of so many rows moves one way under a layout, by kind."""
    tokens = Spread.of(layout, ("ring",), hardware.ranks_per_host)
    ring, gather, heads = (rows * one.bytes for one in (cost.ring, cost.gather, cost.all_to_all))
    found = {
        "ring": (hardware.messages_seconds(ring, cost.ring.messages, tokens, to_next=True), ring),
        "gather": (
            hardware.messages_seconds(gather, cost.gather.messages, tokens, to_next=False),
            gather,
        ),
        "all_to_all": (exchanged_seconds(heads, layout, hardware), heads),
    }
    return {name: StepPart(name, seconds, bytes=sent) for name, (seconds, sent) in found.items()}


def exchanged_seconds(sent_bytes: float, layout: Layout, hardware: Hardware) -> float:
    """Return the seconds in which tokens are exchanged for heads and back one way."""
    heads = Spread.of(layout, ("ulysses",), hardware.ranks_per_host)
    each = sent_bytes / EXCHANGES
    return EXCHANGES * hardware.collective_seconds("all_to_all", each, heads)


def gathered_elements(model: ModelShape, tensor: int) -> float:
    """Return how many elements of a token a tensor rank sends to those that share its key-value
    head, one way; 0 where a head's matrices are not fused with others and thus held by each."""
    if FAMILIES[model.model_type].projections is not FUSED or tensor <= model.kv_heads:
        return 0.0
    sharing = tensor / model.kv_heads
    return 2 * model.head_dim * (sharing - 1) / sharing
