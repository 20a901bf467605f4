"""LoRA under every algorithm and ZeRO stage against plain peft in one process.

Every algorithm, tensor parallelism among them, meets a stage (`--full`: every one); packing,
checkpointing, models, adapted modules and dropout take turns, so that by `--full` each algorithm
and stage meets all of them (of the modules a part).
In bfloat16 two of them, by the error of one process. One spawn of four ranks, many engines inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.adapters import as_answer, base_weights, compute_in, peft_adapter, rounded
from tests.support.algorithms import ALGORITHMS
from tests.support.dropout import written_out_dropout
from tests.support.mesh import on_mesh
from tests.support.models import (
    Documents,
    Reference,
    make_documents,
    make_model,
    mismatch,
    reference,
)
from tests.support.ranks import spawn
from tests.support.rows import PACKED_ROWS, PLAIN_ROWS, ROW, row_documents
from tests.support.runs import run_recipe, small_recipe
from tests.support.stages import FULLY, ZERO

STEPS, RATE, CLIP, SEED = 2, 5e-3, 0.005, 7
RANK, ALPHA, DROPOUT = 4, 6.0, 0.4
ADAM = {"float32": (RATE, 1e-8, CLIP), "bfloat16": (0.05, 0.1, 100.0)}
"""Rate, eps and clip by type. In bfloat16 eps is far above the gradients, and changes go with them:
otherwise one that is nearly 0 is as far off as its sign."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "ulysses_cp": {"context_parallel": 4, "context_parallel_algo": "ulysses_cp"},
    "ring_cp": {"context_parallel": 2, "context_parallel_algo": "ring_cp"},
    "hybrid_cp": {
        "context_parallel": 4,
        "context_parallel_algo": "hybrid_cp",
        "ulysses_degree_in_cp": 2,
    },
    "allgather_cp": {"context_parallel": 4, "context_parallel_algo": "allgather_cp"},
    "planned_cp": {"context_parallel": 4, "context_parallel_algo": "planned_cp"},
    "tensor": {"model_parallel": 2},
    "tensor, tokens split": {
        "model_parallel": 2,
        "use_seq_parallel": True,
        "context_parallel": 2,
        "context_parallel_algo": "ring_cp",
    },
    "mesh": on_mesh(2, 2),
}
TENSOR = ("tensor", "tensor, tokens split", "mesh")
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "heads": 8, "kv_heads": 2},
    "qwen2": {"kind": "qwen2", "heads": 4, "kv_heads": 1},
    "qwen3": {"kind": "qwen3", "heads": 6, "kv_heads": 2},
}
TARGETS = (None, ("q_proj",), ("v_proj", "mlp.down_proj"), ("k_proj", "o_proj"), ("gate_proj",))


class Case(NamedTuple):
    """One run."""

    layout: str
    zero: str
    model: str
    targets: tuple[str, ...] | None
    packed: bool
    checkpointed: bool
    dropout: float

    @property
    def rows(self) -> int:
        """Two micro-batches where a row is shared by all."""
        return 4 if self.layout == "whole" else 2


TURNS = (tuple(MODELS), TARGETS, (True, False), (False, True), (DROPOUT, 0.0))


def cases(*, full: bool) -> list[Case]:
    """Of each trait the value that layout and stage, the trait before it, and all have met least.

    Not full: one stage of each layout, another of the next.
    """
    met: Counter[Any] = Counter()
    found = []
    for turn, (layout, zero) in enumerate(product(LAYOUTS, FULLY)):
        if not full and turn // len(FULLY) % len(FULLY) != turn % len(FULLY):
            continue
        chosen: list[Any] = []
        for number, values in enumerate(TURNS):
            who = (layout, number), (zero, number), (*chosen[-1:], number, "before"), number

            def often(value: Any, who: Any = who) -> tuple[int, ...]:
                one, other, *besides = (met[each, value] for each in who)
                return one + other, max(one, other), *besides

            best = min(values, key=often)
            met.update((each, best) for each in who)
            chosen.append(best)
        found.append(Case(layout, zero, *chosen))
    return found


CASES = {full: cases(full=full) for full in (False, True)}

