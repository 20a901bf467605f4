"""`export`: which checkpoint it takes, what was frozen of an adapter, a base that has moved."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.adapters import peft_adapter
from tests.support.launch import write_recipe
from tests.support.models import make_model
from tests.support.runs import small_recipe
from uspft.__main__ import main
from uspft.checkpoint.folder import Checkpoint
from uspft.checkpoint.identity import BASE
from uspft.checkpoint.weights import weights_of
from uspft.config.inputs import ModelBlock
from uspft.layout import Layout
from uspft.mesh import Groups
from uspft.model.adapter import AdapterStart
from uspft.model.build import empty_model
from uspft.model.hf_config import model_config
from uspft.parameters.experts import corrections
from uspft.parameters.fill import fill
from uspft.parameters.names import places, shapes_of
from uspft.parameters.shards import Holders, Shards
from uspft.parameters.source import FolderWeights, base_digest
from uspft.tensor.parts import Part

SEED, RANK, ALPHA = 5, 3, 6.0
FREEZE = ["lora_A", r"layers\.0\..*lora_B"]
"""What trains is B of the second layer."""


class Trained(NamedTuple):
    """A run's output folder, its base model, and plain peft's adapter as it would have trained."""

    out: Path
    base: Path
    adapter: dict[str, torch.Tensor]
    merged: dict[str, torch.Tensor]


def write_checkpoint(
    out: Path, base: Path, held: dict[str, torch.Tensor], step: int = 1, **model: Any
) -> None:
    """A run's output after a step: weights of what trained, and what a resumed run must share."""
    folder = out / f"checkpoints/step-{step:08d}"
    folder.mkdir(parents=True)
    AutoConfig.from_pretrained(base).save_pretrained(folder / "model")
    weights = {f"weight/{name}": value.contiguous() for name, value in held.items()}
    save_file(weights, folder / "part.safetensors")
    block = ModelBlock(name_or_path=str(base))
    identity = {"seed": SEED, "model.name_or_path": str(base), "model.dtype": "float32"}
    identity |= {f"model.{key}": value for key, value in model.items()}
    identity |= {BASE: base_digest(block)} if model else {}
    files = dict.fromkeys(weights, "part.safetensors")
    state = {"format": 1, "step": step, "adam_steps": step, "identity": identity, "files": files}
    (folder / "state.json").write_text(json.dumps(state))


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    base, out = make_model(tmp_path / "base", "llama", heads=4, kv_heads=2), tmp_path / "out"
    no_base: Any = None
    start, draws = AdapterStart(no_base, SEED), torch.Generator().manual_seed(1)

    def frozen(name: str) -> bool:
        return any(re.search(one, name) for one in FREEZE)

    def ends(name: str, part: Part) -> torch.Tensor:
        if frozen(name):
            return start.read(name, part)
        return torch.randn(part.shape, generator=draws)

    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"]}
    adapter = {k: v.detach() for k, v in peft_adapter(ends, **lora)(net).items()}
    moved = {name: value for name, value in adapter.items() if not frozen(name)}
    assert len(adapter) == 8 and len(moved) == 2
    block = {"rank": RANK, "alpha": ALPHA, "target_modules": lora["target_modules"]}
    write_checkpoint(out, base, moved, adapter=block, freeze=FREEZE)
    before = load_file(base / "model.safetensors")
    merged = dict(before)
    for name in before:
        owner = name.removesuffix(".weight")
        if f"{owner}.lora_A.weight" in adapter:
            a, b = (adapter[f"{owner}.lora_{side}.weight"] for side in "AB")
            merged[name] = before[name] + ALPHA / RANK * b @ a
    return Trained(out, base, adapter, merged)


