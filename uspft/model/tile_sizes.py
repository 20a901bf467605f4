"""How many tokens `memory` lets a tile have; no torch."""

from __future__ import annotations

MAX_TILE_LOGITS = 1 << 27
"""How many logits a tile has under `loss_tile_tokens: auto` (512 MiB in float32)."""
MAX_TILE_FEATURES = 1 << 25
"""How many inner features a tile has under `mlp_tile_tokens: auto` (64 MiB in bfloat16)."""
LEAST_OF_LOSS, LEAST_OF_MLP = 256, 1024
"""How many tokens a tile needs at least for its products to fill a GPU."""


def tile_tokens(wish: str | int, vocabulary: int) -> int | None:
    """Return the tokens per tile that `memory.loss_tile_tokens` asks for.

    wish: auto, none or a number. None stands for all tokens at once.
    """
    if wish == "none":
        return None
    return max(LEAST_OF_LOSS, MAX_TILE_LOGITS // vocabulary) if wish == "auto" else int(wish)


def mlp_tile_tokens(wish: str | int, inner: int) -> int | None:
    """Return the tokens per tile that `memory.mlp_tile_tokens` asks for; None: all at once.

    wish: auto, none or a number. inner: how many inner features an MLP makes of a token.
    """
    if wish == "none":
        return None
    return max(LEAST_OF_MLP, MAX_TILE_FEATURES // inner) if wish == "auto" else int(wish)
