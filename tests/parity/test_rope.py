"""Scaled rotary positions on two ranks against plain transformers in one process.

Dynamic NTK and LongRoPE have the frequencies that transformers' own functions give for
`data.sequence_length`, whatever a rank or a document holds. One spawn, many engines inside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.models import (
    Documents,
    make_documents,
    make_model,
    mismatch,
    reference,
)
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from uspft.config.inputs import ModelBlock
from uspft.model.hf_config import model_config
from uspft.verify.plain import pin_frequencies

ROW, ORIGINAL = 48, 32
LENGTHS = {"whole": [48], "padded": [41], "packed": [31, 17]}
"""Documents of the one row of each data set; the packed ones are shorter than ORIGINAL."""
THETA = {"rope_theta": 1e4}
PAIRS = {"short_factor": [1.0 + 0.1 * i for i in range(8)]}
PAIRS |= {"long_factor": [1.5 + 0.4 * i for i in range(8)]}
FROM = {"original_max_position_embeddings": ORIGINAL}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, **THETA}
PHI3: dict[str, Any] = {"rope_type": "longrope", "partial_rotary_factor": 0.5, **THETA}
PHI3 |= {key: pairs[:4] for key, pairs in PAIRS.items()}
BOTH = {"full_attention": DYNAMIC, "sliding_attention": {**DYNAMIC, "factor": 3.0}}


@dataclass(frozen=True)
class Case:
    """One run. own: the model's config; asked: model.rope_scaling; meant: what both come to."""

    kind: str
    algorithm: str
    data: str
    own: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] | None = None
    meant: dict[str, Any] | None = None

    @property
    def model(self) -> dict[str, Any]:
        return {"max_position_embeddings": ORIGINAL, **self.own}


def asked(rope_type: str, **keys: Any) -> dict[str, Any]:
    """model.rope_scaling without a factor, and what it means on rows of 1.5 times the positions."""
    scaling = {"rope_type": rope_type, **keys}
    rest = FROM if rope_type in ("yarn", "llama3", "longrope") else {}
    return {"asked": scaling, "meant": {**scaling, **rest, "factor": ROW / ORIGINAL}}


CASES = {
    "dynamic": Case("llama", "ring_cp", "whole", {"rope_parameters": DYNAMIC}),
    "dynamic, short documents": Case("llama", "hybrid_cp", "packed", {"rope_parameters": DYNAMIC}),
    "dynamic, short rows": Case(
        "llama", "planned_cp", "padded", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}
    ),
    "dynamic by kind of layer": Case("gemma3_text", "ring_cp", "packed", {"rope_parameters": BOTH}),
    "longrope": Case(
        "phi3",
        "planned_cp",
        "packed",
        {"rope_parameters": PHI3, "max_position_embeddings": 96, **FROM},
    ),
    "longrope, short rows": Case(
        "phi3",
        "ulysses_cp",
        "whole",
        {
            "rope_parameters": PHI3,
            "max_position_embeddings": 96,
            "original_max_position_embeddings": 64,
        },
    ),
    "asked: linear": Case("qwen3", "hybrid_cp", "padded", **asked("linear")),
    "asked: yarn": Case("qwen3", "allgather_cp", "packed", **asked("yarn")),
    "asked: dynamic": Case("qwen3", "ring_cp", "packed", **asked("dynamic")),
    "asked: longrope": Case("qwen3", "allgather_cp", "whole", **asked("longrope", **PAIRS)),
    "asked: llama3": Case(
        "qwen3", "ulysses_cp", "whole", **asked("llama3", low_freq_factor=1.0, high_freq_factor=4.0)
    ),
}
UNSETTLED = "dynamic, short documents"


def run(name: str, folder: Path, data: dict[str, Documents], output: str) -> Any:
    case = CASES[name]
    recipe = small_recipe(
        folder / name,
        data[case.data].path,
        ROW,
        model={"rope_scaling": case.asked},
        data={"packing": "best_fit" if case.data == "packed" else "none"},
        parallel_config={"context_parallel": 2, "context_parallel_algo": case.algorithm}
        | ({"ulysses_degree_in_cp": 2} if case.algorithm == "hybrid_cp" else {}),
        training={"steps": 1},
    )
    return run_recipe(recipe, folder / output)


def work(rank: int, folder: Path, data: dict[str, Documents]) -> tuple[dict[str, Any], Any]:
    """Every case; and one as transformers would choose in each call."""
    found = {name: run(name, folder, data, f"runs/{name}") for name in CASES}
    from uspft.model import hf_config

    hf_config.settle_positions = lambda config, length: None
    return found, run(UNSETTLED, folder, data, "unsettled")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("rope")
    for name, case in CASES.items():
        make_model(folder / name, case.kind, kv_heads=2, initializer_range=0.1, **case.model)
    data = {
        name: make_documents(folder / f"{name}.jsonl", lengths, masked=[0.0])
        for name, lengths in LENGTHS.items()
    }
    return folder, data


def want(name: str, folder: Path, data: dict[str, Documents]) -> Any:
    case, steps = CASES[name], [data[CASES[name].data].documents]
    return reference(folder / name, steps, rate=1e-3, clip=0.5, rope=case.meant, row=ROW)


def test_scaled_positions_are_those_of_the_rows_length(setting: Any) -> None:
    answers, unsettled = spawn(2, work, *setting)[0]
    wrong = {name: mismatch(got, want(name, *setting)) for name, got in answers.items()}
    assert wrong == {name: [] for name in CASES}
    assert any("loss" in line for line in mismatch(unsettled, want(UNSETTLED, *setting)))


@pytest.mark.parametrize("name", CASES)
def test_the_exported_config_says_what_was_trained(name: str, setting: Any, tmp_path: Path) -> None:
    """At every length of a call the frequencies are those that the rows had."""
    folder, case = setting[0], CASES[name]
    full = {**(case.asked or {}), "factor": ROW / ORIGINAL} if case.asked else None
    block = {"name_or_path": str(folder / name), "dtype": "float32", "rope_scaling": full}
    model_config(ModelBlock.model_validate(block), ROW).save_pretrained(tmp_path)
    exported = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    config = AutoConfig.from_pretrained(folder / name)
    if case.meant:
        config.rope_parameters = {**THETA, **case.meant}
    trained = AutoModelForCausalLM.from_config(config)
    pin_frequencies(trained, ROW)
    x = torch.zeros(1)
    for length in (ROW, 5):
        positions = torch.arange(length)[None]
        kinds = ["full_attention", "sliding_attention"] if case.kind == "gemma3_text" else [None]
        for kind in kinds:
            got, wanted = (
                net.get_decoder().rotary_emb(x, positions, *([kind] if kind else []))
                for net in (exported, trained)
            )
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
