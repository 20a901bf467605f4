"""Experts that ranks divide, beside plain transformers in one process.

Loss, routers' loss, the norm before clipping, which is active, and the weights after two steps.
Layouts, algorithms, stages, families and what saves memory take turns, and runs that go on from
another's checkpoint. One spawn, many engines inside; of the controls another.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.support.experts import (
    Case,
    Controls,
    different,
    evaluated,
    exported,
    make_setting,
    reference_of,
    run,
    unseen,
)
from tests.support.models import ARCHITECTURES, Documents
from tests.support.ranks import spawn
from tests.support.runs import GROUPS
from uspft.checkpoint.folder import Checkpoint
from uspft.checkpoint.hf_folder import write_exports
from uspft.checkpoint.weights import whole_model

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
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
    Case("quantised", 2, "zero2", beside=("offload", "exported")),
    Case("mixtral", 2, "zero1", rows=5, beside=("strategies",)),
    Case("qwen3_moe", 4, "zero3 whole", rows=5, beside=("strategies", "again")),
    Case("qwen3_moe", 1, "zero3 whole", beside=("below",)),
    Case("qwen3_next", 2, "zero3 whole", "ulysses_cp", 2, beside=("again",)),
    Case("qwen3_5_moe_text", 4, "zero1"),
    Case("glm4_moe", 4, "zero3 whole", context=2, beside=("again", "exported")),
    Case("ernie4_5_moe", 2, "zero1", beside=("exported",)),
    Case("minimax_m2", 2, "zero2", "ulysses_cp", 2, beside=("tiles",)),
    Case("gemma4_text", 2, "zero3 whole", "planned_cp", 2, beside=("tiles", "again", "exported")),
]
STAGED = [
    Case("mixtral", 2, "zero1", beside=("stages",)),
    Case("qwen3_moe", 2, "zero3 whole", beside=("stages", "again")),
    Case("glm4_moe", 2, "zero2", beside=("stages",)),
]
"""They come last: DeepSpeed numbers modules of a process, and those of ranks then differ."""
SAVED = Case("ernie4_5_moe", 2, "zero1", context=2, beside=("saved",))
GOES_ON = [
    replace(SAVED, experts=4, zero="zero3 whole", context=1),
    replace(SAVED, experts=1, zero="zero2"),
    replace(SAVED, zero="zero2", context=1, beside=("saved", "stages")),
]


ROUNDED = [
    Case("mixtral", experts, "zero2", "ring_cp", 2, beside=("bfloat16", "again"))
    for experts in (1, 2)
]
"""In bfloat16, of which the one whose experts are whole says how far off that is."""


def in_float64(rank: int, kind: str) -> float:
    """The worst relative error of out and gradients of divided experts, in float64."""
    from uspft.comm import Books
    from uspft.model.divided import Call
    from uspft.model.experts import ExpertParts, HeldExperts

    ranks, tokens, torch_state = dist.get_world_size(), 6, torch.random.get_rng_state()
    torch.manual_seed(3)
    name, own = ARCHITECTURES[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own})
    net = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager"
    ).double()
    whole = net.model.layers[0].mlp.experts
    for parameter in whole.parameters():
        parameter.data.normal_(std=0.3)
    x = torch.randn(ranks * tokens, config.hidden_size, dtype=torch.float64)
    index = torch.stack([torch.randperm(4)[:2] for _ in x])
    index[:tokens] = torch.tensor([3, 2])  # what rank 0 has goes to the last rank that has experts
    scores, slope = torch.rand(len(x), 2, dtype=torch.float64), torch.randn_like(x)
    torch.random.set_rng_state(torch_state)
    part = copy.deepcopy(whole)
    mine = slice(rank * tokens, (rank + 1) * tokens)
    group = GROUPS.of([range(ranks)], rank, Books())
    part.num_experts //= ranks
    for own_name, value in list(part.named_parameters()):
        here = value.detach().chunk(ranks)[rank].clone()
        setattr(part, own_name, torch.nn.Parameter(here))
    held = HeldExperts(part, group, ExpertParts({}, Call(None)))
    worst = 0.0
    results = []
    for function, module, of in ((whole, whole, slice(None)), (held, part, mine)):
        inputs = x[of].clone().requires_grad_(), scores[of].clone().requires_grad_()
        out = function(inputs[0], index[of], inputs[1])
        found = torch.autograd.grad(out, [*inputs, *module.parameters()], slope[of])
        results.append([out.detach(), *found])
    for number, (want, got) in enumerate(zip(*results, strict=True)):
        want = want[mine] if number < 3 else want.chunk(ranks)[rank]
        worst = max(worst, float((want - got).abs().max() / want.abs().max().clamp(min=1e-3)))
    return worst


def work(rank: int, folder: Path, data: Documents) -> tuple[list[Any], list[Any]]:
    """What each case gives, and then those of GOES_ON, STAGED and ROUNDED; and the errors in
    float64."""
    found = [run(case, folder, data, str(number)) for number, case in enumerate(CASES)]
    run(SAVED, folder, data, "saved", steps=1)
    gone_on = []
    for number, case in enumerate(GOES_ON):
        if rank == 0:
            shutil.copytree(folder / "runs" / "saved", folder / "runs" / f"on-{number}")
        dist.barrier()
        gone_on.append(run(case, folder, data, f"on-{number}", resume=True))
    staged = [run(case, folder, data, f"staged-{n}") for n, case in enumerate(STAGED)]
    rounded = [run(case, folder, data, f"rounded-{n}") for n, case in enumerate(ROUNDED)]
    errors = [in_float64(rank, kind) for kind in ("mixtral", "gpt_oss")]
    return found, [*gone_on, *staged, *rounded, errors]


def distance(got: Any, want: Any) -> float:
    """How far off weights are, of how far they have moved."""
    end, start = want[0].end, want[0].start
    off = [(got[1][name] - end[name]).norm() / (end[name] - start[name]).norm() for name in end]
    return float(torch.stack(off).mean())


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    return make_setting(tmp_path_factory.mktemp("experts"))


@pytest.mark.timeout(900)
def test_divided_experts_train_as_one_process(setting: tuple[Path, Documents]) -> None:
    folder, data = setting
    every_rank = spawn(4, work, *setting)
    answers, (*later, whole, divided, _) = every_rank[0]
    errors = [max(each) for each in zip(*(one[1][-1] for one in every_rank), strict=True)]
    assert len(errors) == 2 and max(errors) < 1e-12, errors
    every = list(zip([*CASES, *GOES_ON, *STAGED], [*answers, *later], strict=True))
    wrong = {case: different(case, got, setting) for case, got in every}
    assert {case: found for case, found in wrong.items() if found} == {}
    checkpoint = Checkpoint.known(folder / "runs" / "on-0" / "checkpoints" / "step-00000002")
    there = folder / "later"
    write_exports(replace(whole_model(checkpoint), dtype=torch.float32), checkpoint.model, hf=there)
    assert exported(there, later[0][1], folder / SAVED.model) == []
    want = reference_of(ROUNDED[0], setting)
    apart = [distance(got, want) for got in (whole, divided)]
    assert 0.8 < apart[1] / apart[0] < 1.2 and apart[0] < 0.5, apart
    for number, (case, (records, end, _)) in enumerate(every):
        sent = [one["comm_bytes"].get("experts", 0) for one in records if "loss" in one]
        assert all(sent) == (case.experts > 1)
        if "exported" in case.beside:
            there = folder / "runs" / str(number) / "hf"
            assert exported(there, end, folder / case.model) == []
            card = (there / "README.md").read_text()
            assert ("in MXFP4: dequantised" in card) == (case.model == "quantised")
        if case.model == "forced":
            (told,) = [one["eval_loss"] for one in records if "eval_loss" in one]
            assert told == pytest.approx(evaluated(folder / case.model, end, data), rel=1e-5)


CONTROLS: Controls = {
    "family word removed": (Case("mixtral", 2, "zero3 whole"), 1.0),
    "scores detached": (Case("mixtral", 2, "zero1"), 1.0),
    "router loss of each rank": (Case("mixtral", 4, "zero2", context=4, rows=2), 0.3),
}


@contextmanager
def left_out(what: str) -> Iterator[None]:
    """Something is left out of what makes divided experts right."""
    from uspft.engine import replicas, zero
    from uspft.model import experts, router

    def without_word(named: Any, holders: Any) -> None:
        replicas.mark_for_partition(named, holders)
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


@pytest.mark.timeout(300)
def test_what_is_left_out_is_seen(setting: tuple[Path, Documents]) -> None:
    assert unseen(setting, CONTROLS, left_out) == {}
