"""Pipelines of two and four ranks beside plain transformers in one process.

Loss, norm before clipping, Adam's mean of the first step's clipped gradients and the weights.
"""

from __future__ import annotations

import faulthandler
import time
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from tests.support.models import ARCHITECTURES, Documents, Reference, make_documents, reference
from tests.support.ranks import spawn
from tests.support.runs import held, prepared, small_recipe
from tests.support.stages import ZERO

LAYERS, ROW, STEPS, RATE, CLIP = 5, 48, 2, 1e-3, 0.5
LENGTHS = [[31, 17], [48], [20, 28], [40, 8], [33, 15], [25, 23], [29, 19], [26, 22]]


@dataclass(frozen=True)
class Case:
    """One run."""

    kind: str
    ranks: int
    virtual: int = 1
    zero: str = "zero1"
    rows: int = 4
    data: int = 1
    context: int = 1
    tensor: int = 1
    tied: bool = False
    algorithm: str = "ring_cp"
    beside: str = ""
    """What else the recipe asks for, by its name in BESIDE."""

    @property
    def title(self) -> str:
        degrees = f"p{self.ranks}v{self.virtual}m{self.rows // self.data}"
        beside = f"d{self.data}c{self.context}t{self.tensor}"
        words = f"{self.algorithm * (self.context > 1)} {self.beside}".strip()
        return f"{self.kind}{'-tied' * self.tied} {degrees} {beside} {self.zero} {words}".strip()

    @property
    def world(self) -> int:
        return self.ranks * self.data * self.context * self.tensor


CASES = [
    Case("llama", 2, zero="zero1"),
    Case("llama", 2, zero="zero2", tied=True),
    Case("llama", 2, zero="zero3 whole", rows=2, tied=True),
    Case("llama", 2, zero="zero3 whole", rows=1),
    Case("qwen2", 2, 2, zero="zero1", rows=3, tied=True),
    Case("llama", 2, 2, zero="zero3 whole", rows=4, tied=True),
    Case("llama", 2, 2, zero="zero2", rows=2),
    Case("llama", 4, zero="zero1", tied=True),
    Case("llama", 4, zero="zero3 whole", rows=2, tied=True),
    Case("llama", 2, zero="zero1", data=2, tied=True),
    Case("llama", 2, zero="zero2", data=2, tied=True),
    Case("llama", 2, zero="zero3 whole", data=2, tied=True),
    Case("llama", 2, 2, zero="zero1", data=2),
    Case("llama", 2, zero="zero3 whole", context=2, tied=True),
    Case("llama", 2, zero="zero2", tensor=2, tied=True),
    Case("llama", 2, zero="zero1", context=2, algorithm="ulysses_cp"),
    Case("llama", 2, 2, zero="zero3 whole", context=2, algorithm="planned_cp", tied=True),
    Case("llama", 2, zero="zero3 whole", tensor=2, tied=True, beside="tokens"),
    Case("llama", 2, 2, zero="zero1", tensor=2, tied=True, beside="mesh"),
    Case("gemma3_text", 2, zero="zero1", beside="recompute", tied=True),
    Case("granite", 2, 2, zero="zero3 whole", beside="tiles"),
    Case("llama", 1, zero="zero2", data=2, tied=True),
]
GOES_ON = {
    Case("llama", 2, 2, zero="zero3 whole", rows=4, tied=True): CASES[-1],
    CASES[-1]: Case("llama", 2, zero="zero1", rows=4, tied=True),
    Case("llama", 4, zero="zero1", tied=True): Case("llama", 2, 2, zero="zero2", data=2, tied=True),
    Case("llama", 2, zero="zero3 whole", data=2, tied=True): Case(
        "llama", 4, zero="zero3 whole", rows=4, tied=True
    ),
}
"""What is saved after a step under one goes on under the other."""


