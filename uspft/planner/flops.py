"""Model FLOPs of a step, from which MFU is computed; recomputation is not counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from uspft.families import NO_KEYS, ModelShape, layer_blocks
from uspft.planner.attention_work import DrawnRows
from uspft.planner.products import block_projections, head_projection
from uspft.segments import Segments
from uspft.sequence.chunked import Cut

PEAK_BF16 = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "B100": 1.75e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L20": 119.5e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
"""Dense 16-bit matrix FLOP/s from the makers' data sheets, by words of the device's name.

Where a name begins with another one, the longer name stands first. Hardware files name a row: a
run's MFU needs the peaks of many devices, and only some of them are in a cluster that a file
describes.
"""

OTHER = r" (?:Ti|D|Laptop)\b|.*\bMIG\b"
"""The pattern that, after a device's name, marks a slower or faster relative, or a slice of it."""


def device_of(device_name: str) -> str | None:
    """Return the words of the table that a device's name holds, or None (a CPU, a new GPU)."""
    for words in PEAK_BF16:
        if re.search(rf"(?<!\w){words}(?!\w|{OTHER})", device_name):
            return words
    return None


def peak_flops(device_name: str) -> float | None:
    """The device's 16-bit peak, or None where it is not known."""
    words = device_of(device_name)
    return PEAK_BF16[words] if words else None


def step_flops(
    parameters: int,
    tokens: int,
    attention_pairs: int,
    heads: tuple[int, int, int],
    *,
    frozen: int = 0,
) -> float:
    """Return the forward and backward FLOPs of a step.

    parameters: how many there are, frozen ones included, the embedding look-up left out. tokens:
    tokens of the step. attention_pairs: the visible (query, key) pairs of one layer, which depend
    on documents and on the causal mask. heads: layers, query heads, head dim. frozen: how many of
    the parameters are frozen.

    A parameter costs 6 FLOPs per token, or 4 where it is frozen and has no gradient of its own. A
    pair costs 12 · heads · dim in each layer: 2 for each of two products forward and four backward.
    """
    layers, query_heads, dim = heads
    products = 6.0 * parameters - 2.0 * frozen
    return products * tokens + 12.0 * layers * query_heads * dim * attention_pairs


def layer_flops(
    model: ModelShape, windows: Sequence[int | None], rows: DrawnRows
) -> tuple[list[float], float]:
    """Return the FLOPs of a row in each layer, and in the head: the mean over rows.

    windows: the sliding window of each layer, or None where it sees all. The embedding is looked
    up, and costs none; so is the rule of a layer with a state left out, a hundredth of its layer.
    """
    tokens, blocks = rows.rows[0].length, layer_blocks(model, windows)
    known, kinds = {}, list(zip(windows, blocks, strict=True))
    for window, one in dict.fromkeys(kinds):
        met = sum(matrix.met for matrix in block_projections(model, one))
        heads = 1, model.heads, model.of_window(window).head_dim
        known[window, one] = step_flops(met, tokens, int(rows.pairs(window)), heads)
    head = step_flops(head_projection(model).met, tokens, 0, (1, model.heads, 1))
    return [known[kind] for kind in kinds], head


def cut_by_flops(
    model: ModelShape, windows: Sequence[int | None], chunks: int, multiple: int
) -> Cut:
    """Return how rows are cut into chunks of equal FLOPs, which is near to equal time on any
    hardware. windows: of each layer."""
    # Of padding alone no query sees a key.
    layers, head = layer_flops(model, windows, DrawnRows((Segments((0,), 1),)))
    kinds = Counter(windows)
    pair = {w: 12.0 * model.heads * model.of_window(w).head_dim for w in kinds}
    seen = tuple((w, pair[w] * n) for w, n in kinds.items() if w != NO_KEYS)
    return Cut(chunks, multiple, head + sum(layers), seen)
