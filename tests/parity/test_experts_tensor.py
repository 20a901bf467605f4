"""Experts that tensor ranks divide, alone and beside ranks that divide the experts, beside plain
transformers in one process.

Loss, routers' loss, the norm before clipping, every gradient and the weights after two steps; with
tokens divided between blocks and without; and runs that go on under other tensor degrees.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.support.experts import (
    MODELS,
    Case,
    Controls,
    different,
    exported,
    make_setting,
    run,
    unseen,
)
from tests.support.models import Documents
from tests.support.pairwise import pairwise
from tests.support.ranks import spawn

CASES = [
    Case("mixtral", 1, "zero1", tensor=2, beside=("exported",)),
    Case("qwen2_moe", 1, "zero3 whole", tensor=2, tokens=True, beside=("again", "exported")),
    Case("gpt_oss", 1, "zero2", tensor=4, tokens=True, beside=("exported",)),
    Case("gpt_oss", 2, "zero3 whole", tensor=2, beside=("again", "exported")),
    Case("mixtral", 2, "zero3 whole", "ring_cp", 2, 3, tensor=2, tokens=True, beside=("tiles",)),
    Case("qwen2_moe", 2, "zero1", "ulysses_cp", 2, tensor=2, beside=("again", "tiles")),
    Case("qwen3_next", 2, "zero3 whole", "allgather_cp", 2, beside=("tiles",)),
    Case("forced", 2, "zero2", tensor=2, tokens=True),
    Case("granitemoe", 2, "zero2", tensor=2, beside=("frozen", "exported")),
    Case("olmoe", 1, "zero0", tensor=4),
    Case("glm4_moe", 2, "zero1", tensor=2, tokens=True, beside=("exported",)),
    Case("ernie4_5_moe", 1, "zero3 whole", tensor=2, beside=("again",)),
    Case("minimax_m2", 2, "zero3 whole", tensor=2, beside=("exported",)),
    Case("gemma4_text", 2, "zero1", tensor=2, tokens=True, beside=("exported",)),
    Case("gpt_oss", 1, "zero1", rows=5, beside=("tensors",)),
    Case("qwen3_moe", 1, "zero3 whole", rows=5, beside=("tensors", "again")),
    Case("qwen3_moe", 1, "zero1", rows=5, beside=("tensors", "moved")),
]
STAGED = [
    Case("mixtral", 1, "zero1", tensor=2, tokens=True, beside=("stages",)),
    Case("gpt_oss", 1, "zero3 whole", tensor=2, beside=("stages", "again")),
]
"""They come last: DeepSpeed numbers modules of a process, and those of ranks then differ."""
SAVED = Case("qwen3_moe", 2, "zero1", tensor=2, beside=("saved",))
GOES_ON = [
    replace(SAVED, experts=4, zero="zero3 whole", tensor=1),
    replace(SAVED, experts=1, zero="zero2", tensor=4, tokens=True),
    replace(SAVED, zero="zero3 whole", tokens=True),
]


def work(rank: int, folder: Path, data: Documents) -> list[Any]:
    """What each case gives, and then those of GOES_ON and STAGED."""
    found = [run(case, folder, data, str(number)) for number, case in enumerate(CASES)]
    run(SAVED, folder, data, "saved", steps=1)
    for number, case in enumerate(GOES_ON):
        if rank == 0:
            shutil.copytree(folder / "runs" / "saved", folder / "runs" / f"on-{number}")
        dist.barrier()
        found.append(run(case, folder, data, f"on-{number}", resume=True))
    return [*found, *(run(case, folder, data, f"staged-{n}") for n, case in enumerate(STAGED))]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    return make_setting(tmp_path_factory.mktemp("experts"))


@pytest.mark.timeout(900)
def test_experts_in_parts_train_as_one_process(setting: tuple[Path, Documents]) -> None:
    every = list(zip([*CASES, *GOES_ON, *STAGED], spawn(4, work, *setting)[0], strict=True))
    wrong = {case: different(case, got, setting) for case, got in every}
    assert {case: found for case, found in wrong.items() if found} == {}
    for number, (case, (records, end, _)) in enumerate(every):
        # Of a run that has gone on, the first step was under another layout.
        *_, sent = (one["comm_bytes"] for one in records if "loss" in one)
        assert bool(sent.get("experts")) == (case.experts > 1), case
        assert sent.get("tensor") or case.tensor == 1, case
        if "exported" in case.beside:
            there = setting[0] / "runs" / str(number) / "hf"
            assert exported(there, end, setting[0] / case.model) == []


LAYOUTS = [
    *((1, context, experts) for context in (1, 2, 4) for experts in (1, 2, 4)),
    *((2, context, experts) for context in (1, 2) for experts in (1, 2)),
    (4, 1, 1),
]
"""Tensor and context degrees and ranks that divide experts; the rest of four ranks have other
rows."""
ALGORITHMS = ("ulysses_cp", "ring_cp", "hybrid_cp", "allgather_cp", "planned_cp")


STATES = {"qwen3_next", "qwen3_5_moe_text"}
"""Models with fewer key heads of a state than four tensor ranks."""


def legal(traits: tuple[Any, ...]) -> bool:
    """Whether a recipe may ask for it."""
    (tensor, _, _), _, _, model, *_ = traits
    return model not in STATES or tensor < 4


def grid() -> list[Case]:
    """Every pair of layout, algorithm, ZeRO stage, family, and what else there may be."""
    found = []
    factors = LAYOUTS, ALGORITHMS, ("zero1", "zero2", "zero3", "zero3 whole"), [*MODELS]
    flags = ((False, True),) * 4
    every = pairwise(*factors, *flags, legal=legal)
    for layout, algorithm, zero, model, tokens, again, packed, tiles in every:
        tensor, context, experts = layout
        if algorithm == "hybrid_cp" and context < 4:
            algorithm = "ring_cp"
        beside = ("again",) * again + ("tiles",) * tiles + ("single",) * (not packed)
        split = tokens and tensor > 1
        made = Case(model, experts, zero, algorithm, context, 4, 1, tensor, split, beside)
        found.append(made)
    return list(dict.fromkeys(found))


def every_pair(rank: int, folder: Path, data: Documents) -> list[Any]:
    return [run(case, folder, data, f"grid-{number}") for number, case in enumerate(grid())]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_pair_trains_as_one_process(setting: tuple[Path, Documents]) -> None:
    cases = grid()
    assert {case.model for case in cases} == {*MODELS} and len(cases) >= 40
    assert {(one.tensor, one.context, one.experts) for one in cases} == {*LAYOUTS}
    answers = spawn(4, every_pair, *setting)[0]
    wrong = {case: different(case, got, setting) for case, got in zip(cases, answers, strict=True)}
    assert {case: found for case, found in wrong.items() if found} == {}


CONTROLS: Controls = {
    "scores not entered": (Case("mixtral", 1, "zero1", tensor=2), 0.33),
    "gate and up cut as one": (Case("mixtral", 1, "zero2", tensor=2, tokens=True), 1.4),
    "bias on every rank": (Case("gpt_oss", 1, "zero1", tensor=2), 1.0),
    "norm of parts not summed": (Case("mixtral", 2, "zero3 whole", tensor=2), 0.05),
}


@contextmanager
def left_out(what: str) -> Iterator[None]:
    """Something is left out of what makes experts in parts right."""
    from uspft.engine import zero
    from uspft.model import experts
    from uspft.parameters.shards import MatrixSplit

    whole, in_two = experts.by_features, experts.HeldExperts.__call__

    def as_one(module: Any, name: str, shape: Any) -> MatrixSplit:
        split = whole(module, name, shape)
        return MatrixSplit(split.dim, (sum(split.stacked),))

    def apart(self: Any, x: Any, index: Any, weight: Any) -> Any:
        return in_two(self, x, index, weight.detach() + (weight - weight.detach()) / 2)

    def everywhere(self: Any, module: Any, name: str, expert: Any, features: int) -> Any:
        return getattr(module, f"{name}_bias")[expert].repeat(1, 2)[:, :features]

    patches = {
        "scores not entered": (experts.HeldExperts, "__call__", apart),
        "gate and up cut as one": (experts, "by_features", as_one),
        "bias on every rank": (experts.ExpertParts, "bias", everywhere),
        "norm of parts not summed": (zero, "sum_norm_once", lambda *_: None),
    }
    with patch.object(*patches[what]):
        yield


@pytest.mark.timeout(300)
def test_what_is_left_out_is_seen(setting: tuple[Path, Documents]) -> None:
    assert unseen(setting, CONTROLS, left_out) == {}


UNEVEN = Case("olmoe", 2, "zero3 whole", context=2, beside=("tiles",))
"""Ranks whose experts have other numbers of tiles; their trace is complete after two passes."""


def traced(rank: int, folder: Path, data: Documents) -> list[bool]:
    """Whether ranks ran different modules: as it is, and where tiles do not gather at once."""
    from uspft.engine import zero

    compared, plain = [], dist.all_gather_object

    def gather(every: list[Any], mine: Any, **group: Any) -> None:
        compared.append(len(mine) if isinstance(mine, list) else 0)
        plain(every, mine, **group)

    def unlike(name: str) -> bool:
        try:
            run(UNEVEN, folder, data, name, steps=1)
        except RuntimeError as error:
            assert "run modules in different orders" in str(error)
            return True
        return False

    with patch.object(dist, "all_gather_object", gather):
        alike = unlike("traced")
        assert max(compared) > 10
        with patch.object(zero, "Tiled", type("Other", (), {})):
            return [alike, unlike("traced-hooked")]


@pytest.mark.timeout(300)
def test_ranks_with_other_numbers_of_tiles_run_the_same_modules(
    setting: tuple[Path, Documents],
) -> None:
    assert spawn(2, traced, *setting) == [[False, True]] * 2
