"""What an export writes of a multimodal checkpoint beside what was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
import yaml
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.answers import ANSWER, ASKED, OTHER_END, base_model, says
from tests.support.models import ARCHITECTURES
from tests.support.multimodal import changed, make_checkpoint, stored
from uspft.checkpoint import hf_folder
from uspft.checkpoint.hf_folder import export_folder, write_model_files
from uspft.config import Recipe, load
from uspft.config.inputs import ModelBlock
from uspft.config.problems import Fault
from uspft.data.corpus.tokenise import load_tokeniser
from uspft.families import FAMILIES
from uspft.families.multimodal import own_name
from uspft.job import Job
from uspft.model.build import empty_model, require_fit
from uspft.model.hf_config import model_config
from uspft.parameters.source import FolderWeights, WeightsError
from uspft.prepare.model import serving_of
from uspft.tensor.parts import Part


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

    raw = json.loads((base / "config.json").read_text())
    raw["text_config"] |= overrides
    files = target.with_name(f"{target.name} model")
    files.mkdir()
    (files / "config.json").write_text(json.dumps(raw))
    return export_folder(tensors(), dtype, files, target, weights)


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


SCALING = {"rope_type": "linear", "factor": 3.0}
LIMIT = 14


class Exported(NamedTuple):
    """A model that says one answer, and the folder that it was exported to."""

    net: Any
    hf: Path
    recipe: Recipe


def recipe_of(folder: Path, base: Path, kind: str) -> Recipe:
    path = folder / "recipe.yaml"
    tree = {
        "output_dir": str(folder / "my-run"),
        "model": {
            "name_or_path": str(base),
            "dtype": "float32",
            "rope_scaling": SCALING if kind != "phi3" and FAMILIES[kind].scalings else None,
        },
        "data": {"train": "org/conversations", "sequence_length": 128},
        "training": {"steps": 40, "global_batch_size": 1},
    }
    path.write_text(yaml.safe_dump(tree))
    return load(path).recipe


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    base = base_model(folder / "base", request.param)
    recipe = recipe_of(folder, base, request.param)
    config = model_config(recipe.model, recipe.data.sequence_length)
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokeniser = load_tokeniser(str(base), recipe.data)
    says(net, tokeniser)
    serving = serving_of(recipe, {"messages"}, config, str(base))
    job = Job(recipe, folder, 40, {}, tokenizer=str(base), serving=serving)
    write_model_files(folder / "model", config, job, 40)
    tensors = iter(net.named_parameters())
    hf = export_folder(tensors, torch.float32, folder / "model", folder / "hf")
    return Exported(net, hf, recipe)


def answer(model: Any, tokenizer: Any, **more: Any) -> str:
    inputs = tokenizer.apply_chat_template(
        [ASKED], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    out = model.generate(**inputs, max_new_tokens=LIMIT, do_sample=False, **more)
    text: str = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    return text


def test_it_answers_in_its_template_and_stops(exported: Exported) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported.hf)
    model = AutoModelForCausalLM.from_pretrained(exported.hf, attn_implementation="eager")
    assert answer(model, tokenizer) == f"{ANSWER}<|im_end|>"
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id, OTHER_END]
    assert model.generation_config.eos_token_id == ends
    on = answer(model, tokenizer, eos_token_id=ends[1:])
    assert on.startswith(f"{ANSWER}<|im_end|>") and len(on) > len(ANSWER) + 12, on
    places = torch.arange(90)[None]  # more than the model's own positions
    with torch.no_grad():
        assert torch.equal(model(places).logits, exported.net(places).logits)


def test_its_positions_are_scaled(exported: Exported) -> None:
    if exported.recipe.model.rope_scaling is None:
        return  # its family takes none
    places = torch.zeros(()), torch.arange(90)[None]
    model = AutoModelForCausalLM.from_pretrained(exported.hf)
    base = AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(exported.recipe.model.name_or_path)
    )
    trained, got, unscaled = (
        net.base_model.rotary_emb(*places)[0] for net in (exported.net, model, base)
    )
    assert torch.equal(got, trained) and not torch.equal(got, unscaled)


def test_the_card_has_the_facts_and_the_recipe(exported: Exported) -> None:
    _, head, text = (exported.hf / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {"tags": ["uspft"], "datasets": ["org/conversations"]}
    assert "40 steps on `org/conversations`" in text and "# my-run" in text
    scaled = exported.recipe.model.rope_scaling is not None
    assert ("scaled by `linear`" in text) == scaled and "ends with `<|im_end|>`" in text
    body = text.partition("```yaml\n")[2].partition("```")[0]
    path = exported.hf.parent / "again.yaml"
    path.write_text(body)
    assert load(path).recipe == exported.recipe


def test_every_family_is_exported() -> None:
    assert ARCHITECTURES.keys() == FAMILIES.keys() and len(FAMILIES) == 24


def test_what_is_not_a_conversation_ends_with_the_text(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", "llama")
    recipe = recipe_of(tmp_path, base, "llama")
    config = model_config(recipe.model, 128)
    serving = serving_of(recipe, {"text"}, config, str(base))
    assert serving.ends == () and serving.generation["eos_token_id"] == [0, OTHER_END]
    assert serving.template and "{%- generation" not in serving.template
    tokens = serving_of(recipe, {"tokenized"}, config, str(base))
    assert serving_of(recipe, {"tokenized"}, config, None).template is None
    assert tokens.template == serving.template and tokens.generation["eos_token_id"] == OTHER_END
    (base / "generation_config.json").write_text("[")
    with pytest.raises(Fault, match=r"generation_config.json cannot be read.*or delete it"):
        serving_of(recipe, {"text"}, config, str(base))
    (base / "generation_config.json").unlink()
    assert serving_of(recipe, {"text"}, config, str(base)).generation["eos_token_id"] == 0
