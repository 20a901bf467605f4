"""A model's buffers are made where they are used, in float32 whatever the model's type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.models import make_model
from uspft.families.table import FAMILIES
from uspft.model.build import CPU, empty_model
from uspft.parameters.experts import CORRECTION

AWAY = torch.device("cuda")
"""What is moved there stays here, and is counted."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_buffer_stays_behind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward pass would copy it to the device, and wait for that."""
    config = AutoConfig.from_pretrained(make_model(tmp_path, kind, kv_heads=2))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain = dict(model.named_buffers())
    # What corrects ERNIE 4.5's routers is a parameter there, which nothing trains.
    plain |= {name: p for name, p in model.named_parameters() if name.endswith(CORRECTION)}
    own, moved = torch.Tensor.to, []

    def to(x: torch.Tensor, *where: Any, **more: Any) -> torch.Tensor:
        if AWAY in where:
            moved.append(x.data_ptr())
            where = (CPU, *where[1:])
        return own(x, *where, **more)

    monkeypatch.setattr(torch.Tensor, "to", to)
    made = dict(empty_model(config, torch.bfloat16, AWAY).named_buffers())
    assert len(set(moved)) == len(moved) == len(made)
    assert any("inv_freq" in name for name in made) and made.keys() == plain.keys()
    for name, buffer in made.items():
        assert buffer.device == CPU and torch.equal(buffer, plain[name]), name
