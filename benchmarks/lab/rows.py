"""Rows of tokens for runs that are timed, whose values do not matter."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def write_rows(file: Path, rows: int, tokens: int, vocabulary: int) -> None:
    """Write rows of one document each, of tokens drawn the same at every time."""
    ids = torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1))
    lines = (json.dumps({"input_ids": row}) + "\n" for row in ids.tolist())
    file.write_text("".join(lines))
