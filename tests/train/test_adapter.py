"""A LoRA run of the command: its numbers, its adapter for peft, its merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.adapters import peft_adapter
from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import records
from tests.support.models import Documents, Reference, make_documents, make_model, reference
from tests.support.runs import small_recipe
from uspft.__main__ import main
from uspft.model.adapter import AdapterStart
from uspft.tensor.parts import Part

STEPS, SEED = 3, 5
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}
FROZEN = r"layers\.0\..*lora_A"
RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
ULYSSES = {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def from_seed(name: str, part: Part) -> torch.Tensor:
    """What a weight of the adapter starts from."""
    no_base: Any = None
    return AdapterStart(no_base, SEED).read(name, part)


def test_an_adapter_from_recipe_to_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps under one layout, the third under another; then what the run has left."""
    model, out = make_model(tmp_path / "model", "qwen2", heads=4, kv_heads=2), tmp_path / "out"
    data = make_documents(tmp_path / "d.jsonl", [48, 40, 33], masked=[0.0, 0.5])
    trains_under_two_layouts(model, data, tmp_path)
    want = reference(
        model,
        [[document] for document in data.documents],
        rate=1e-3,
        clip=0.005,
        prepare=peft_adapter(
            from_seed,
            frozen=FROZEN,
            r=LORA["rank"],
            lora_alpha=LORA["alpha"],
            target_modules=LORA["target_modules"],
        ),
    )
    is_as_in_one_process(want, tmp_path)
    state = json.loads((out / "checkpoints/step-00000003/state.json").read_text())
    assert len(state["files"]) == 3 * len(want.end)  # weight and two moments; nothing of the base
    is_as_peft_has_it(model, out, tmp_path / "again")
    capsys.readouterr()
    assert main(["export", str(out), f"to={tmp_path}/merged"]) == 0
    for folder in (out / "hf", tmp_path / "merged"):
        merged = weights(folder)
        assert merged.keys() == weights(out / "hf").keys()
        assert all(torch.equal(merged[name], value) for name, value in weights(out / "hf").items())


def trains_under_two_layouts(model: Path, data: Documents, folder: Path) -> None:
    """Both runs end well, say what they train and where it went, and the second goes on."""
    recipe = {"seed": SEED} | small_recipe(
        model,
        data.path,
        48,
        model={"adapter": {"type": "lora", **LORA}, "freeze": [FROZEN]},
        parallel_config=RING,
        deepspeed={"zero_optimization": {"stage": 3}},
        training={"steps": 2, "max_grad_norm": 0.005},
        checkpoint={"every_steps": 1, "keep_last": 1},
        export={"huggingface": True},
    )
    process = Forked.start(recipe, folder)
    said, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, err
    assert "trains: 1,664 parameters, besides " in said and "on down_proj, q_proj)" in said
    assert f"adapter:    {folder}/out/adapter  (PeftModel.from_pretrained loads it)" in said
    recipe |= {"parallel_config": ULYSSES, "deepspeed": {"zero_optimization": {"stage": 1}}}
    process = Forked.start(recipe, folder, f"training.steps={STEPS}")
    said, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0 and "going on from" in said, err


def is_as_in_one_process(want: Reference, folder: Path) -> None:
    """Losses, norms and the adapter are those of plain peft; what is frozen stays as it began."""
    got = [record for record in records(folder) if "loss" in record]
    assert [r["loss"] for r in got] == pytest.approx(want.losses, rel=1e-5)
    assert [r["grad_norm"] for r in got] == pytest.approx(want.grad_norms, rel=1e-4)
    adapter = load_file(folder / "out/adapter/adapter_model.safetensors")
    for name, value in want.end.items():
        moved = (value - want.start[name]).norm()
        assert (adapter[f"base_model.model.{name}"] - value).norm() <= 2e-3 * moved > 0, name
    stays = {name for name in adapter if name.removeprefix("base_model.model.") not in want.end}
    assert len(adapter) == 8 and len(stays) == 2
    for name in stays:
        begun = from_seed(name.removeprefix("base_model.model."), Part.whole(adapter[name].shape))
        assert torch.equal(adapter[name], begun), name


def is_as_peft_has_it(model: Path, out: Path, again: Path) -> None:
    """peft loads the adapter, would save it likewise, and merges it to what hf/ holds."""
    ids = torch.arange(3, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        before = base(ids).logits
        peft = PeftModel.from_pretrained(base, str(out / "adapter"))
        adapted = peft(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-5, atol=1e-5)
    assert (adapted - before).abs().max() > 1e-3
    peft.save_pretrained(str(again))
    configs = [
        json.loads((at / "adapter_config.json").read_text()) for at in (again, out / "adapter")
    ]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]
    assert configs[1]["base_model_name_or_path"] == str(model)
    ours, theirs = (load_file(at / "adapter_model.safetensors") for at in (out / "adapter", again))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    held = weights(out / "hf")
    for name, value in peft.merge_and_unload().state_dict().items():
        if name in held:
            torch.testing.assert_close(held[name], value, rtol=0, atol=1e-7)
