"""The code that a model card shows is run in its folder: a whole model's, a merged one's, and that
of an adapter, which is loaded on its base with the config of its training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.answers import ANSWER, base_model, says
from uspft.checkpoint.hf_folder import export_adapter, export_folder, write_model_files
from uspft.checkpoint.model_card import ADAPTER_CARD, model_card
from uspft.config import Recipe, load
from uspft.data.corpus.tokenise import load_tokeniser
from uspft.job import Job
from uspft.model.hf_config import model_config
from uspft.prepare.model import serving_of

END = "<|im_end|>"
LOADS = "AutoModelForCausalLM"
SCALING = {"rope_type": "linear", "factor": 3.0}
LORA = {"type": "lora", "rank": 2, "target_modules": ["q_proj"]}


class Folders(NamedTuple):
    """What a run with an adapter exports, and the base model of the adapter."""

    base: Path
    hf: Path
    adapter: Path


def job_of(folder: Path, model: dict[str, Any]) -> tuple[Job, Any]:
    """The job of a recipe, and the config of its model."""
    path = folder / "recipe.yaml"
    tree = {
        "output_dir": str(folder / "my-run"),
        "model": {"dtype": "float32", "rope_scaling": SCALING, **model},
        "data": {"train": "org/conversations", "sequence_length": 128},
        "training": {"steps": 40, "global_batch_size": 1},
    }
    path.write_text(yaml.safe_dump(tree))
    recipe: Recipe = load(path).recipe
    config = model_config(recipe.model, 128)
    tokenizer = model.get("name_or_path")
    if not tokenizer:
        return Job(recipe, folder, 40, {}), config
    serving = serving_of(recipe, {"messages"}, config, tokenizer)
    return Job(recipe, folder, 40, {}, tokenizer=tokenizer, serving=serving), config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("card")
    base = base_model(folder / "base", "llama")
    job, config = job_of(folder, {"name_or_path": str(base), "adapter": LORA})
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(config)
    says(net, load_tokeniser(str(base), job.recipe.data))
    own = (base / "config.json").read_bytes(), (base / "generation_config.json").read_bytes()
    net.save_pretrained(base)
    for name, held in zip(("config.json", "generation_config.json"), own, strict=True):
        (base / name).write_bytes(held)  # whose positions are not scaled, and whose end is another
    files = folder / "model"
    write_model_files(files, config, job, 40)
    sides = {"A": torch.ones(2, 64), "B": torch.zeros(64, 2)}
    at = "model.layers.{}.self_attn.q_proj.lora_{}.weight"
    thin = [(at.format(n, side), value) for n in (0, 1) for side, value in sides.items()]
    adapter = export_adapter(thin, job.recipe.model, files, folder / "adapter")
    hf = export_folder(iter(net.named_parameters()), torch.float32, files, folder / "hf")
    return Folders(base, hf, adapter)


def shown(folder: Path) -> str:
    """The code that the card of a folder shows."""
    return (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


@pytest.mark.parametrize("kind", ["hf", "adapter"])
def test_the_code_of_a_card_loads_what_was_trained(
    folders: Folders,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder: Path = getattr(folders, kind)
    monkeypatch.chdir(folder)
    warnings.simplefilter("ignore")  # of libraries, about each other
    names: dict[str, Any] = {}
    exec(shown(folder), names)
    assert capsys.readouterr().out.rstrip().endswith(f"assistant\n{ANSWER}{END}")
    assert isinstance(names["model"], PeftModel) == (kind == "adapter")
    assert names["model"].config.rope_parameters["rope_type"] == "linear"


def test_a_card_says_what_its_folder_holds(folders: Folders, tmp_path: Path) -> None:
    began = {
        folders.hf: f"Fine-tuned from `{folders.base}` by a LoRA adapter that is merged into it, ",
        folders.adapter: f"A LoRA adapter for `{folders.base}`, trained ",
    }
    for folder, origin in began.items():
        assert f"\n{origin}with uspft " in (folder / "README.md").read_text()
        assert not (folder / ADAPTER_CARD).exists()
    job, _ = job_of(tmp_path, {"config": str(folders.base), "adapter": LORA})
    alone, merged = (model_card(job, 40, LOADS, adapter=which) for which in (True, False))
    assert "A LoRA adapter for random weights, trained with" in alone and "```python" not in alone
    assert "which are in no file: what can be loaded is the merged model" in alone
    assert "Trained from a random model by a LoRA adapter that is merged into it, with" in merged
    assert 'AutoModelForCausalLM.from_pretrained(".")' in merged
    job, _ = job_of(tmp_path, {"name_or_path": str(folders.base)})
    assert f"Fine-tuned from `{folders.base}`, with" in model_card(job, 40, LOADS)
