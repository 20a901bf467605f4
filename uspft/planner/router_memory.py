"""The bytes of routers' logits, and of the loss that balances experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from uspft.planner.activations import LayerSizes
from uspft.planner.head_memory import HeadSizes
from uspft.planner.operations import WIDE


def router_bytes(config: Mapping[str, Any], sizes: LayerSizes) -> float:
    """Return the bytes of the logits of a layer's router, which are kept where their loss is asked
    for; later their gradient's. config: the model's."""
    of = sizes.experts
    asked = of and config.get("output_router_logits", False)
    return float(of.element * of.tokens * of.number) if of and asked else 0.0


def balance_bytes(head: HeadSizes, routers: Sequence[float]) -> float:
    """Return what is alive at the most while routers' loss is made (model/router.py), beside their
    logits: the gradients that came with the loss, probabilities, and of a layer what they choose
    and its logits in float32."""
    s, (first, *_) = head.layer, [*filter(None, routers), 0.0]
    wide = WIDE / s.element
    gradients = s.inside_bytes() + s.element * s.hidden * head.vocabulary * head.trains
    return (gradients + wide * (sum(routers) + 2 * first)) if first else 0.0
