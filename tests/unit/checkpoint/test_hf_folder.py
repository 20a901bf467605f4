"""What an export writes of a multimodal checkpoint beside what was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.multimodal import changed, make_checkpoint, stored
from uspft.checkpoint import hf_folder
from uspft.checkpoint.hf_folder import export_folder
from uspft.config.recipe import ModelBlock
from uspft.families.multimodal import own_name
from uspft.model.build import empty_model
from uspft.model.fit import require_fit
from uspft.model.hf_config import model_config
from uspft.parameters.part import Part
from uspft.parameters.source import FolderWeights, WeightsError


def rewritten(folder: Path, change: Any) -> None:
    """Write a folder's tensors anew, as one file."""
    tensors = change(stored(folder))
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def export(base: Path, target: Path, dtype: torch.dtype, **overrides: Any) -> Path:
    """Export the language model of a checkpoint with 1 added to all of it."""
    block = ModelBlock.model_validate({"name_or_path": str(base), "overrides": overrides})
    model = empty_model(model_config(block, 64), torch.float32)
    require_fit(model, base)
    weights = FolderWeights(base)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            yield name, weights.read(name, Part.whole(tuple(parameter.shape))).float() + 1

    def describe(folder: Path) -> None:
        raw = json.loads((base / "config.json").read_text())
        raw["text_config"] |= overrides
        (folder / "config.json").write_text(json.dumps(raw))

    return export_folder(tensors(), dtype, describe, target, weights)


def test_gates_keep_the_type_that_they_have_in_the_files(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3_5")

    def in_bfloat16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: value if name.endswith("A_log") else value.bfloat16()
            for name, value in tensors.items()
        }

    rewritten(base, in_bfloat16)
    after = stored(export(base, tmp_path / "hf", torch.bfloat16))
    types = {name: value.dtype for name, value in stored(base).items()}
    assert {name: value.dtype for name, value in after.items()} == types
    assert {torch.float32, torch.bfloat16} == set(types.values())


def test_a_head_that_is_stored_beside_the_table_to_which_it_is_tied_is_written_too(
    tmp_path: Path,
) -> None:
    base = make_checkpoint(tmp_path / "base", "gemma3")
    table, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    rewritten(base, lambda tensors: {**tensors, head: tensors[table].clone()})
    after = stored(export(base, tmp_path / "hf", torch.float32))
    assert after.keys() == stored(base).keys() and torch.equal(after[head], after[table])
    assert torch.equal(after[head], stored(base)[table] + 1)


def test_layers_that_a_shortened_model_does_without_are_left_out(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "mistral3")
    hf = export(base, tmp_path / "hf", torch.float32, num_hidden_layers=1)
    gone = stored(base).keys() - stored(hf).keys()
    assert gone == {name for name in stored(base) if ".model.layers.1." in name} and len(gone) == 9
    assert all((own_name(name) is None) != (name in changed(base, hf)) for name in stored(hf))


def test_no_more_than_a_file_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3_vl")
    sizes = [value.nbytes for value in stored(base).values()]
    limit = max(sizes)
    monkeypatch.setattr(hf_folder, "SHARD_BYTES", limit)
    written: list[int] = []
    write = hf_folder.save_tensors

    def seen(tensors: dict[str, Tensor], path: Path, facts: dict[str, str]) -> None:
        written.append(sum(value.nbytes for value in tensors.values()))
        write(tensors, path, facts)

    monkeypatch.setattr(hf_folder, "save_tensors", seen)
    hf = export(base, tmp_path / "hf", torch.float32)
    assert max(written) <= limit and len(written) > 5
    index = json.loads((hf / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == stored(base).keys() and sum(written) == sum(sizes)


def test_what_the_checkpoint_lacks_is_told_by_its_own_name(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "mistral3")
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    other = tmp_path / "other"
    shutil.copytree(base, other)
    rewritten(other, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(WeightsError, match=r"lacks parameters.*model\.layers\.0\.mlp\.up_proj"):
        export(other, tmp_path / "hf", torch.float32)


def test_a_language_model_that_was_taken_out_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    """transformers saves it with the names that it has inside."""
    from transformers import AutoModelForCausalLM

    base = make_checkpoint(tmp_path / "base", "qwen3_5")
    taken = tmp_path / "taken"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).save_pretrained(taken)
    assert any(name.startswith("model.language_model.") for name in stored(taken))
    block = ModelBlock.model_validate({"name_or_path": str(taken)})
    model = empty_model(model_config(block, 64), torch.float32)
    require_fit(model, taken)
    whole, alone = FolderWeights(base), FolderWeights(taken)
    for name, parameter in model.named_parameters():
        part = Part.whole(tuple(parameter.shape))
        assert torch.equal(whole.read(name, part), alone.read(name, part)), name
