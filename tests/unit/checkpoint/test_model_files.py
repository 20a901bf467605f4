"""An exported model of each family, in plain transformers: it answers in the template that
it was trained in, and stops where the turn ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.answers import ANSWER, ASKED, OTHER_END, base_model, says
from tests.support.models import ARCHITECTURES
from uspft.checkpoint.hf_folder import export_folder, write_model_files
from uspft.config import Recipe, load
from uspft.config.problems import Fault
from uspft.data.tokenise import load_tokeniser
from uspft.families import FAMILIES
from uspft.job import Job
from uspft.model.hf_config import model_config
from uspft.prepare.serving_files import serving_of

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
    hf = export_folder(
        iter(net.named_parameters()),
        torch.float32,
        lambda at: write_model_files(at, config, job, 40),
        folder / "hf",
    )
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
    assert ARCHITECTURES.keys() == FAMILIES.keys() and len(FAMILIES) == 20


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
