"""The samples of a step: the lengths of the quickstart's corpus, scaled down to a longest row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from transformers import AutoTokenizer

from benchmarks.lab.results import ROOT
from uspft.data.files.sources import STDLIB, list_files

SHORTEST = 8
OUTLIERS = 1
"""How many of the longest files are left out: the index of Python's documentation is one literal,
three times as long as the longest program."""


def library_lengths() -> list[int]:
    """This returns the tokens of each file that the quickstart trains on, rising, outliers left
    out."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "tokenizer")
    texts = [
        file.path.read_text(encoding="utf-8", errors="replace")
        for file in list_files(STDLIB, "auto")
    ]
    every = sorted(len(tokenizer(text)["input_ids"]) for text in texts if text)
    return every[:-OUTLIERS]


def scaled(every: Sequence[int], samples: int, longest: int) -> list[int]:
    """This returns so many evenly spaced quantiles, scaled so that the last is `longest`.

    A step of a few samples so has the whole distribution, its longest file included.
    """
    chosen = [every[len(every) * (i + 1) // samples - 1] for i in range(samples)]
    return [max(SHORTEST, round(length * longest / every[-1])) for length in chosen]


def even(tokens: int, length: int) -> list[int]:
    """This returns the lengths of a corpus without a tail, of about so many tokens."""
    return [length - 1 - i % 2 for i in range(max(1, round(tokens / length)))]


def write_samples(path: Path, lengths: Sequence[int], steps: int, vocabulary: int) -> None:
    """This writes the samples of some steps: the same lengths in another order, and new tokens."""
    random, generator = Random(1), torch.Generator().manual_seed(1)
    with path.open("w") as file:
        for _ in range(steps):
            for length in random.sample(lengths, len(lengths)):
                # Small ids are common, so that the loss falls and its course can be compared.
                drawn = torch.rand(length, generator=generator) ** 3 * (vocabulary - 3)
                file.write(json.dumps({"input_ids": (drawn.long() + 3).tolist()}) + "\n")
