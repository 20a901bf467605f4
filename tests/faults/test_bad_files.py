"""Wrong model folders, checkpoints to go on from, tokenised data and exports: exit 2, no rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.refused import Ground

Tensors = dict[str, torch.Tensor]
GATE, DOWN = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "down"))


def folder_with(ground: Ground, change: Callable[[Tensors], object]) -> Path:
    """The good model, its tensors changed, as the recipe's model."""
    folder = ground.folder.parent / "model"
    shutil.copytree(ground.recipe["model"]["name_or_path"], folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ground.write({"model.name_or_path": str(folder)})
    return folder


def put(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


WEIGHTS: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "missing": (lambda t: t.pop(GATE), (f"lacks parameters of the model: {GATE}; save",)),
    "two missing": (lambda t: (t.pop(GATE), t.pop(DOWN)), ("_proj.weight, and 1 more; ",)),
    "mis-shaped": (put(DOWN, 64, 95), (f"{DOWN} (64, 95), config (64, 96); ",)),
    "left out": (
        put("model.norm.bias", 64),
        ("parameters that its config.json leaves out: model.norm.bias; ",),
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_of_another_model(
    ground: Ground, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    change, words = WEIGHTS[case]
    folder = folder_with(ground, change)
    for verb in ("train", "check"):
        found = ground.call(capsys, verb, str(ground.path))
        found.about("model.name_or_path", str(folder), *words)


def test_weights_that_are_no_parameters_are_let_be(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    from uspft.__main__ import main

    def change(tensors: Tensors) -> None:
        put("model.layers.0.self_attn.rotary_emb.inv_freq", 8)(tensors)  # as LLaMA 1 was saved
        put("model.layers.2.mlp.down_proj.weight", 64, 96)(tensors)  # model.overrides can shorten

    folder_with(ground, change)
    assert main(["check", str(ground.path)]) == 0


def test_a_model_folder_that_cannot_be_read(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(ground, lambda tensors: None)
    key, file = "model.name_or_path", folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    ground.call(capsys).about(key, f"{file} cannot be read", "copy or download it again")
    file.rename(folder / "pytorch_model.bin")
    ground.call(capsys).about(key, f"{folder} holds no model.safetensors", "save_pretrained")
    index = folder / "model.safetensors.index.json"
    index.write_text("{")
    ground.call(capsys).about(key, f"{index} cannot be read")
    index.write_text(json.dumps({"weight_map": {GATE: "model-00001-of-00002.safetensors"}}))
    ground.call(capsys).about(key, f"{folder}/model-00001-of-00002.safetensors cannot be read")


def test_a_config_that_will_not_do(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    key, file = "model.name_or_path", folder_with(ground, lambda tensors: None) / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "model_type": "mamba"}))
    ground.call(capsys).about(key, "mamba", "llama, qwen2, qwen3")
    file.write_text(json.dumps({**config, "hidden_act": "silo"}))
    ground.call(capsys).about(key, "silo", "mend its config.json")
    file.write_text(json.dumps({**config, "rms_norm_eps": "small"}))
    ground.call(capsys).about(key, "rms_norm_eps", "mend its config.json")
    file.write_text("{")
    ground.call(capsys).about(key, "config.json:1: is not JSON")


OVERRIDES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "rms_norm_epsilon": (1e-6, ("LlamaConfig has no such field", "did you mean `rms_norm_eps`?")),
    "to_dict": (1, ("LlamaConfig has no such field",)),
    "rms_norm_eps": ("small", ("cannot be `small`",)),
    "head_dim": (15, ("head_dim 15 is odd", "write an even number")),
    "torch_dtype": ("float32", ("leave it out: `model.dtype` rules it",)),
    "_attn_implementation": ("eager", ("LlamaConfig has no such field",)),
    "rope_scaling": ({"rope_type": "yarn"}, ("write model.rope_scaling: {rope_type: ",)),
    "rope_theta": (1e6, ("write model.rope_scaling: {rope_type: default, rope_theta: …}",)),
}


@pytest.mark.parametrize("field", OVERRIDES)
def test_a_wrong_override(ground: Ground, capsys: pytest.CaptureFixture[str], field: str) -> None:
    value, words = OVERRIDES[field]
    ground.write({f"model.overrides.{field}": value})
    for verb in ("train", "check"):
        ground.call(capsys, verb, str(ground.path)).about(f"model.overrides.{field}", *words)


def test_another_number_of_layers_is_no_fault(ground: Ground) -> None:
    from uspft.__main__ import main

    config = ground.path.parent / "config.json"
    shutil.copy(Path(ground.recipe["model"]["name_or_path"]) / "config.json", config)
    for layers in (1, 5):
        overrides = {"num_hidden_layers": layers}
        random = {"model.name_or_path": None, "model.config": str(config)}
        ground.write({**random, "model.overrides": overrides})
        assert main(["check", str(ground.path)]) == 0


def checkpoint_of(ground: Ground) -> Path:
    """A checkpoint of the recipe as it stands, as far as its identity goes."""
    from uspft.checkpoint.identity import BASE, CONTENTS, identity_of
    from uspft.data.corpus.corpus import Corpus
    from uspft.data.corpus.prepare import prepare
    from uspft.parameters.source import base_digest
    from uspft.prepare.examine import examine

    recipe = examine(ground.path, [], 1, None).recipe
    corpus = prepare(recipe.data, None, 97, ground.folder.parent / "cache/uspft/data")
    folder = ground.folder / "out/checkpoints/step-00000001"
    folder.mkdir(parents=True)
    contents = {CONTENTS: Corpus.open(corpus).contents, BASE: base_digest(recipe.model)}
    identity = {**identity_of(recipe), **contents}
    state = {"format": 1, "step": 1, "adam_steps": 1, "identity": identity, "files": {}}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def checkpoint(ground: Ground) -> Path:
    return checkpoint_of(ground)


def test_the_same_recipe_goes_on(
    ground: Ground, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    from uspft.__main__ import main

    layout = ["parallel_config.data_parallel=2", "launch.processes=2", "data.workers=1"]
    assert main([str(ground.path), *layout, "checkpoint.every_steps=7", "training.steps=9"]) == 1
    said = capsys.readouterr()
    assert ground.started
    assert said.err == f"saved step 1 in {checkpoint}; the same command goes on\n"
    assert f"going on from {checkpoint}" in said.out


CHANGED: dict[str, tuple[Any, str]] = {
    "seed": (43, "is 43, and the checkpoint was trained with 42; write that value, or"),
    "model.dtype": ("bfloat16", 'is "bfloat16", and the checkpoint was trained with "float32"'),
    "data.sequence_length": (48, "is 48, and the checkpoint was trained with 32"),
    "data.shuffle": (False, "is false, and the checkpoint was trained with true"),
    "training.global_batch_size": (4, "is 4, and the checkpoint was trained with 2"),
    "optimizer.learning_rate": (0.5, "is 0.5, and the checkpoint was trained with"),
    "optimizer.betas": ([0.8, 0.9], "is [0.8, 0.9], and the checkpoint was trained with ["),
}


@pytest.mark.parametrize("key", CHANGED)
def test_a_recipe_that_differs_from_the_checkpoints(
    ground: Ground, capsys: pytest.CaptureFixture[str], checkpoint: Path, key: str
) -> None:
    value, told = CHANGED[key]
    ground.write({key: value})
    found = ground.call(capsys)
    assert len(found.lines) == 1
    found.about(key, told, "checkpoint.resume=never")


def test_steps_of_samples_do_not_go_on_from_steps_of_rows(
    ground: Ground, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    ring = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
    both = [{"max_length": 16}, {"max_length": 32, **ring}]
    ground.write({"parallel_config": {"strategies": both}, "launch.processes": 2})
    told = (
        "counts samples, as with parallel_config.strategies, and in the checkpoint's run it counts"
    )
    ground.call(capsys).about("training.global_batch_size", told, "leave strategies out")


def test_data_whose_contents_differ_from_the_checkpoints(
    ground: Ground, capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    state = json.loads((checkpoint / "state.json").read_text())
    state["identity"]["data.train (contents)"] = "0123456789abcdef"
    (checkpoint / "state.json").write_text(json.dumps(state))
    found = ground.call(capsys)
    assert len(found.lines) == 1
    found.about("data.train", "other tokens than the checkpoint", "checkpoint.resume=never")


def test_losses_on_other_evaluation_data_choose_no_best(
    ground: Ground, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    from uspft.__main__ import main

    state = json.loads((checkpoint / "state.json").read_text())
    state["identity"]["data.eval (contents)"] = ["0123456789abcdef"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    evaluated = {"data.eval": ground.recipe["data"]["train"], "training.eval_every_steps": 1}
    ground.write(evaluated)
    assert main([str(ground.path)]) == 1 and ground.started, "no best is chosen"
    ground.started.clear()
    capsys.readouterr()
    for key, value in (("checkpoint.keep_best", True), ("training.patience", 2)):
        ground.write({**evaluated, key: value})
        found = ground.call(capsys)
        assert len(found.lines) == 1
        found.about("data.eval", "other tokens than earlier evaluations", "keep_best false")


def test_a_place_to_go_on_from_that_is_none(
    ground: Ground, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    key, state = "checkpoint.resume", checkpoint / "state.json"
    ground.write({key: "nowhere"})
    ground.call(capsys).about(key, "`nowhere` does not exist")
    (ground.folder / "empty").mkdir()
    ground.write({key: "empty"})
    for verb in ("train", "check"):
        found = ground.call(capsys, verb, str(ground.path))
        found.about(key, "empty holds no checkpoint", "step-00000500")
    whole = json.loads(state.read_text())
    for text, told in (
        (json.dumps({**whole, "format": 9}), "has format 9, expected 1"),
        (json.dumps({**whole, "files": {"weight/x": "part.safetensors"}}), "lacks part.safet"),
        (json.dumps({"format": 1, "step": 1}), "state.json has no adam_steps"),
        ("[]", "has format None"),
        ("{", "is not JSON"),
        ("", "is not JSON"),
    ):
        state.write_text(text)
        for place in (None, "out", "out/checkpoints", "out/checkpoints/step-00000001"):
            ground.write({key: place} if place else {})
            found = ground.call(capsys).about(key, "checkpoints/step-00000001", told)
            assert found.endswith("or write never to start anew")
        (line,) = ground.call(capsys, "export", "out", "to=new").lines
        assert told in line and "Traceback" not in line


def test_tokenised_data_that_an_earlier_run_left_damaged(
    ground: Ground, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    (corpus,) = (ground.folder.parent / "cache/uspft/data").iterdir()
    for name in sorted(path.name for path in corpus.iterdir()):
        whole = (corpus / name).read_bytes()
        for damage in (whole[: len(whole) // 2], None):
            (corpus / name).unlink()
            if damage is not None:
                (corpus / name).write_bytes(damage)
            (line,) = ground.call(capsys).lines
            assert line.startswith(f"{corpus}: the tokenised data in it is damaged ("), name
            assert line.endswith("); delete the folder, it is made again")
            (corpus / name).write_bytes(whole)


def test_an_export_never_replaces_what_it_did_not_write(
    ground: Ground, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    (ground.folder / "mine").mkdir()
    (ground.folder / "mine/thesis.tex").write_text("years of work")
    for to in ("mine", ".", "out", "mine/thesis.tex"):
        (line,) = ground.call(capsys, "export", "out", f"to={to}").lines
        assert line.endswith(" is there already; name a new folder"), line
    (line,) = ground.call(capsys, "export", "out", "to=new").lines
    assert line.startswith("command line: out: ") and "model holds no config.json; " in line
