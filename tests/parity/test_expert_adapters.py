"""LoRA on experts and on routers beside plain peft, which forms each matrix, in one process.

Experts over ranks, in parts over tensor ranks, and both; the saved folder loads in peft, and what
it merges is the export.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from tests.support.experts import Case, Controls, different, make_setting, run, unseen
from tests.support.models import Documents
from tests.support.ranks import spawn

CASES = [
    Case("mixtral", 1, "zero1", beside=("lora on all", "exported")),
    Case("qwen3_moe", 2, "zero3 whole", "ring_cp", 2, beside=("lora", "again")),
    Case("gpt_oss", 1, "zero2", tensor=2, beside=("lora on all", "exported")),
    Case("qwen3_moe", 2, "zero3 whole", tensor=2, tokens=True, beside=("lora on all", "exported")),
    Case("gpt_oss", 4, "zero1", beside=("lora", "tiles", "again")),
    Case("mixtral", 2, "zero2", tensor=2, beside=("lora", "tiles")),
    Case("mixtral", 1, "zero3 whole", rows=5, beside=("lora", "tensors")),
]


def work(rank: int, folder: Path, data: Documents) -> list[Any]:
    return [run(case, folder, data, str(number)) for number, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    return make_setting(tmp_path_factory.mktemp("experts"))


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.timeout(600)
def test_adapters_of_experts_train_as_peft_does(setting: tuple[Path, Documents]) -> None:
    from peft import PeftModel

    answers = spawn(4, work, *setting)[0]
    wrong = {case: different(case, got, setting) for case, got in zip(CASES, answers, strict=True)}
    assert {case: found for case, found in wrong.items() if found} == {}
    exported = [number for number, case in enumerate(CASES) if "exported" in case.beside]
    assert len(exported) == 3
    for number in exported:
        output = setting[0] / "runs" / str(number)
        adapted = PeftModel.from_pretrained(
            load(setting[0] / CASES[number].model), output / "adapter"
        )
        plain = {
            name.replace("base_model.model.", "").replace(".default", ""): value
            for name, value in adapted.named_parameters()
            if ".lora_" in name
        }
        end = {name: value for name, value in answers[number][1].items() if ".lora_" in name}
        assert len(plain) == len(end) and any("base_layer" in name for name in plain)
        for name, value in plain.items():
            name = name.replace("experts.lora", "experts.down_proj.lora")
            name = name.replace("experts.base_layer.lora", "experts.gate_up_proj.lora")
            assert torch.equal(value, end[name]), name
        merged = dict(adapted.merge_and_unload().named_parameters())
        ours = dict(load(output / "hf").named_parameters())
        assert merged.keys() == ours.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, merged[name], rtol=0, atol=1e-7)


CONTROLS: Controls = {
    "scale left out": (Case("mixtral", 2, "zero1", beside=("lora",)), 0.33),
    "A not summed over tensor ranks": (
        Case("mixtral", 1, "zero1", tensor=2, beside=("lora",)),
        1.0,
    ),
    "norm of parts not summed": (
        Case("qwen3_moe", 2, "zero3 whole", tensor=2, beside=("lora",)),
        0.077,
    ),
}


@contextmanager
def left_out(what: str) -> Iterator[None]:
    """Something is left out of what makes adapters of experts right."""
    from uspft.engine import zero
    from uspft.model import adapter
    from uspft.parameters import counting

    plain, made = counting.summed_over, adapter.ParameterAdapter.__init__

    def not_a(holders: Any, name: str) -> Any:
        return None if "gate_up_proj.lora_A" in name else plain(holders, name)

    def unscaled(self: Any, parameter: Any, rank: int, scale: float, **how: Any) -> None:
        made(self, parameter, rank, 1.0, **how)

    patches = {
        "scale left out": (adapter.ParameterAdapter, "__init__", unscaled),
        "A not summed over tensor ranks": (counting, "summed_over", not_a),
        "norm of parts not summed": (zero, "sum_norm_once", lambda *_: None),
    }
    with patch.object(*patches[what]):
        yield


@pytest.mark.timeout(300)
def test_what_is_left_out_is_seen(setting: tuple[Path, Documents]) -> None:
    assert unseen(setting, CONTROLS, left_out) == {}
