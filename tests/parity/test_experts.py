"""Experts that ranks divide, beside plain transformers in one process.

Loss, routers' loss, the norm before clipping, which is active, and the weights after two steps.
Layouts, algorithms, stages, families and what saves memory take turns, and runs that go on from
another's checkpoint. One spawn, many engines inside; of the controls another.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from tests.support.models import Documents, make_model
from tests.support.ranks import spawn
from tests.support.routers import CLIP, FACTOR, ROW, STEPS, documents, problems, wanted
from tests.support.runs import run_recipe, small_recipe
from tests.support.stages import ZERO

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "gpt_oss": ("gpt_oss", {}),
    "forced": ("gpt_oss", {}),
}
"""Of the last one every token meets the first two experts alone."""


@dataclass(frozen=True)
class Case:
    """One run on four ranks."""

    model: str
    experts: int
    zero: str
    algorithm: str = "ring_cp"
    context: int = 1
    rows: int = 4
    each: int = 1
    beside: tuple[str, ...] = ()
    """What else the recipe asks for, by its names in BESIDE."""

    @property
    def frozen(self) -> list[str]:
        return [
            one for name in self.beside for one in BESIDE[name].get("model", {}).get("freeze", [])
        ]


BESIDE: dict[str, dict[str, Any]] = {
    "again": {"memory": {"gradient_checkpointing": True}},
    "attention": {"memory": {"gradient_checkpointing": True, "recompute": "attention"}},
    "tiles": {"memory": {"mlp_tile_tokens": 5}},
    "host": {"memory": {"gradient_checkpointing": True, "offload_activations": "cpu"}},
    "frozen": {"model": {"freeze": [r"experts\."]}},
    "below": {"model": {"freeze": [r"embed_tokens|layers\.0\.(self|input|post)|router|gate\.w"]}},
    "offload": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "strategies": {
        "parallel_config": {
            "strategies": [
                {"max_length": 20},
                {"max_length": 28, "context_parallel": 2, "context_parallel_algo": "ring_cp"},
                {
                    "max_length": ROW,
                    "context_parallel": 4,
                    "context_parallel_algo": "hybrid_cp",
                    "ulysses_degree_in_cp": 2,
                },
            ]
        }
    },
    "stages": {"parallel_config": {"pipeline_stage": 2}},
    "exported": {"export": {"huggingface": True}},
    "saved": {"checkpoint": {"every_steps": 1}},
}
CASES = [
    Case("mixtral", 2, "zero1", context=4, rows=1, beside=("again", "exported")),
    Case("mixtral", 4, "zero3 whole"),
    Case("qwen3_moe", 4, "zero2", "hybrid_cp", 4, 3, beside=("tiles",)),
    Case("qwen3_moe", 2, "zero3", "allgather_cp", 2, beside=("again",)),
    Case("gpt_oss", 4, "zero1", "ulysses_cp", 2, each=2),
    Case("gpt_oss", 2, "zero3 whole", "planned_cp", 4, 2, beside=("tiles", "again", "exported")),
    Case("forced", 2, "zero3 whole", beside=("attention",)),
    Case("forced", 4, "zero2", context=2, rows=3),
    Case("mixtral", 2, "zero1", rows=3, beside=("frozen",)),
    Case("mixtral", 4, "zero3 whole", context=2, beside=("frozen", "again")),
    Case("qwen3_moe", 4, "zero1", beside=("below", "host")),
    Case("qwen3_moe", 2, "zero3 whole", beside=("below", "offload")),
    Case("gpt_oss", 2, "zero2", beside=("offload",)),
    Case("mixtral", 2, "zero1", rows=5, beside=("strategies",)),
    Case("qwen3_moe", 4, "zero3 whole", rows=5, beside=("strategies", "again")),
    Case("qwen3_moe", 1, "zero3 whole", beside=("below",)),
]
STAGED = [
    Case("mixtral", 2, "zero1", beside=("stages",)),
    Case("qwen3_moe", 2, "zero3 whole", beside=("stages", "again")),
]
"""They come last: DeepSpeed numbers modules of a process, and those of ranks then differ."""
SAVED = Case("qwen3_moe", 2, "zero1", context=2, beside=("saved",))
GOES_ON = [
    replace(SAVED, experts=4, zero="zero3 whole", context=1),
    replace(SAVED, experts=1, zero="zero2"),
    replace(SAVED, zero="zero2", context=1, beside=("saved", "stages")),
]


def run(
    case: Case, folder: Path, data: Documents, name: str, *, steps: int = STEPS, **more: Any
) -> Any:
    parallel: dict[str, Any] = {"expert_parallel": case.experts}
    if case.context > 1:
        parallel |= {"context_parallel": case.context, "context_parallel_algo": case.algorithm}
    if case.algorithm == "hybrid_cp":
        parallel["ulysses_degree_in_cp"] = 2
    balance = balanced(case)
    tokens = {"packing": "none" if "strategies" in case.beside else "best_fit"}
    blocks: dict[str, dict[str, Any]] = {
        "model": {"overrides": {"output_router_logits": balance, "router_aux_loss_coef": FACTOR}},
        "data": {**tokens, "eval": str(data.path)} if case.model == "forced" else tokens,
        "parallel_config": parallel,
        "training": {
            "steps": steps,
            "global_batch_size": case.rows,
            "micro_batch_size": case.each,
            "max_grad_norm": CLIP,
        },
        "memory": {"gradient_checkpointing": False},
    }
    zero = dict(ZERO[case.zero])
    for one in case.beside:
        for key, block in BESIDE[one].items():
            if key == "zero":
                zero |= block
            else:
                blocks[key] = {**blocks.get(key, {}), **block}
    blocks["deepspeed"] = {"zero_optimization": zero}
    recipe = small_recipe(folder / case.model, data.path, ROW, **blocks)
    return run_recipe(recipe, folder / "runs" / name, **more)


def balanced(case: Case) -> bool:
    """Whether routers have a loss: not in stages, nor where rows are made inside the step."""
    return not {"strategies", "stages", "saved"} & set(case.beside)


def work(rank: int, folder: Path, data: Documents) -> tuple[list[Any], list[Any]]:
    """What each case gives, and then those of GOES_ON and STAGED."""
    found = [run(case, folder, data, str(number)) for number, case in enumerate(CASES)]
    run(SAVED, folder, data, "saved", steps=1)
    gone_on = []
    for number, case in enumerate(GOES_ON):
        if rank == 0:
            shutil.copytree(folder / "runs" / "saved", folder / "runs" / f"on-{number}")
        dist.barrier()
        gone_on.append(run(case, folder, data, f"on-{number}", resume=True))
    staged = [run(case, folder, data, f"staged-{n}") for n, case in enumerate(STAGED)]
    return found, [*gone_on, *staged]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("experts")
    for name, (kind, extra) in MODELS.items():
        make_model(folder / name, kind, kv_heads=2, initializer_range=0.1, **extra)
    file = folder / "forced" / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("router.bias")]:
        weights[name] = torch.tensor([30.0, 30.0, 0.0, 0.0])
    save_file(weights, file, {"format": "pt"})
    return folder, documents(folder / "d.jsonl")


def different(case: Case, got: Any, setting: tuple[Path, Documents]) -> list[str]:
    """What differs from one process."""
    folder, data = setting
    want = wanted(
        folder / case.model,
        case.rows,
        data,
        balanced=balanced(case),
        frozen=case.frozen,
        packed="strategies" not in case.beside,
    )
    return problems(got, want)


def evaluated(folder: Path, weights: dict[str, torch.Tensor], data: Documents) -> float:
    """The loss of weights on all documents, in one process."""
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    net.load_state_dict(weights, strict=False)
    total = targets = 0.0
    for ids, labels in data.documents:
        with torch.no_grad():
            logits = net(input_ids=torch.tensor([ids])).logits[0, :-1]
        wanted = torch.tensor(labels[1:])
        total += float(F.cross_entropy(logits, wanted, reduction="sum"))
        targets += int((wanted != -100).sum())
    return total / targets


@pytest.mark.timeout(900)
def test_divided_experts_train_as_one_process(setting: tuple[Path, Documents]) -> None:
    folder, data = setting
    answers, later = spawn(4, work, *setting)[0]
    every = list(zip([*CASES, *GOES_ON, *STAGED], [*answers, *later], strict=True))
    wrong = {case: different(case, got, setting) for case, got in every}
    for number, (case, (records, end)) in enumerate(every):
        sent = [one["comm_bytes"].get("experts", 0) for one in records if "loss" in one]
        assert all(sent) == (case.experts > 1)
        if "exported" in case.beside:
            there = folder / "runs" / str(number) / "hf"
            net = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
            assert all(torch.equal(p, end[name]) for name, p in net.named_parameters())
        if case.model == "forced":
            (told,) = [one["eval_loss"] for one in records if "eval_loss" in one]
            assert told == pytest.approx(evaluated(folder / case.model, end, data), rel=1e-5)
    assert {case: found for case, found in wrong.items() if found} == {}


CONTROLS = {
    "family word removed": Case("mixtral", 2, "zero3 whole"),
    "scores detached": Case("mixtral", 2, "zero1"),
    "router loss of each rank": Case("mixtral", 4, "zero2", context=4, rows=2),
}


@contextmanager
def left_out(what: str) -> Iterator[None]:
    """Something is left out of what makes divided experts right."""
    from uspft.engine import expert_sets, zero
    from uspft.model import experts, router

    def without_word(named: Any, holders: Any) -> None:
        expert_sets.mark_for_partition(named, holders)
        for parameter in named.values():
            vars(parameter).pop("ds_zero_placement_family", None)

    if what == "family word removed":
        with patch.object(zero, "mark_for_partition", without_word):
            yield
    elif what == "scores detached":
        plain = experts.HeldExperts.__call__
        detached = lambda self, x, index, weight: plain(self, x, index, weight.detach())  # noqa: E731
        with patch.object(experts.HeldExperts, "__call__", detached):
            yield
    else:
        with patch.object(router, "sum_over", lambda x, group, kind: x * group.size):
            yield


def broken(rank: int, folder: Path, data: Documents) -> list[Any]:
    found = []
    for what, case in CONTROLS.items():
        with left_out(what):
            found.append(run(case, folder, data, what.replace(" ", "-")))
    return found


@pytest.mark.timeout(300)
def test_what_is_left_out_is_seen(setting: tuple[Path, Documents]) -> None:
    answers = spawn(4, broken, *setting)[0]
    for (what, case), got in zip(CONTROLS.items(), answers, strict=True):
        found = different(case, got, setting)
        assert any("of its change" in line or "grad_norm" in line for line in found), what
