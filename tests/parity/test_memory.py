"""What saves memory changes no result: under algorithms, stages, LoRA and packing, on two ranks.

Without an adapter the truth is plain transformers in one process, with one it is the same run
without the options, which test_adapter holds to plain peft. Layouts meet every option, and stages,
adapters and packing take turns; `--full`: every pair of all. One spawn, many engines inside.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.models import Documents, make_documents, make_model, mismatch, reference
from tests.support.pairwise import pairwise
from tests.support.ranks import spawn
from tests.support.rows import PACKED_ROWS, PLAIN_ROWS, ROW, row_documents
from tests.support.runs import run_recipe, small_recipe
from tests.support.stages import FULLY, ZERO

STEPS, RATE, CLIP = 2, 1e-3, 0.5
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "ulysses": {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"},
    "ring": {"context_parallel": 2, "context_parallel_algo": "ring_cp"},
    "allgather": {"context_parallel": 2, "context_parallel_algo": "allgather_cp"},
    "planned": {"context_parallel": 2, "context_parallel_algo": "planned_cp"},
    "tensor": {"model_parallel": 2},
    "tensor, tokens split": {"model_parallel": 2, "use_seq_parallel": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "tiles": {"mlp_tile_tokens": 5},
    "tiles kept": {"mlp_tile_tokens": ROW // 2 - 1, "gradient_checkpointing": False},
    "attention again": {"recompute": "attention", "mlp_tile_tokens": ROW // 2 - 1},
    "on the host": {"offload_activations": "cpu"},
    "all": {"recompute": "attention", "offload_activations": "cpu", "mlp_tile_tokens": 7},
    "groups": {"attention_heads": 1, "recompute": "attention", "mlp_tile_tokens": 7},
    "groups kept": {"attention_heads": 2, "offload_activations": "cpu"},
}
"""Of 24 tokens a rank, or 48, tiles of 23 leave a last one of one token or two."""


class Case(NamedTuple):
    """One run."""

    layout: str
    options: str
    zero: str
    packed: bool
    adapted: bool

    @property
    def question(self) -> tuple[bool, bool]:
        """What has one answer."""
        return self.packed, self.adapted


def cases(*, full: bool) -> list[Case]:
    if full:
        factors = tuple(LAYOUTS), tuple(OPTIONS), FULLY, (False, True), (False, True)
        return [Case(*case) for case in pairwise(*factors)]
    stages, kinds = cycle(FULLY[::-1]), cycle([(True, False), (False, True), (False, False)])
    every = [
        (layout, options)
        for number, (layout, options) in enumerate(product(LAYOUTS, OPTIONS))
        if number % 4 == 0
    ]
    return [Case(*one, next(stages), *next(kinds)) for one in every]


def recipe(
    case: Case, folder: Path, data: dict[bool, Documents], memory: dict[str, Any]
) -> dict[str, Any]:
    adapter = {"type": "lora", "rank": 4, "alpha": 6.0, "dropout": 0.4}
    return small_recipe(
        folder / "model",
        data[case.packed].path,
        ROW,
        model={"adapter": adapter} if case.adapted else {},
        data={"packing": "best_fit" if case.packed else "none"},
        parallel_config=LAYOUTS[case.layout],
        deepspeed={"zero_optimization": ZERO[case.zero]},
        training={"steps": STEPS, "global_batch_size": 2, "max_grad_norm": CLIP},
        memory=memory,
    )


def work(rank: int, full: bool, folder: Path, data: dict[bool, Documents]) -> dict[Case, Any]:
    """By case: the run, and the one without options where there is an adapter."""
    found: dict[Case, Any] = {}
    plain: dict[Any, Any] = {}
    for number, case in enumerate(cases(full=full)):
        own = folder / f"{full}-{number}"
        got = run_recipe(recipe(case, folder, data, OPTIONS[case.options]), own)
        if case.adapted and case.question not in plain:
            bare = recipe(case, folder, data, {})
            plain[case.question] = run_recipe(bare, folder / f"{full}-{number}-plain")
        found[case] = got, plain.get(case.question)
    return found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("memory")
    make_model(folder / "model", "qwen3", heads=4, kv_heads=2)
    rows = {False: PLAIN_ROWS, True: PACKED_ROWS}
    return folder, {
        packed: make_documents(folder / f"{packed}.jsonl", list(chain(*rows[packed])), masked=share)
        for packed, share in ((False, [0.0, 0.9, 0.4]), (True, [0.0, 0.95, 0.3]))
    }


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.full)])
def answers(request: pytest.FixtureRequest, setting: Any) -> dict[Case, Any]:
    found: dict[Case, Any] = spawn(2, work, request.param, *setting)[0]
    return found


def truth(packed: bool, folder: Path, data: dict[bool, Documents]) -> Any:
    rows = row_documents(data, packed)
    steps = [list(chain(*rows[i : i + 2])) for i in range(0, 2 * STEPS, 2)]
    return reference(folder / "model", steps, rate=RATE, clip=CLIP)


def unlike(one: Any, other: Any) -> list[str]:
    """What of two runs is not the same up to rounding in float32."""
    (records, ends), (others, their_ends) = one, other
    found = [
        f"{key} {a[key]} {b[key]}"
        for a, b in zip(records, others, strict=True)
        for key in ("loss", "grad_norm")
        if a[key] != pytest.approx(b[key], rel=1e-5)
    ]
    return found + [
        name
        for name, value in ends.items()
        if not torch.allclose(value, their_ends[name], rtol=1e-4, atol=2e-5)
    ]


def test_every_option_equals_one_process(answers: dict[Case, Any], setting: Any) -> None:
    met = {(case.layout, case.zero, case.options, case.question) for case in answers}
    for number, values in ((0, LAYOUTS), (1, FULLY), (2, OPTIONS)):
        assert {traits[number] for traits in met} == set(values)
    wanted = {packed: truth(packed, *setting) for packed in (False, True)}
    wrong = {}
    for case, (got, plain) in answers.items():
        said = unlike(got, plain) if case.adapted else mismatch(got, wanted[case.packed])
        if said:
            wrong[case] = said[:3]
    assert wrong == {}


def gathers(rank: int, folder: Path, data: dict[bool, Documents]) -> dict[str, tuple[int, int]]:
    """By options: how many all-gathers a step takes under ZeRO-3, and of how many bytes."""
    found = {}
    for name, memory in {"none": {}, **{one: OPTIONS[one] for one in ("tiles", "groups")}}.items():
        case = Case("ring", name, "zero3 whole", packed=False, adapted=False)
        counted: list[int] = []

        def before(run: Any, counted: list[int] = counted) -> None:
            backend = import_module("deepspeed.comm.comm").cdb
            gather, step = type(backend).all_gather_into_tensor, run.engine.step

            def counting(output_tensor: Any, **options: Any) -> Any:
                counted.append(output_tensor.numel() * output_tensor.element_size())
                return gather(backend, output_tensor=output_tensor, **options)

            def stepping(*args: Any, **options: Any) -> Any:
                counted.clear()  # of the last step alone, when DeepSpeed knows the order
                backend.all_gather_into_tensor = counting
                return step(*args, **options)

            run.engine.step = stepping

        run_recipe(recipe(case, folder, data, memory), folder / f"gathers-{name}", before=before)
        found[name] = len(counted), sum(counted)
    return found


def test_tiles_and_groups_of_heads_gather_weights_once(setting: Any) -> None:
    found = spawn(2, gathers, *setting)[0]
    (plain, size), (tiled, tiled_size), (grouped, grouped_size) = found.values()
    assert plain > 0 and tiled <= plain and grouped <= plain, found
    assert tiled_size == size > 0 < grouped_size <= size
