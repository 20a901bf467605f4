"""Rows of tokens, and models, for runs that are timed, whose values do not matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def write_rows(file: Path, rows: int, tokens: int, vocabulary: int) -> None:
    """Write rows of one document each, of tokens drawn the same at every time."""
    ids = torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1))
    lines = (json.dumps({"input_ids": row}) + "\n" for row in ids.tolist())
    file.write_text("".join(lines))


def llama_of(
    vocabulary: int, layers: int, hidden: int, longest: int, *, heads: int
) -> dict[str, Any]:
    """Return the config of a model for rows of up to `longest` tokens, with half as many KV
    heads."""
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": longest,
        "tie_word_embeddings": False,
    }
