"""The language model of a multimodal checkpoint, trained on two ranks under several layouts: beside
transformers' class of the whole model in one process, and every tensor and file of the export
beside those of the checkpoint. One spawn, many engines inside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText

from tests.support.models import Documents, Reference, make_documents, mismatch, reference
from tests.support.multimodal import (
    CHECKPOINTS,
    PROCESSOR,
    UNREAD,
    changed,
    make_checkpoint,
    stored,
)
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from tests.support.stages import ZERO
from uspft.checkpoint.folder import Checkpoint, newest
from uspft.checkpoint.hf_folder import PREFIX, export_folder
from uspft.checkpoint.identity import BASE
from uspft.checkpoint.weights import whole_model
from uspft.config.inputs import ModelBlock
from uspft.families.multimodal import MULTIMODAL, module_name, own_name
from uspft.parameters.experts import UNTRAINED
from uspft.parameters.source import base_digest

ROW, STEPS, RATE, CLIP, EPS = 48, 2, 1e-3, 0.5, 1e-6
LENGTHS = [31, 17, 20, 28]
LORA = {"type": "lora", "rank": 2, "alpha": 4.0}


class Case(NamedTuple):
    """A run of two steps."""

    kind: str
    zero: str
    parallel: dict[str, Any]
    model: dict[str, Any]

    @property
    def name(self) -> str:
        return "-".join([self.kind, *self.zero.split(), *self.parallel, *self.model])


def context(algorithm: str) -> dict[str, Any]:
    return {"context_parallel": 2, "context_parallel_algo": algorithm}


CASES = [
    Case("qwen3_5", "zero1", context("planned_cp"), {}),
    Case("qwen3_5_moe", "zero3 whole", context("ring_cp"), {}),
    Case("qwen3_vl", "zero2", {"model_parallel": 2}, {}),
    Case("qwen3_5", "zero2", {"model_parallel": 2, "use_seq_parallel": True}, {}),
    Case("qwen3_5_moe", "zero1", {"model_parallel": 2}, {}),
    Case("gemma3", "zero1", {"pipeline_stage": 2}, {}),
    Case("gemma4", "zero3 whole", context("ulysses_cp"), {}),
    Case("gemma4", "zero2", {"model_parallel": 2, "use_seq_parallel": True}, {}),
    Case("gemma4", "zero1", context("ring_cp"), {"freeze": [r"layers\.0\.", "embed_tokens"]}),
    Case("mistral3", "zero3 whole", context("ulysses_cp"), {}),
    Case("gemma3", "zero3 whole", {}, {"adapter": LORA}),
    Case("gemma4", "zero2", {"model_parallel": 2}, {"adapter": LORA}),
    Case("mistral3", "zero1", {}, {"freeze": [r"layers\.0\.", "embed_tokens"]}),
]


BESIDE_ONE = [case for case in CASES if "adapter" not in case.model]
"""What has no adapter: one that has is beside peft in test_adapter.py, and in test_verify.py."""


def work(rank: int, folder: Path, data: Documents) -> list[Any]:
    found = []
    for case in CASES:
        recipe = small_recipe(
            folder / case.kind,
            data.path,
            ROW,
            model=case.model,
            data={"packing": "best_fit"},
            parallel_config=case.parallel,
            deepspeed={"zero_optimization": ZERO[case.zero]},
            optimizer={"eps": EPS},
            training={
                "steps": STEPS,
                "global_batch_size": 2,
                "micro_batch_size": 1,
                "max_grad_norm": CLIP,
            },
            checkpoint={"every_steps": STEPS},
            export={"huggingface": True},
        )
        found.append(run_recipe(recipe, folder / "runs" / case.name))
    return found


class Setting(NamedTuple):
    """The checkpoints and runs of the cases, what their records are, and the rows of a step."""

    folder: Path
    answers: dict[str, Any]
    data: Documents


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("multimodal")
    for kind in CHECKPOINTS:
        make_checkpoint(folder / kind, kind, initializer_range=0.1)
    data = make_documents(folder / "data.jsonl", LENGTHS, masked=[0.0, 0.5])
    answers = spawn(2, work, folder, data)[0]
    named = {case.name: found for case, found in zip(CASES, answers, strict=True)}
    return Setting(folder, named, data)


def one_process(setting: Setting, case: Case) -> Reference:
    """What transformers' class of the whole model does with the same documents."""

    def trained(net: Any) -> dict[str, torch.nn.Parameter]:
        named = {own_name(name): value for name, value in net.named_parameters()}
        frozen = [name for name in named if name and ("layers.0." in name or "embed" in name)]
        for name in frozen if "freeze" in case.model else ():
            named[name].requires_grad_(False)
        return {name: value for name, value in named.items() if name and value.requires_grad}

    return reference(
        setting.folder / case.kind,
        [setting.data.documents] * STEPS,
        rate=RATE,
        clip=CLIP,
        eps=EPS,
        prepare=trained,
        loads=AutoModelForImageTextToText,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*BESIDE_ONE], ids=lambda case: case.name)
