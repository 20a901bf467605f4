"""The config that `verify` takes from transformers alone, beside the one that trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models import make_model
from tests.support.multimodal import CHECKPOINTS, make_checkpoint
from uspft.config.inputs import ModelBlock
from uspft.families.multimodal import language_model
from uspft.families.table import FAMILIES
from uspft.model import hf_config
from uspft.model.hf_config import layer_windows, model_config
from uspft.verify.plain import pin_frequencies, plain_config

LENGTH, ORIGINAL = 48, 32
PAIRS = {"short_factor": [1.1] * 8, "long_factor": [1.5 + 0.4 * i for i in range(8)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "dynamic": {},
    "yarn": {},
    "longrope": PAIRS,
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def block(folder: Path, **extra: Any) -> ModelBlock:
    return ModelBlock.model_validate({"name_or_path": str(folder), "dtype": "float32", **extra})


@pytest.mark.parametrize("kind", [*FAMILIES, *CHECKPOINTS])
def test_both_readings_agree(kind: str, tmp_path: Path) -> None:
    if kind in CHECKPOINTS:
        make_checkpoint(tmp_path, kind)
    else:
        make_model(tmp_path, kind, kv_heads=2)
    kind = language_model(json.loads((tmp_path / "config.json").read_text()))["model_type"]
    asked: list[dict[str, Any]] = [{}, {"rms_norm_eps": 1e-3}]
    if kind != "olmo_hybrid":  # which must have attention, in its second layer
        asked += [{"num_hidden_layers": 1}]
    if FAMILIES[kind].windows != "none":
        asked += [{"sliding_window": 5}]
    if FAMILIES[kind].windows == "switched":
        asked += [{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}]
    raw = json.loads((tmp_path / "config.json").read_text())
    written = ModelBlock.model_validate({"config": raw, "dtype": "float32"})
    assert plain_config(written).to_dict() == plain_config(block(tmp_path)).to_dict()
    found = model_config(written, LENGTH).to_dict()
    assert found == model_config(block(tmp_path), LENGTH).to_dict() | {
        "_name_or_path": found["_name_or_path"]
    }
    for overrides in asked:
        given = block(tmp_path, overrides=overrides)
        theirs, ours = plain_config(given), model_config(given, LENGTH)
        assert layer_windows(theirs) == layer_windows(ours), overrides
        a, b = ({**c.to_dict(), "dtype": 0, "_name_or_path": 0} for c in (theirs, ours))
        assert a == b, overrides


def frequencies(config: Any, *, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of a row."""
    net = AutoModelForCausalLM.from_config(config)
    if pinned:
        pin_frequencies(net, LENGTH)
    found: tuple[torch.Tensor, torch.Tensor] = net.get_decoder().rotary_emb(
        torch.zeros(1), torch.arange(LENGTH)[None]
    )
    return found


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("how", ["asked for", "in the file"])
def test_a_fault_in_scaled_positions_shows(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference has none of uspft's positions in it: what is wrong there is a difference."""
    rope = {"rope_type": kind, "factor": 2.0, **SCALINGS[kind]}
    base = {"max_position_embeddings": ORIGINAL, "head_dim": 16}
    if how == "in the file":
        start = {"original_max_position_embeddings": ORIGINAL} if kind != "dynamic" else {}
        own = {"rope_theta": 1e4, **rope, **start}
        make_model(tmp_path, "qwen3", kv_heads=2, **{**base, "rope_parameters": own})
        given = block(tmp_path)
    else:
        make_model(tmp_path, "qwen3", kv_heads=2, **base)
        given = block(tmp_path, rope_scaling=rope)
    want = frequencies(plain_config(given), pinned=True)
    got = frequencies(model_config(given, LENGTH), pinned=False)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))

    right = hf_config.settled
    monkeypatch.setattr(hf_config, "settled", lambda *a: {**right(*a), "rope_theta": 2e4})
    wrong = frequencies(model_config(given, LENGTH), pinned=False)
    assert not torch.allclose(wrong[0], want[0], atol=1e-2)
