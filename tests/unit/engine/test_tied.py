"""A tied table's copy, and memory for its gradient, are where the run is; the table may not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from uspft.engine.tied import TiedTable


def test_a_copy_is_made_on_the_device_of_the_run() -> None:
    lines: Any = SimpleNamespace(group=SimpleNamespace(index=1, size=2))
    run = torch.device("meta")
    tied = TiedTable(nn.Parameter(torch.zeros(0)), (4, 2), lines, torch.bfloat16, run)
    assert tied.copy is not None and tied.copy.device == run
    assert tied.buffer().device == run