ROUTED = Case(
    *("tensor, tokens split", "zero2", "qwen2_moe", ("q_proj", "shared_expert_gate")),
    packed=True,
    checkpointed=True,
    dropout=DROPOUT,
)
"""The gate of the shared expert sees tokens between blocks, of which each tensor rank has some."""
ROUNDED = [
    Case("ring_cp", "zero1", "llama", None, packed=True, checkpointed=True, dropout=0.0),
    Case("planned_cp", "zero3 whole", "qwen3", None, packed=False, checkpointed=False, dropout=0.0),
]
"""Runs in bfloat16: the base and what is computed; the adapter's masters are float32."""


def recipe(
    case: Case, folder: Path, data: dict[bool, Documents], dtype: str = "float32"
) -> dict[str, Any]:
    rate, eps, clip = ADAM[dtype]
    adapter = {"type": "lora", "rank": RANK, "alpha": ALPHA, "dropout": case.dropout}
    if case.targets:
        adapter["target_modules"] = list(case.targets)
    return {"seed": SEED} | small_recipe(
        folder / case.model,
        data[case.packed].path,
        ROW,
        model={"adapter": adapter, "dtype": dtype},
        data={"packing": "best_fit" if case.packed else "none"},
        parallel_config=LAYOUTS[case.layout],
        deepspeed={"zero_optimization": ZERO[case.zero]},
        optimizer={"learning_rate": rate, "eps": eps},
        training={"steps": STEPS, "global_batch_size": case.rows, "max_grad_norm": clip},
        memory={"gradient_checkpointing": case.checkpointed},
    )


def work(
    rank: int, full: bool, folder: Path, data: dict[bool, Documents]
) -> dict[str, dict[Case, Any]]:
    """By type and case; those in bfloat16 once, where not full."""
    return {
        dtype: {
            case: run_recipe(recipe(case, folder, data, dtype), folder / f"{dtype}-{number}")
            for number, case in enumerate(cases)
        }
        for dtype, cases in (
            ("float32", [*CASES[full], ROUTED]),
            ("bfloat16", [] if full else ROUNDED),
        )
    }


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("adapter")
    for name, kind in MODELS.items():
        make_model(folder / name, **kind)
    make_model(folder / ROUTED.model, ROUTED.model)
    rows = {False: PLAIN_ROWS, True: PACKED_ROWS}
    return folder, {
        packed: make_documents(folder / f"{packed}.jsonl", list(chain(*rows[packed])), masked=share)
        for packed, share in ((False, [0.0, 0.9, 0.4]), (True, [0.0, 0.95, 0.3]))
    }


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.full)])
def answers(request: pytest.FixtureRequest, setting: Any) -> dict[str, dict[Case, Any]]:
    found: dict[str, dict[Case, Any]] = spawn(4, work, request.param, *setting)[0]
    return found


def wanted(
    case: Case,
    setting: Any,
    *,
    seed: int = SEED,
    alpha: float = ALPHA,
    base: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Reference:
    """The same steps of plain peft; another seed or alpha for what must not agree.

    base: makes of the base's parameters what they are held as. The adapter, in float32 whatever
    they are, then starts from values rounded to bfloat16, and takes part in the base's type.
    """
    from uspft.model.adapter import AdapterStart

    folder, data = setting
    every = row_documents(data, case.packed)
    stream = [every[i % len(every)] for i in range(STEPS * case.rows)]
    steps = [
        list(chain(*stream[i : i + case.rows])) for i in range(0, STEPS * case.rows, case.rows)
    ]
    no_base: Any = None
    start = AdapterStart(no_base, seed).read

    def begin(name: str, shape: torch.Size) -> torch.Tensor:
        value = start(name, shape)
        return rounded(value) if base else value

    adapted = peft_adapter(
        begin,
        masks=written_out_dropout(stream, ROW, case.dropout, seed) if case.dropout else None,
        r=RANK,
        lora_alpha=alpha,
        target_modules=list(case.targets) if case.targets else "all-linear",
    )

    def prepare(net: Any) -> dict[str, torch.nn.Parameter]:
        for parameter in net.parameters() if base else ():
            parameter.data = base(parameter.data)
        trained = adapted(net)
        if net.dtype != torch.float32:
            compute_in(net, net.dtype)
        return trained

    rate, eps, clip = ADAM["bfloat16" if base else "float32"]
    return reference(folder / case.model, steps, rate=rate, clip=clip, eps=eps, prepare=prepare)


def differs(got: Any, want: Reference) -> list[str]:
    """What differs of losses, norms and the adapter."""
    records, end = got
    return mismatch((records, {name: v for name, v in end.items() if name in want.end}), want)


@pytest.mark.timeout(900)
def test_an_adapter_trains_as_in_one_process(
    setting: Any, answers: dict[str, dict[Case, Any]]
) -> None:
    folder, _ = setting
    by_case = answers["float32"]
    wrong = {case: differs(got, wanted(case, setting)) for case, got in by_case.items()}
    wrong = {case: found for case, found in wrong.items() if found}
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())
    for case, (_, end) in by_case.items():
        base = base_weights(folder / case.model)
        frozen = {name: value for name, value in end.items() if "lora" not in name}
        assert frozen.keys() == base.keys()
        assert all(torch.equal(base[name], value) for name, value in frozen.items()), case
    case = next(case for case in by_case if case.dropout and not case.targets)
    assert differs(by_case[case], wanted(case, setting, seed=SEED + 1))
    assert differs(by_case[case], wanted(case, setting, alpha=1.1 * ALPHA))
    assert differs(by_case[case], wanted(case._replace(dropout=DROPOUT + 0.05), setting))
    assert differs(by_case[ROUTED], wanted(ROUTED, setting, seed=SEED + 1))


