"""A few rows of packed documents, and plain transformers on each document by itself, in float64."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from tests.support.wide import widened
from uspft.batch import Batch
from uspft.data.rows.loader import EMPTY, StepLoader
from uspft.data.rows.stream import Row
from uspft.segments import Segments
from uspft.world import World

ROW = 48
DOCUMENTS = [[31, 17], [48], [3, 21, 24], [40, 5]]
"""Of each row. One ends in padding; of one a chunk has the first two tokens of a document."""
Found = tuple[float, dict[str, torch.Tensor]]
"""A loss, and gradients by name."""


def loaded(folder: Path, attention: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation=attention
    )
    for buffer in model.buffers():
        buffer.data = buffer.data.double() if buffer.is_floating_point() else buffer.data
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # else a state is forgotten within a few tokens
            parameter.data = torch.linspace(0.005, 0.05, len(parameter)).double().log()
    return model.train()


def documents(row: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of a row's documents; the first few of each are no targets."""
    draw = np.random.default_rng(row)
    found = []
    for length in DOCUMENTS[row]:
        ids = draw.integers(3, 97, length).tolist()
        found.append((ids, [-100] * (length // 3) + ids[length // 3 :]))
    return found


class Rows:
    """A stream of the rows above."""

    def row(self, index: int) -> Row:
        every = documents(index)
        ids, labels, positions = np.zeros(ROW, int), np.full(ROW, -100), np.zeros(ROW, int)
        bounds = [0]
        for tokens, targets in every:
            a, b = bounds[-1], bounds[-1] + len(tokens)
            ids[a:b], labels[a : b - 1], positions[a:b] = tokens, targets[1:], range(b - a)
            bounds.append(b)
        return Row(ids, labels, positions, Segments(tuple(bounds), ROW), ())


def targets(rows: int) -> int:
    every = chain.from_iterable(map(documents, range(rows)))
    return sum(label != -100 for _, labels in every for label in labels[1:])


def plain(folder: Path, rows: int) -> Found:
    """What transformers gives for some rows, each document by itself."""
    model = loaded(folder, "eager")
    with wide(model):
        loss = torch.zeros((), dtype=torch.float64)
        for ids, labels in chain.from_iterable(map(documents, range(rows))):
            logits = model(torch.tensor([ids])).logits[0, :-1]
            loss = loss + F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
        loss = loss / targets(rows)
        loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def wide(model: Any) -> Any:
    return widened(sys.modules[type(model).__module__])


def batches_of(world: World, rows: int, each: int = 1) -> list[Batch]:
    """Micro-batches of `each` rows."""
    loader = StepLoader(
        Rows(),  # type: ignore[arg-type]
        world,
        row_tokens=ROW,
        rows_per_step=rows,
        rows_per_batch=each,
    )
    return [
        loader.batch([n if n < rows else EMPTY for n in range(first, first + each)])
        for first in range(0, rows, each)
    ]


def apart(got: Found, want: Found) -> float:
    """The largest relative difference of the loss and of any gradient."""
    assert got[1].keys() == want[1].keys()
    found = [abs(got[0] / want[0] - 1)]
    for name, gradient in want[1].items():
        found.append(float((got[1][name] - gradient).norm() / gradient.norm()))
    return max(found)
