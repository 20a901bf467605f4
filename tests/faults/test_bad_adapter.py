"""Adapters and frozen parameters that a model does not have; a base model that has changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from tests.support.refused import Ground

TARGETS, FREEZE = "model.adapter.target_modules", "model.freeze"
PARAMETERS = "model.adapter.target_parameters"
WRONG: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "misspelt key": (
        {"adapter": {"type": "lora", "rnak": 3}},
        "model.adapter.rnak",
        ("unknown key `rnak`; did you mean `rank`?",),
    ),
    "peft's key": (
        {"adapter": {"type": "lora", "r": 3}},
        "model.adapter.r",
        ("here it is `model.adapter.rank`",),
    ),
    "misspelt module": (
        {"adapter": {"type": "lora", "target_modules": ["q_proj", "vproj"]}},
        f"{TARGETS}[1]",
        ("no projection `vproj`", "did you mean `v_proj`?"),
    ),
    "part of a name": (
        {"adapter": {"type": "lora", "target_modules": ["proj"]}},
        f"{TARGETS}[0]",
        ("no projection `proj`",),
    ),
    "head": (
        {"adapter": {"type": "lora", "target_modules": ["lm_head"]}},
        f"{TARGETS}[0]",
        ("embeddings and the head is not available yet", "q_proj"),
    ),
    "all": (
        {"adapter": {"type": "lora", "target_modules": ["all-linear"]}},
        f"{TARGETS}[0]",
        ("leave target_modules out",),
    ),
    "none": (
        {"adapter": {"type": "lora", "target_modules": []}},
        TARGETS,
        ("nothing would train",),
    ),
    "expression": ({"freeze": ["("]}, f"{FREEZE}[0]", ("no regular expression",)),
    "nothing found": (
        {"freeze": ["embed", "wte"]},
        f"{FREEZE}[1]",
        ("`wte` is found in no name", "model.embed_tokens.weight"),
    ),
    "a name of the whole model": (
        {"freeze": [r"language_model\.layers\.0"]},
        f"{FREEZE}[0]",
        ("of a multimodal checkpoint is model.layers.0.", "names of the language model"),
    ),
    "tied head": (
        {"freeze": ["lm_head"], "overrides": {"tie_word_embeddings": True}},
        f"{FREEZE}[0]",
        ("lm_head.weight alone, which is model.embed_tokens.weight (tied", "write embed_tokens,"),
    ),
    "everything": ({"freeze": ["."]}, FREEZE, ("leaves nothing to train",)),
    "frozen twice": (
        {"adapter": {"type": "lora"}, "freeze": ["embed_tokens"]},
        f"{FREEZE}[0]",
        ("`embed_tokens` is found in no name of a parameter that would train", "lora_A"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_model_does_not_have(
    ground: Ground, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    block, key, words = WRONG[case]
    ground.write({f"model.{name}": value for name, value in block.items()})
    for verb in ("train", "check"):
        ground.call(capsys, verb, str(ground.path)).about(key, *words)


def test_a_hub_model_whose_config_is_known_is_looked_at(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it is here but configs/models/; of another hub model not even that."""
    from uspft.__main__ import main

    hub = {"model.name_or_path": "Qwen/Qwen2.5-0.5B"}
    for block, key, words in (
        WRONG["misspelt module"],
        WRONG["nothing found"],
        ({"overrides": {"hiden_size": 3}}, "model.overrides.hiden_size", ("no such field",)),
    ):
        ground.write(hub | {f"model.{name}": value for name, value in block.items()})
        ground.call(capsys, "check", str(ground.path)).about(key, *words)
    lora = {"model.adapter": {"type": "lora", "rank": 129, "target_modules": ["q_proj", "v_proj"]}}
    ground.write(hub | lora | {"model.freeze": [r"layers\.([0-9]|1\d)\."]})  # of 24 layers 20
    assert main(["check", str(ground.path)]) == 0
    said = capsys.readouterr().out
    trained = 4 * 129 * (896 + 896 + 896 + 128)
    frozen = 494_032_768 + 5 * trained
    assert f"trains: {trained:,} parameters, besides {frozen:,} frozen ones" in said
    assert "; the rank is more than the smaller side of v_proj, where" in said
    assert "not checked: the names" not in said
    ground.write({"model.name_or_path": "some/model", "model.freeze": ["nothing"], **lora})
    assert main(["check", str(ground.path)]) == 0
    said = capsys.readouterr().out
    assert "not checked: the names in model.adapter, model.freeze" in said and "trains:" not in said