def errors(got: Any, truth: Reference) -> dict[str, float]:
    """How far off: A and B of all modules by what gradients have changed, losses and norms by
    themselves."""
    records, end = got
    decayed = (1 - ADAM["bfloat16"][0]) ** STEPS
    found = {}
    for side in ("lora_A", "lora_B"):
        names = [name for name in truth.end if side in name]
        off = sum(float((end[n] - truth.end[n]).square().sum()) for n in names)
        moved = sum(float((truth.end[n] - decayed * truth.start[n]).square().sum()) for n in names)
        found[side] = (off / moved) ** 0.5
    for key, want in (("loss", truth.losses), ("grad_norm", truth.grad_norms)):
        off = sum((r[key] / w - 1) ** 2 for r, w in zip(records, want, strict=True))
        found[key] = (off / len(want)) ** 0.5
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("answers", [False], indirect=True)
def test_in_bfloat16_it_is_about_as_far_off_as_one_process(
    setting: Any, answers: dict[str, dict[Case, Any]]
) -> None:
    """From float32 on the rounded base: changes at most 2 × as far as one process of these types,
    loss and norm one rounding to bfloat16."""
    assert list(answers["bfloat16"]) == ROUNDED
    for case, got in answers["bfloat16"].items():
        truth = wanted(case, setting, base=rounded)
        alone = errors(as_answer(wanted(case, setting, base=torch.Tensor.bfloat16)), truth)
        assert all(1e-3 < alone[side] < 0.05 for side in ("lora_A", "lora_B")), alone

        bounds = {"loss": 2**-8, "grad_norm": 2**-8} | {
            side: 2 * alone[side] for side in ("lora_A", "lora_B")
        }
        off = errors(got, truth)
        assert all(off[key] <= bounds[key] for key in bounds), (case, off, bounds)
        off = errors(got, wanted(case, setting, alpha=1.1 * ALPHA, base=rounded))
        assert all(off[key] > bounds[key] for key in ("lora_A", "lora_B", "grad_norm")), off


def test_every_layout_and_stage_is_met() -> None:
    assert set(LAYOUTS) == {*ALGORITHMS, *TENSOR}
    met = [set(values) for values in zip(*CASES[False], strict=True)]
    assert met == [set(LAYOUTS), set(FULLY), *map(set, TURNS)]


def test_every_layout_and_stage_meets_everything() -> None:
    assert [len(CASES[full]) for full in (False, True)] == [9, 45]
    for place, name in [(0, layout) for layout in LAYOUTS] + [(1, stage) for stage in FULLY]:
        mine = [case for case in CASES[True] if case[place] == name]
        models, modules, *rest = (len(set(values)) for values in [*zip(*mine, strict=True)][2:])
        assert rest == [2, 2, 2] and (models, modules) >= (3, 4), name
