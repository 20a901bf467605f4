"""Weights in MXFP4 as transformers dequantises them, whole and in parts, from their own bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.models import make_model
from tests.support.quantised import quantise
from uspft.config.inputs import ModelBlock
from uspft.model.build import empty_model, require_fit
from uspft.model.hf_config import model_config
from uspft.parameters.experts import dequantised
from uspft.parameters.source import FolderWeights, WeightsError
from uspft.tensor.parts import Part

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantise(make_model(tmp_path_factory.mktemp("mxfp4") / "m", "gpt_oss"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_transformers_bit_for_bit(folder: Path, dtype: torch.dtype) -> None:
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert not hasattr(net.config, "quantization_config")
    block = ModelBlock.model_validate({"name_or_path": str(folder), "dtype": "float32"})
    config = model_config(block, 64)
    assert not hasattr(config, "quantization_config")
    require_fit(empty_model(config, dtype), folder)
    weights, parts = FolderWeights(folder), 0
    for name, value in net.named_parameters():
        shape = tuple(value.shape)
        assert torch.equal(weights.read(name, Part.whole(shape)).to(dtype), value), name
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        for ranges in (
            (((1, 3),), ((0, shape[1]),), ((0, shape[2]),)),
            (((0, shape[0]),), ((5, 40), (50, 64)), ((0, 7), (20, 21))),
            (((3, 4),), ((32, 64),), ((2, 4),)),
        ):
            part = Part(shape, ranges)
            assert torch.equal(weights.read(name, part).to(dtype), part.cut(value))
            parts += 1
    assert parts == 12


def test_every_byte_and_exponent_stands_for_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    exponents = torch.arange(1, 255, dtype=torch.uint8)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 254, 16, 16)
    scales = exponents.view(1, 254, 1).expand(1, 254, 16)
    theirs = convert_moe_packed_tensors(blocks.contiguous(), scales.contiguous())
    ours = dequantised(blocks, scales).transpose(1, 2).to(torch.bfloat16)
    assert torch.equal(ours, theirs) and ours.isfinite().any()


def test_only_the_bytes_of_a_part_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from uspft.parameters import source

    read: list[int] = []
    plain = source.read_quantised

    class Counted:
        def __init__(self, held: object) -> None:
            self.held = held

        def __getitem__(self, where: object) -> torch.Tensor:
            value: torch.Tensor = self.held[where]  # type: ignore[index]
            read.append(value.numel())
            return value

    counted = lambda blocks, scales, part: plain(Counted(blocks), Counted(scales), part)  # noqa: E731
    monkeypatch.setattr(source, "read_quantised", counted)
    shape = tuple(load_file(folder / "model.safetensors")[f"{EXPERTS}.down_proj_blocks"].shape)
    whole = (shape[0], shape[2] * 32, shape[1])
    FolderWeights(folder).read(
        f"{EXPERTS}.down_proj", Part(whole, (((2, 3),), ((32, 64),), ((4, 8),)))
    )
    assert sorted(read) == [4, 4 * 16]


def test_a_wrong_shape_is_named(folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"down_proj is \(4, 96, 64\), the config says"):
        FolderWeights(folder).read(f"{EXPERTS}.down_proj", Part.whole((4, 64, 96)))