def test_experts_are_adapted_as_parameters_and_the_rest_as_projections(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    from uspft.__main__ import main

    config = transformers.Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],  # whose dense projections have the experts' names
    )
    config.save_pretrained(ground.folder / "moe")
    moe = {"model.name_or_path": None, "model.config": str(ground.folder / "moe")}
    wrong = {"type": "lora", "target_modules": ["q_proj", "gate_proj"]}
    ground.write({**moe, "model.adapter": wrong})
    found = ground.call(capsys, "check", str(ground.path))
    found.about(f"{TARGETS}[1]", "`gate_proj` names experts", "k_proj, o_proj, q_proj, v_proj")
    ground.write({**moe, "model.adapter": {"type": "lora", "target_modules": ["experts"]}})
    found = ground.call(capsys, "check", str(ground.path))
    found.about(
        f"{TARGETS}[0]", "`experts` names experts", "write model.adapter.target_parameters: ["
    )
    granite = transformers.GraniteMoeConfig(
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    )
    granite.save_pretrained(ground.folder / "granite")
    other = {**moe, "model.config": str(ground.folder / "granite")}
    ground.write({**other, "model.adapter": {"type": "lora", "target_modules": ["down_proj"]}})
    block = "block_sparse_moe.experts"
    found = ground.call(capsys, "check", str(ground.path))
    found.about(f"{TARGETS}[0]", f"write {PARAMETERS}: [{block}.gate_up_proj, {block}.down_proj],")
    named = ["mlp.experts.gate_up_proj", "mlp.experts.down_pro", "q_proj.weight"]
    ground.write({**moe, "model.adapter": {"type": "lora", "target_parameters": named}})
    found = ground.call(capsys, "check", str(ground.path))
    found.about(
        f"{PARAMETERS}[1]", "no matrices of experts", "did you mean `mlp.experts.down_proj`?"
    )
    found.about(f"{PARAMETERS}[2]", "no matrices of experts or routers `q_proj.weight`")
    dropped = {"type": "lora", "dropout": 0.1, "target_parameters": named[:1]}
    ground.write({**moe, "model.adapter": dropped})
    found = ground.call(capsys, "check", str(ground.path))
    found.about("model.adapter.dropout", "have no dropout in peft", "write 0.0")
    alone = {"type": "lora", "rank": 2, "target_modules": []}
    alone["target_parameters"] = [named[0], "mlp.gate_proj.weight"]
    ground.write({**moe, "model.adapter": alone})
    assert main(["check", str(ground.path)]) == 0
    said = capsys.readouterr().out
    assert f"trains: {2 * 4 * (32 + 32) + 2 * (32 + 32):,} parameters" in said
    assert "on gate_proj, gate_up_proj)" in said
    ground.write({**moe, "model.adapter": {"type": "lora", "rank": 2}})
    assert main(["check", str(ground.path)]) == 0
    said = capsys.readouterr().out
    assert "(LoRA of rank 2 on k_proj, o_proj, q_proj, v_proj)" in said


def test_a_base_model_that_has_changed(tmp_path: Path, good: tuple[Path, Path]) -> None:
    """Its config, or one tensor, under the same name."""
    from uspft.checkpoint.identity import BASE, differences
    from uspft.config.inputs import ModelBlock
    from uspft.parameters.source import base_digest

    model = tmp_path / "model"
    shutil.copytree(good[0], model)
    block = ModelBlock(name_or_path=str(model))
    before = base_digest(block)
    for file in ("config.json", "model.safetensors"):
        kept = (model / file).read_bytes()
        if file == "config.json":
            (model / file).write_text(kept.decode().replace("10000.0", "20000.0"))
        else:
            tensors = load_file(model / file)
            name = sorted(tensors)[-1]
            save_file({**tensors, name: tensors[name] + 0.01}, model / file, {"format": "pt"})
        after = base_digest(block)
        assert after != before, file
        (model / file).write_bytes(kept)
        assert base_digest(block) == before
    ((key, what, remedy),) = differences({BASE: before}, {BASE: after})
    assert key == "model.name_or_path" and "another model" in what
    assert "output_dir" not in remedy  # another folder may resume from the same checkpoint
    assert differences({BASE: before}, {BASE: before}) == []