def make(folder: Path, case: Case) -> Path:
    name, own = ARCHITECTURES[case.kind]
    path = folder / f"{case.kind}-{case.tied}"
    if path.exists():
        return path
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        initializer_range=0.08,
        max_position_embeddings=512,
        **{**own, "tie_word_embeddings": case.tied},
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


BESIDE: dict[str, dict[str, Any]] = {
    "tokens": {"parallel_config": {"use_seq_parallel": True}},
    "mesh": {"parallel_config": {"tensor_parallel_algo": "meshslice", "tensor_mesh": [1, 2]}},
    "tiles": {"memory": {"loss_tile_tokens": 5, "mlp_tile_tokens": 7}},
    "adapter": {"model": {"adapter": {"type": "lora", "rank": 4, "alpha": 8}}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "recompute": {"memory": {"gradient_checkpointing": True}},
}


def recipe(case: Case, folder: Path, data: Path) -> dict[str, Any]:
    parallel: dict[str, Any] = {
        "pipeline_stage": case.ranks,
        "pp_interleave_num": case.virtual,
        "model_parallel": case.tensor,
    }
    if case.context > 1:
        parallel |= {"context_parallel": case.context, "context_parallel_algo": case.algorithm}
    parallel |= BESIDE.get(case.beside, {}).get("parallel_config", {})
    return small_recipe(
        folder / f"{case.kind}-{case.tied}",
        data,
        ROW,
        model=BESIDE.get(case.beside, {}).get("model", {}),
        data={"packing": "best_fit"},
        parallel_config=parallel,
        deepspeed={"zero_optimization": ZERO[case.zero]},
        memory=BESIDE.get(case.beside, {}).get("memory", {}),
        training={"steps": STEPS, "global_batch_size": case.rows, "max_grad_norm": CLIP},
    )


def saved(run: Any, folder: Path) -> None:
    from uspft.checkpoint.model_files import write_model_files
    from uspft.checkpoint.save import save_checkpoint

    def describe(at: Path) -> dict[str, Any]:
        write_model_files(at / "model", run.config, run.job, 1)
        found: dict[str, Any] = run.job.identity
        return found

    folder.mkdir(exist_ok=True)
    save_checkpoint(run.engine, folder, 1, 2, describe)


def resumed(rank: int, pairs: dict[Case, Case], folder: Path, data: Path) -> dict[Case, Any]:
    found = {}
    for before, case in pairs.items():
        faulthandler.dump_traceback_later(120, exit=True)
        asked = recipe(case, folder, data)
        run = prepared(asked, folder / f"saved {before.title}", resume=True)
        assert run.first_step == 1
        result = run.engine.step(run.loader.batches(2), RATE, False)
        found[before] = result.loss, result.grad_norm, held(run.engine)
        run.engine.close()
    faulthandler.cancel_dump_traceback_later()
    return found


def trained(rank: int, cases: list[Case], folder: Path, data: Path) -> dict[Case, Any]:
    from uspft.training.evaluate import evaluate

    found = {}
    for number, case in enumerate(cases):
        faulthandler.dump_traceback_later(120, exit=True)
        asked = recipe(case, folder, data)
        asked["data"]["eval"] = str(data)
        run = prepared(asked, folder / f"run {case.world} {number}")
        one: dict[str, Any] = {"losses": [], "norms": [], "targets": []}
        scores: Any = evaluate(run.engine, run.evaluation, lambda: False)
        (score,) = scores.values()
        one["evaluated"] = score.told(run.engine.module.objective)["loss"]
        for step in range(1, STEPS + 1):
            result = run.engine.step(run.loader.batches(step), RATE, False)
            one["losses"].append(result.loss)
            one["norms"].append(result.grad_norm)
            one["targets"].append(result.counts["target_tokens"])
            if step == 1:
                one["moments"] = held(run.engine, "exp_avg")
                if case in GOES_ON:
                    saved(run, folder / f"saved {case.title}")
        one["end"] = held(run.engine)
        run.engine.close()
        found[case] = one
    faulthandler.cancel_dump_traceback_later()
    return found


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("pipelines")
    data = make_documents(folder / "d.jsonl", list(chain(*LENGTHS)), masked=[0.0, 0.9, 0.3])
    for case in CASES:
        make(folder, case)
    return folder, data


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, Documents]) -> dict[Case, Any]:
    folder, data = setting
    found: dict[Case, Any] = {}
    for world in sorted({case.world for case in CASES}):
        mine = [case for case in CASES if case.world == world]
        found |= spawn(world, trained, mine, folder, data.path)[0]
    return found