def is_as_trained(run: Trained, base: Path) -> None:
    """adapter/ holds all of the adapter, hf/ the merged model, and peft makes that of the two."""
    held = load_file(run.out / "adapter/adapter_model.safetensors")
    want = {f"base_model.model.{name}": value for name, value in run.adapter.items()}
    assert held.keys() == want.keys()
    assert all(torch.equal(held[name], value) for name, value in want.items())
    made = load_file(run.out / "hf/model.safetensors")
    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = PeftModel.from_pretrained(net, str(run.out / "adapter")).merge_and_unload()
    assert made.keys() == run.merged.keys() <= peft.state_dict().keys()
    for name, value in run.merged.items():
        torch.testing.assert_close(made[name], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(peft.state_dict()[name], value, rtol=0, atol=1e-6)
    config = json.loads((run.out / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)


def test_what_is_frozen_of_an_adapter_is_exported(trained: Trained) -> None:
    assert main(["export", str(trained.out)]) == 0
    is_as_trained(trained, trained.base)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What export says in one line about `base`."""
    capsys.readouterr()
    assert main(["export", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("command line: base: ") and said.count("\n") == 1, said
    assert "hf download" not in said and "model.name_or_path" not in said, said
    return said


def test_a_base_model_that_has_moved(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    run, moved = trained, trained.base.with_name("moved")
    trained.base.rename(moved)
    other = make_model(run.base.with_name("other"), "llama", heads=4, kv_heads=4)
    said = refused(capsys, str(run.out))
    assert f"the folder `{run.base}` does not exist" in said and "write base=FOLDER" in said
    assert "the folder `/nowhere` does not" in refused(capsys, str(run.out), "base=/nowhere")
    assert "`./nowhere` does not" in refused(capsys, str(run.out), "base=./nowhere")
    said = refused(capsys, str(run.out), f"base={other}")
    assert f"`{other}` is not the model that was trained on" in said
    (other / "model.safetensors").unlink()
    said = refused(capsys, str(run.out), f"base={other}")
    assert f"{other} holds no model.safetensors; name that model's folder" in said
    assert "is given twice" in refused(capsys, str(run.out), f"base={moved}", f"base={moved}")
    assert not (run.out / "hf").exists() and not (run.out / "adapter").exists()
    assert main(["export", str(run.out), f"base={moved}"]) == 0
    is_as_trained(run, moved)


def test_a_checkpoint_of_the_whole_model_needs_no_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = make_model(tmp_path / "base", "llama"), tmp_path / "out"
    write_checkpoint(out, base, load_file(base / "model.safetensors"))
    said = refused(capsys, str(out), f"base={base}")
    assert "holds the whole model" in said and "leave it out" in said
    assert not (out / "hf").exists()
    assert main(["export", str(out)]) == 0
    assert not (out / "adapter").exists()
    made, want = (load_file(at / "model.safetensors") for at in (out / "hf", base))
    assert made.keys() == want.keys()
    assert all(torch.equal(made[name], value) for name, value in want.items())


def test_the_best_checkpoint_where_a_run_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = make_model(tmp_path / "base", "llama"), tmp_path / "out"
    held = load_file(base / "model.safetensors")
    for step in (1, 2, 3):
        write_checkpoint(out, base, {name: value + step for name, value in held.items()}, step)
    losses = [{"step": step, "eval_loss": loss} for step, loss in ((1, 3.0), (2, 2.5), (3, 2.75))]
    later = {"step": 4, "eval_loss": 1.0}  # of a run that was killed before it saved
    lines = [json.dumps(record) + "\n" for record in [*losses, later]]
    (out / "metrics.jsonl").write_text("".join(lines))

    def taken(target: Path, to: str, keep_best: bool) -> int:
        checkpoint = {"every_steps": 1, "keep_best": keep_best}
        tree = small_recipe(base, tmp_path / "train.jsonl", 16, checkpoint=checkpoint)
        tree["data"]["eval"] = str(tmp_path / "eval.jsonl")
        tree["training"]["eval_every_steps"] = 1
        write_recipe(tree, tmp_path).rename(out / "recipe.yaml")
        assert main(["export", str(target), f"to={tmp_path / to}"]) == 0
        made = load_file(tmp_path / to / "model.safetensors")
        name = next(iter(held))
        found = [n for n in (1, 2, 3) if torch.equal(made[name], held[name] + n)]
        return found[0]

    assert taken(out, "newest", keep_best=False) == 3
    assert "the best" not in capsys.readouterr().out
    assert taken(out, "best", keep_best=True) == 2
    newest = out / "checkpoints/step-00000003"
    said = capsys.readouterr().out
    assert "step 2 is the best, with an eval loss of 2.5, since checkpoint.keep_best is set" in said
    assert f"step 3, the newest: export {newest}" in said
    assert taken(newest, "named", keep_best=True) == 3
    shutil.rmtree(out / "checkpoints/step-00000002")
    assert main(["export", str(out), f"to={tmp_path / 'gone'}"]) == 2
    said = capsys.readouterr().err
    assert "step-00000002 is not a complete checkpoint" in said and said.count("\n") == 1


def test_corrections_are_read_with_the_weights_also_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not train: they come from the base model, whose folder is opened once."""
    base = make_model(tmp_path / "base", "glm4_moe", heads=4, kv_heads=2)
    files = load_file(base / "model.safetensors")
    block, opened, init = ModelBlock(name_or_path=str(base)), list[Path](), FolderWeights.__init__

    def counted(own: FolderWeights, place: Path) -> None:
        opened.append(place)
        init(own, place)

    monkeypatch.setattr(FolderWeights, "__init__", counted)
    shapes = shapes_of(places(empty_model(model_config(block, 64), torch.float32)))
    trained = {name: torch.ones(shape) for name, shape in shapes.items()}
    write_checkpoint(tmp_path / "out", base, trained)
    holders = Holders.of(Shards(Layout()), 0, Groups(), shapes)
    for checkpoint in (None, Checkpoint.known(tmp_path / "out/checkpoints/step-00000001")):
        model = empty_model(model_config(block, 64), torch.float32)
        source = weights_of(block, SEED, model, checkpoint)
        fill(model, places(model), torch.float32, source, holders)
        found = corrections(model)
        assert found and all(torch.equal(one, files[name]) for name, one in found.items())
        assert all(one.any() for one in found.values())
    assert opened == [base, base]
