"""The number of tokens in a tile under the recipe's `memory` keys; no torch."""

from __future__ import annotations

MAX_TILE_LOGITS = 1 << 27
"""The logits in a tile under `loss_tile_tokens: auto` (512 MiB in float32)."""
MAX_TILE_FEATURES = 1 << 25
"""The inner features in a tile under `mlp_tile_tokens: auto` (64 MiB in bfloat16)."""
LEAST_OF_LOSS, LEAST_OF_MLP = 256, 1024
"""The least tokens in a tile, so that its products fill a GPU."""


def tile_tokens(wish: str | int, vocabulary: int) -> int | None:
    """Return the tokens per tile for `memory.loss_tile_tokens`, or None for all at once.

    wish: auto, none or a number.
    """
    if wish == "none":
        return None
    return max(LEAST_OF_LOSS, MAX_TILE_LOGITS // vocabulary) if wish == "auto" else int(wish)


def mlp_tile_tokens(wish: str | int, inner: int) -> int | None:
    """Return the tokens per tile for `memory.mlp_tile_tokens`, or None for all at once.

    wish: auto, none or a number. inner: inner features of an MLP per token.
    """
    if wish == "none":
        return None
    return max(LEAST_OF_MLP, MAX_TILE_FEATURES // inner) if wish == "auto" else int(wish)
