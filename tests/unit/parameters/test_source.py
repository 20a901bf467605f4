"""Each family's weights: drawn as transformers draws them, read and written as files name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.models import make_model, trained_of
from uspft.config.inputs import ModelBlock
from uspft.families import ModelShape, read_shape
from uspft.families.table import EXPERTS, FAMILIES
from uspft.layout import Layout
from uspft.mesh import Groups
from uspft.model.build import empty_model, parameter_count, require_fit
from uspft.model.hf_config import layer_windows, model_config
from uspft.parameters import source
from uspft.parameters.experts import as_files, corrections, is_experts
from uspft.parameters.fill import RandomWeights, decays, fill, generator
from uspft.parameters.names import places, shapes_of
from uspft.parameters.shards import Holders, Shards
from uspft.parameters.source import FolderWeights, WeightsError
from uspft.tensor.parts import Part


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("family") / request.param, request.param, kv_heads=2)


def block(folder: Path, **extra: object) -> ModelBlock:
    return ModelBlock.model_validate({"name_or_path": str(folder), "dtype": "float32", **extra})


def test_a_folder_is_read_and_written_as_transformers_does(folder: Path) -> None:
    config = model_config(block(folder), 64)
    assert isinstance(read_shape(block(folder), folder), ModelShape)
    model = empty_model(config, torch.float32)
    require_fit(model, folder)
    weights = FolderWeights(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    files = load_file(folder / "model.safetensors")
    written = {}
    for name, parameter in {**dict(model.named_parameters()), **corrections(model)}.items():
        value = weights.read(name, Part.whole(tuple(parameter.shape)))
        assert torch.equal(value, theirs[name])
        written |= dict(as_files(name, value, config.to_dict()))
    assert written.keys() == files.keys()
    if config.model_type == "olmo_hybrid":  # whose convolution transformers cuts in equal parts
        written, files = (joined(tensors) for tensors in (written, files))
    assert all(torch.equal(written[name], files[name]) for name in files)


class Sliced:
    """A safetensors file that gives slices alone, and counts their values."""

    read: ClassVar[list[int]] = []

    def __init__(self, *place: Any) -> None:
        self._file = safe_open(*place)

    def __enter__(self) -> Sliced:
        self._tensors = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> Any:
        held, read = self._tensors.get_slice(name), self.read

        class Counted:
            get_shape = staticmethod(held.get_shape)

            def __getitem__(self, where: Any) -> torch.Tensor:
                value: torch.Tensor = held[where]
                read.append(value.numel())
                return value

        return Counted()


def test_a_part_of_experts_is_read_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files have a matrix for each expert, too."""
    net = AutoModelForCausalLM.from_pretrained(folder)
    weights = FolderWeights(folder)
    monkeypatch.setattr(source, "safe_open", Sliced)
    for name, value in net.named_parameters():
        if not is_experts(name) or value.ndim < 3:
            continue
        rows, half = value.shape[1], value.shape[1] // 2
        ranges = ((1, 3),), ((0, 5), (half, half + 5)), ((3, 9), (rows // 4, rows // 4 + 2))
        part = Part(tuple(value.shape), ranges)
        Sliced.read.clear()
        assert torch.equal(weights.read(name, part), part.cut(value))
        assert sum(Sliced.read) == part.count


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of files, with the parts of convolutions together."""
    found = dict(tensors)
    for name in [name for name in found if "q_conv1d" in name]:
        parts = [found.pop(name.replace("q_conv1d", f"{part}_conv1d")) for part in "qkv"]
        found[name] = torch.cat(parts)
    return found


def test_random_weights_start_as_transformers_start(folder: Path) -> None:
    config = model_config(block(folder), 64)
    theirs = AutoModelForCausalLM.from_config(config)
    ours = empty_model(config, torch.float32)
    holders = Holders.of(Shards(Layout()), 0, Groups(), shapes_of(places(ours)))
    fill(ours, places(ours), torch.float32, RandomWeights(ours, 0, 0.02), holders)
    untrained = {n: one for n, one in theirs.state_dict().items() if n in corrections(ours)}
    assert all(torch.equal(one, untrained[n]) for n, one in corrections(ours).items())
    for (name, one), other in zip(trained_of(theirs).items(), ours.parameters(), strict=True):
        drawn = name.endswith(("A_log", "dt_bias"))
        spread = 1.4 if drawn else 0.02  # of the logarithms of such ranges, and of the rest
        near = max(0.004, 4 * spread / one.numel() ** 0.5)  # of a few numbers, four standard errors
        assert abs(one.std() - other.std()) < near and abs(one.mean() - other.mean()) < near, name
        assert bool(one.any()) == bool(other.any()), name


def test_decays_are_drawn_as_transformers_draws_them() -> None:
    sizes = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=1, vocab_size=8)
    sizes |= dict(intermediate_size=8, linear_key_head_dim=1, linear_value_head_dim=1)
    heads = dict(linear_num_key_heads=1, linear_num_value_heads=4096)
    one = {"layer_types": ["linear_attention", "full_attention"]}
    for name in ("Qwen3_5Text", "OlmoHybrid"):
        config = getattr(transformers, f"{name}Config")(**sizes, **heads, **one, pad_token_id=0)
        theirs = AutoModelForCausalLM.from_config(config).model.layers[0].linear_attn
        shape = (4096,)
        for kind in ("A_log", "dt_bias"):
            ours = decays(kind, shape, generator(0, kind), config).sort().values
            drawn = getattr(theirs, kind).detach().sort().values
            ours, drawn = ((x.exp() if kind == "A_log" else x) for x in (ours, drawn))
            apart, spread = (ours - drawn).abs(), float(drawn.max() - drawn.min()) + 1e-6
            assert apart.max() < 0.05 * spread and apart.mean() < 0.02 * spread, (name, kind)
        assert not torch.equal(decays("A_log", shape, generator(1, ""), config), ours)


def test_a_missing_expert_is_missed(folder: Path) -> None:
    config = model_config(block(folder), 64)
    model = empty_model(config, torch.float32)
    count = next((one for one in EXPERTS if getattr(config, one, None)), None)
    if not count:
        assert parameter_count(model) == sum(p.numel() for p in model.parameters())
        return
    with pytest.raises(WeightsError, match="other shapes"):
        setattr(config, count, getattr(config, count) + getattr(config, "n_group", 1))
        require_fit(empty_model(config, torch.float32), folder)
    fewer = parameter_count(model, active_only=True)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert fewer < parameter_count(model) - experts // 2


def test_an_overridden_window_keeps_the_kinds_of_layers(tmp_path: Path) -> None:
    def windows(kind: str, **overrides: object) -> tuple[int | None, ...]:
        there = make_model(tmp_path / kind, kind, kv_heads=2)
        return layer_windows(model_config(block(there, overrides=overrides), 64))

    assert windows("gemma3_text", sliding_window=5) == (5, None)
    assert windows("gemma2", sliding_window=5) == (5, None)
    assert windows("mistral", sliding_window=5) == (5, 5)
    assert windows("qwen3_moe", use_sliding_window=True, sliding_window=5) == (5, 5)
    assert windows("smollm3", use_sliding_window=True, sliding_window=5) == (None, 5)
    assert windows("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1) == (
        None,
        5,
    )