def plain(
    case: Case, folder: Path, data: Documents, steps: int, rows: int | None = None
) -> Reference:
    number = rows or case.rows
    documents = iter(data.documents)
    every = [[next(documents) for _ in row] for row in LENGTHS]
    taken = [list(chain(*every[n : n + number])) for n in range(0, number * steps, number)]
    return reference(folder / f"{case.kind}-{case.tied}", taken, rate=RATE, clip=CLIP)


def far(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative difference, and whose it is; what is tiny is measured by the mean."""
    assert got.keys() == want.keys()
    total = sum(float(one.double().norm()) ** 2 for one in want.values())
    count = sum(one.numel() for one in want.values())

    def of(name: str) -> float:
        least = 1e-3 * (total * want[name].numel() / count) ** 0.5
        size = max(float(want[name].double().norm()), least)
        return float((got[name].double() - want[name].double()).norm()) / size

    with torch.no_grad():
        return max((of(name), name) for name in want)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_pipeline_equals_one_process(
    case: Case, setting: tuple[Path, Documents], answers: dict[Case, Any]
) -> None:
    folder, data = setting
    want, got = plain(case, folder, data, STEPS), answers[case]
    assert got["losses"] == pytest.approx(want.losses, rel=1e-6)
    assert got["norms"] == pytest.approx(want.grad_norms, rel=3e-6)
    assert min(want.grad_norms) > 1.5 * CLIP, "clipping must be active"
    assert got["targets"] == want.targets
    first = plain(case, folder, data, 1)
    assert far(got["moments"], first.moments)[0] < 1e-5
    assert moved_apart(got["end"], want) < MOVED
    every = plain(case, folder, data, 1, rows=len(LENGTHS))
    assert got["evaluated"] == pytest.approx(every.losses[0], rel=1e-6)


MOVED = 5e-3
"""By how much of their change weights may differ after Adam, which makes rounding of gradients near
0 a step: ranks alone come to 1.4e-3, and a table that does not come back to 4e-2."""


def moved_apart(end: dict[str, torch.Tensor], want: Reference) -> float:
    """The largest difference of a parameter's change, relative to it."""
    changes = [{name: at[name] - old for name, old in want.start.items()} for at in (end, want.end)]
    return far(*changes)[0]


@pytest.mark.timeout(600)
def test_a_checkpoint_goes_on_under_other_stages_and_without(
    setting: tuple[Path, Documents], answers: dict[Case, Any]
) -> None:
    folder, data = setting
    for world in (2, 4):
        pairs = {before: case for before, case in GOES_ON.items() if case.world == world}
        assert len(pairs) == 2
        for before, (loss, norm, end) in spawn(world, resumed, pairs, folder, data.path)[0].items():
            want = plain(before, folder, data, STEPS)
            assert loss == pytest.approx(want.losses[1], rel=1e-6), before
            assert norm == pytest.approx(want.grad_norms[1], rel=3e-6), before
            assert moved_apart(end, want) < MOVED, before


LIKE_ONE = [
    Case("llama", 2, zero="zero1", beside="adapter"),
    Case("llama", 2, 2, zero="zero3 whole", tied=True, beside="adapter"),
    Case("llama", 2, zero="zero2", beside="bfloat16"),
    Case("llama", 2, 2, zero="zero1", beside="bfloat16"),
]
"""Beside one process of the same recipe, without stages."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", LIKE_ONE, ids=lambda case: case.title)
def test_adapters_and_bfloat16_equal_a_run_without_stages(
    case: Case, setting: tuple[Path, Documents]
) -> None:
    folder, data = setting
    alone = replace(case, ranks=1, virtual=1)
    # Apart: in a process that has had an engine of another ZeRO stage bfloat16 rounds otherwise.
    (got,) = spawn(case.world, trained, [case], folder, data.path)[0].values()
    (want,) = spawn(1, trained, [alone], folder, data.path)[0].values()
    for what in ("losses", "norms", "evaluated"):
        assert got[what] == pytest.approx(want[what], rel=3e-6), what
    assert far(got["moments"], want["moments"])[0] < 1e-5


SLEEPERS = [
    Case("llama", 4, rows=3, tied=True),
    Case("llama", 2, 2, zero="zero3 whole", rows=3, context=2),
    Case("llama", 2, 2, rows=3, context=2, algorithm="ulysses_cp"),
]


def sleepy(rank: int, folder: Path, data: Path) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Norm and Adam's means of a step, without and with actions that sleep at random."""
    from uspft.engine.zero import ZeroEngine

    take, random, found = ZeroEngine.take, Random(rank), []

    def late(self: ZeroEngine, *args: Any) -> torch.Tensor:
        time.sleep(random.choice([0.0, 0.02, 0.08]))
        made = take(self, *args)
        time.sleep(random.choice([0.0, 0.02, 0.08]))
        return made

    for number, case in enumerate(SLEEPERS):
        for how in (take, late):
            faulthandler.dump_traceback_later(120, exit=True)
            out = folder / f"sleepy {number} {how.__name__}"
            run = prepared(recipe(case, folder, data), out)
            with patch.object(ZeroEngine, "take", how):
                norm = run.engine.step(run.loader.batches(1), RATE, False).grad_norm
            found.append((norm, held(run.engine, "exp_avg")))
            run.engine.close()
    faulthandler.cancel_dump_traceback_later()
    return found


@pytest.mark.timeout(300)
def test_ranks_that_are_late_at_random_change_no_bit(setting: tuple[Path, Documents]) -> None:
    folder, data = setting
    found = spawn(4, sleepy, folder, data.path)[0]
    assert len(found) == 2 * len(SLEEPERS)
    for (norm, plain_means), (late_norm, late_means) in zip(found[::2], found[1::2], strict=True):
        assert norm == late_norm
        assert all(torch.equal(late_means[name], mean) for name, mean in plain_means.items())


def broken(
    rank: int, what: str, case: Case, folder: Path, data: Path
) -> tuple[list[float], list[float]]:
    """Losses and norms of two steps of which something is left out."""
    from uspft.engine.pipelined import Pipeline

    faulthandler.dump_traceback_later(60, exit=True)
    results = []
    run = prepared(recipe(case, folder, data), folder / f"broken {what}")
    with patch(what, lambda *_: None) if "." in what else patch.object(Pipeline, what):
        for step in range(1, STEPS + 1):
            results.append(run.engine.step(run.loader.batches(step), RATE, False))
    faulthandler.cancel_dump_traceback_later()
    return [one.loss for one in results], [one.grad_norm for one in results]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "case", "at_least"),
    [
        ("uspft.engine.pipelined.begin_accumulation", CASES[5], 1e-2),
        ("uspft.engine.tied.TiedTable.add", CASES[1], 1e-2),
        ("updated", CASES[1], 1e-5),
    ],
)
def test_what_is_left_out_shows(
    what: str, case: Case, at_least: float, setting: tuple[Path, Documents]
) -> None:
    folder, data = setting
    want = plain(case, folder, data, STEPS)
    losses, norms = spawn(case.world, broken, what, case, folder, data.path)[0]
    apart = [
        abs(a / b - 1) for a, b in zip(losses + norms, want.losses + want.grad_norms, strict=True)
    ]
    assert max(apart) > at_least