def test_it_trains_as_the_whole_model_in_one_process(case: Case, setting: Setting) -> None:
    records, end = setting.answers[case.name]
    want = one_process(setting, case)
    assert len(want.end) > 10
    held = {name: value for name, value in end.items() if name in want.end}
    assert mismatch((records, held), want) == []
    off = mismatch((records, held), _moved(want))
    assert len(off) >= 1, "a reference that is another would not show"


def _moved(want: Reference) -> Reference:
    """A reference with one tensor that is off."""
    name = next(iter(want.end))
    return replace(want, end=want.end | {name: want.end[name] + 0.1})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_export_differs_in_what_was_trained_alone(case: Case, setting: Setting) -> None:
    base, output = setting.folder / case.kind, setting.folder / "runs" / case.name
    _, end = setting.answers[case.name]
    hf = output / "hf"
    before, after = stored(base), stored(hf)
    assert before.keys() == after.keys() > UNREAD.keys()
    trained = {name for name in before if (own := own_name(name)) and moves(case, own)}
    assert changed(base, hf) == trained and len(trained) > 5
    assert len(before.keys() - trained) > 10
    if "adapter" not in case.model:
        held = {own: after[name] for name in after if (own := own_name(name)) in end}
        assert all(torch.equal(value, end[name]) for name, value in held.items() if name)
        assert len(held) > 10 or "moe" in case.kind
    assert (hf / "config.json").read_bytes() == (base / "config.json").read_bytes()
    for name, content in PROCESSOR.items():
        assert (hf / name).read_bytes() == content
    back, checkpoint = output / "back", saved(case, setting)
    whole = whole_model(checkpoint)
    export_folder(whole.merged(), whole.dtype, checkpoint.model, back, whole.base)
    assert changed(hf, back) == set()
    assert (back / "config.json").read_bytes() == (base / "config.json").read_bytes()


def saved(case: Case, setting: Setting) -> Checkpoint:
    """The checkpoint of a case's run, with what a resumed run must agree with."""
    found = newest(setting.folder / "runs" / case.name).checkpoint
    assert found
    block = {"name_or_path": str(setting.folder / case.kind), "dtype": "float32", **case.model}
    identity = {f"model.{key}": value for key, value in block.items()}
    identity |= {"seed": 0, BASE: base_digest(ModelBlock.model_validate(block))}
    return Checkpoint(found.folder, found.state | {"identity": identity})


def moves(case: Case, own: str) -> bool:
    """Whether a tensor of the language model is one that a case trains."""
    if "adapter" in case.model:
        added = "layer_input_gate", "layer_projection.", "layer_model_projection"
        return any(one in own for one in ("_proj.", *added))
    if own.endswith(UNTRAINED):
        return False
    return "freeze" not in case.model or not ("layers.0." in own or "embed_tokens" in own)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_export_loads_with_the_class_that_its_config_names(
    case: Case, setting: Setting
) -> None:
    hf = setting.folder / "runs" / case.name / "hf"
    config = transformers.AutoConfig.from_pretrained(hf)
    (name,) = config.architectures
    model, info = getattr(transformers, name).from_pretrained(hf, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert {key.partition(".")[0] for key in info["unexpected_keys"]} <= {"mtp"}
    _, end = setting.answers[case.name]
    if "adapter" not in case.model:
        theirs = {own_name(key): value for key, value in model.named_parameters()}
        assert all(torch.equal(theirs[key], value) for key, value in end.items())


def test_peft_loads_the_adapter_on_the_whole_model(setting: Setting) -> None:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    case = next(case for case in CASES if "adapter" in case.model)
    output = setting.folder / "runs" / case.name
    base = AutoModelForImageTextToText.from_pretrained(setting.folder / case.kind)
    model = PeftModel.from_pretrained(base, str(output / "adapter"))
    held = stored(output / "adapter")
    inside = PREFIX + module_name("model.layers.")
    assert all(name.startswith(inside) for name in held) and len(held) == 2 * 7 * 2
    own = {name.replace(".default", ""): value for name, value in model.named_parameters()}
    assert all(torch.equal(own[name], value) for name, value in held.items())
    adapted = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    assert len(adapted) == 14 and all("language_model" in name for name in adapted)
    ids = torch.arange(3, 30)[None]
    merged = AutoModelForImageTextToText.from_pretrained(output / "hf")
    with torch.no_grad():
        got, want = (net(input_ids=ids).logits for net in (model, merged))
        with model.disable_adapter():
            bare = model(input_ids=ids).logits
    assert torch.allclose(got, want, atol=1e-4)
    assert not torch.allclose(got, bare, atol=1e-3)


def test_transformers_alone_loses_what_it_does_not_read(setting: Setting, tmp_path: Path) -> None:
    base = setting.folder / "qwen3_5"
    AutoModelForImageTextToText.from_pretrained(base).save_pretrained(tmp_path)
    assert changed(base, tmp_path) == UNREAD.keys()


def test_every_kind_is_here() -> None:
    assert CHECKPOINTS.keys() == MULTIMODAL.keys() == {case.kind for case in CASES}
    assert len(MULTIMODAL) == 6
