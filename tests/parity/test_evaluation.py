"""Evaluation in the layout of training against plain transformers in one process, and against none.

Layouts × ZeRO stages × sets × batches × packing pairwise on four processes, float32 to 1e-6, with
the weights that each evaluation met. Then: training with and without evaluation, bit for bit, its
checkpoints among it; and runs stopped before or inside an evaluation. One spawn for all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from tests.parity.test_training import ZERO
from tests.support.algorithms import ALGORITHMS
from tests.support.models import KINDS, Documents, make_documents, make_model
from tests.support.pairwise import pairwise
from tests.support.ranks import spawn
from tests.support.runs import close, held, prepared, run_recipe, small_recipe

pytestmark = pytest.mark.timeout(900)  # whichever test comes first waits for the ranks
RANKS, ROW, STEPS = 4, 48, 2
LAYOUTS: dict[str, tuple[str | None, int, int | None]] = {
    "whole": (None, 1, None),
    "ulysses 4": ("ulysses_cp", 4, None),
    "ulysses 2": ("ulysses_cp", 2, None),
    "ring 4": ("ring_cp", 4, None),
    "ring 2": ("ring_cp", 2, None),
    "hybrid 2 × 2": ("hybrid_cp", 4, 2),
    "allgather 4": ("allgather_cp", 4, None),
    "planned 2 × 2": ("planned_cp", 4, 2),
    "planned 2": ("planned_cp", 2, 1),
}
"""Algorithm, context_parallel, ulysses_degree_in_cp; what is left of four processes: replicas."""
SETS: dict[str, tuple[list[int], list[float]]] = {
    "few": ([48, 20, 33], [0.0, 0.9, 0.4]),
    "many": ([31, 17, 48, 20, 28, 40, 8], [0.0, 0.95, 1.0, 0.3]),
    "sparse": ([40], [0.93]),
}
"""Lengths and masks: fewer rows than replicas, rows that they do not divide, ranks without targets;
a document without any."""
CHOICES = (("few",), ("many",), ("sparse",), ("many", "few"))
MODELS = ("llama-8-2", "qwen2-6-2-mixed")
TOLERANCE = 1e-6
Weights = dict[str, torch.Tensor]


class Case(NamedTuple):
    """One run; rows: eval_micro_batch_size."""

    layout: str
    zero: str
    sets: tuple[str, ...]
    packed: bool
    rows: int | None
    checkpointing: bool
    model: str


def _meets(case: tuple[Any, ...]) -> bool:
    """Half of the stages for each layout, the other half for the next: a run takes seconds."""
    return (list(LAYOUTS).index(case[0]) + list(ZERO).index(case[1])) % 2 == 0


FACTORS = (tuple(LAYOUTS), tuple(ZERO), CHOICES, (True, False), (None, 2, 3), (True, False), MODELS)
CASES = [Case(*case) for case in pairwise(*FACTORS, legal=_meets)]
SOME = ("hybrid 2 × 2", "planned 2", "ring 2", "whole", "ulysses 2", "allgather 4")
PLAIN = [
    Case(layout, zero, ("many", "few"), bool(number % 2), 2, True, MODELS[0])
    for number, (layout, zero) in enumerate(zip(SOME, ZERO, strict=True))
]
"""Runs that are compared bit for bit with themselves without evaluation."""
DROPS = {0, 3}
"""Those of them that train an adapter with dropout: an evaluation has none, and leaves it on."""
STOPPED = {"stopped before": PLAIN[1], "stopped inside": PLAIN[4]}


def recipe(case: Case, folder: Path, **blocks: Any) -> dict[str, Any]:
    algorithm, context, ulysses = LAYOUTS[case.layout]
    parallel: dict[str, Any] = {}
    if algorithm:
        own = {"ulysses_degree_in_cp": ulysses} if ulysses else {}
        parallel = {"context_parallel": context, "context_parallel_algo": algorithm, **own}
    paths = [str(folder / f"{name}.jsonl") for name in case.sets]
    base: dict[str, Any] = {
        "data": {"packing": "best_fit" if case.packed else "none", "eval": paths},
        "parallel_config": parallel,
        "deepspeed": {"zero_optimization": ZERO[case.zero]},
        "training": {
            "steps": STEPS,
            "global_batch_size": 3,
            "eval_every_steps": 1,
            "eval_micro_batch_size": case.rows,
        },
        "memory": {"gradient_checkpointing": case.checkpointing},
    }
    merged = {key: {**base.get(key, {}), **blocks.get(key, {})} for key in {**base, **blocks}}
    return small_recipe(folder / case.model, folder / "train.jsonl", ROW, **merged)


def compared(case: Case, folder: Path, output: Path) -> Any:
    """Records of a run, on rank 0 the weights that each of its evaluations met, and how many
    parameters it left whole that ZeRO-3 splits."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    met: list[Weights] = []
    left: list[int] = []

    def watch(run: Any) -> None:
        evaluating, named = run.engine.evaluating, run.engine.module.named()

        @contextmanager
        def noted() -> Iterator[None]:
            met.append(held(run.engine))
            with evaluating():
                yield
            states = [getattr(p, "ds_status", None) for p in named.values()]
            left.append(sum(state == ZeroParamStatus.AVAILABLE for state in states))

        run.engine.evaluating = noted

    got = run_recipe(recipe(case, folder), output, before=watch)
    return (got[0], met, left) if got else None


def trained(case: Case, folder: Path, output: Path, *, evaluates: bool, drops: bool = False) -> Any:
    """Records of a run with or without evaluation, and every tensor of its checkpoints."""
    from uspft.checkpoint.folder import Checkpoint
    from uspft.engine.state import KINDS as HELD

    without = {"data": {"eval": None}, "training": {"eval_every_steps": None}}
    without["training"]["eval_micro_batch_size"] = None
    blocks: dict[str, Any] = {} if evaluates else without
    blocks = {key: dict(value) for key, value in blocks.items()}
    if drops:
        adapter = {"type": "lora", "rank": 4, "alpha": 64, "dropout": 0.5}
        blocks |= {"model": {"adapter": adapter}, "optimizer": {"learning_rate": 0.1}}
        blocks["export"] = {"huggingface": True}
    got = run_recipe(
        recipe(case, folder, checkpoint={"every_steps": 1, "keep_last": STEPS}, **blocks), output
    )
    if not got:
        return None
    saved = {}
    for at in sorted((output / "checkpoints").glob("step-*")):
        checkpoint = Checkpoint.open(at)
        saved[at.name] = {
            f"{kind}/{name}": checkpoint.tensor(kind, name)
            for name in checkpoint.names
            for kind in HELD
        }
    return *got, saved


def stopping(case: Case, folder: Path, output: Path, asks: Iterator[bool] | None) -> Any:
    """Four steps with an evaluation after each second; asks: what `stop` answers, call by call."""
    from uspft.training.loop import Interrupted, train

    blocks: dict[str, Any] = {
        "training": {"steps": 4, "eval_every_steps": 2},
        "checkpoint": {"every_steps": 100},
    }
    for answers in (asks, repeat(False)):
        if answers is None:
            continue
        run = prepared(recipe(case, folder, **blocks), output, resume=True)
        try:
            train(run, lambda answers=answers: next(answers))  # type: ignore[misc]
        except Interrupted:
            assert answers is asks
        close(run)
    if dist.get_rank() == 0:
        return [json.loads(line) for line in (output / "metrics.jsonl").open()]
    return None


def work(rank: int, folder: Path) -> dict[str, Any]:
    def place(kind: str, number: int) -> Path:
        return folder / "runs" / f"{kind}-{number}"

    found: dict[str, Any] = {
        "compared": [compared(c, folder, place("compared", i)) for i, c in enumerate(CASES)],
        "trained": [
            [
                trained(c, folder, place(f"trained-{on}", i), evaluates=on, drops=i in DROPS)
                for on in (False, True)
            ]
            for i, c in enumerate(PLAIN)
        ],
    }
    answers = {"stopped before": [False], "stopped inside": [False, False, False]}
    for name, first in answers.items():
        output = folder / "runs" / name.replace(" ", "-")
        asks = chain(first, repeat(True))
        found[name] = [
            stopping(STOPPED[name], folder, output.with_suffix(".straight"), None),
            stopping(STOPPED[name], folder, output, asks),
        ]
    return found if rank == 0 else {}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Documents]]:
    folder = tmp_path_factory.mktemp("evaluation")
    for model in MODELS:
        make_model(folder / model, **KINDS[model])
    make_documents(folder / "train.jsonl", [48, 31, 17, 20, 28, 45], masked=[0.0, 0.3])
    sets = {
        name: make_documents(folder / f"{name}.jsonl", lengths, masked=masked)
        for name, (lengths, masked) in SETS.items()
    }
    return folder, sets


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, dict[str, Documents]]) -> dict[str, Any]:
    return spawn(RANKS, work, setting[0])[0]


def alone(model: Path, weights: Weights, documents: list[Any]) -> tuple[float, int]:
    """Cross-entropy summed over the documents' targets, each alone in one process; their number."""
    net = transformers.AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager", dtype=torch.float32
    ).eval()
    missing, unexpected = net.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    found, count = 0.0, 0
    for ids, labels in documents:
        with torch.no_grad():
            logits = net(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        found += F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
        count += sum(label != -100 for label in labels[1:])
    return found, count


def mismatch(record: dict[str, Any], want: dict[str, tuple[float, int]]) -> list[str]:
    """What differs by more than 1e-6, over all sets and in each."""
    sums, counts = zip(*want.values(), strict=True)
    pairs = {"all": (record["eval_loss"], record["eval_target_tokens"], sum(sums), sum(counts))}
    perplexities = {"all": record["eval_perplexity"]}
    for title, one in record.get("eval_sets", {}).items():
        name = Path(title).stem
        pairs[name] = (one["loss"], one["target_tokens"], *want[name])
        perplexities[name] = one["perplexity"]
    found = []
    for name, (loss, targets, loss_sum, count) in pairs.items():
        if targets != count:
            found.append(f"{name}: {targets} targets, not {count}")
        expected = torch.tensor(loss_sum / count, dtype=torch.float64)
        if not abs(loss - expected) <= TOLERANCE * expected:
            found.append(f"{name}: loss {loss}, not {expected}")
        if not abs(perplexities[name] - expected.exp()) <= 10 * TOLERANCE * expected.exp():
            found.append(f"{name}: perplexity {perplexities[name]}")
    if set(pairs) != {"all", *(want if len(want) > 1 else ())}:
        found.append(f"sets {sorted(pairs)}")
    return found


def wanted(case: Case, weights: Weights, setting: tuple[Path, dict[str, Documents]]) -> Any:
    folder, sets = setting
    return {name: alone(folder / case.model, weights, sets[name].documents) for name in case.sets}


def test_evaluation_equals_one_process(
    answers: dict[str, Any], setting: tuple[Path, dict[str, Documents]]
) -> None:
    assert len(answers["compared"]) == len(CASES)
    wrong = {}
    for case, (records, met, left) in zip(CASES, answers["compared"], strict=True):
        kinds = [("loss" in record, record["step"]) for record in records]
        assert kinds == [(True, 1), (False, 1), (True, 2), (False, 2)]
        evaluations = [record for record in records if "eval_loss" in record]
        assert len(met) == len(evaluations) == STEPS
        moved = [name for name in met[0] if not torch.equal(met[0][name], met[1][name])]
        assert moved, "both evaluations met the same weights"
        assert left == [0, 0], f"{case}: an evaluation leaves memory taken"
        for record, weights in zip(evaluations, met, strict=True):
            if found := mismatch(record, wanted(case, weights, setting)):
                wrong[case, record["step"]] = found
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())


def test_the_comparison_finds_one_changed_label(
    answers: dict[str, Any], setting: tuple[Path, dict[str, Documents]]
) -> None:
    """Its own control: another label, a target less, a document left out, each in every case."""
    folder, sets = setting
    for case, (records, met, _) in zip(CASES, answers["compared"], strict=True):
        record, name = records[-1], case.sets[-1]
        want = wanted(case, met[-1], setting)
        first, *rest = sets[name].documents
        changed = [first[1][-1] % 90 + 3, -100]
        wrong = [[(first[0], [*first[1][:-1], label]), *rest] for label in changed]
        for documents in [*wrong, rest] if rest else wrong:
            other = {**want, name: alone(folder / case.model, met[-1], documents)}
            assert mismatch(record, other), (case, documents)
        assert mismatch({**record, "eval_loss": float("nan")}, want)


SAME = ("loss", "grad_norm", "learning_rate", "target_tokens", "comm_bytes", "attention_balance")


def test_training_is_bit_for_bit_as_without_evaluation(answers: dict[str, Any]) -> None:
    assert len(answers["trained"]) == len(PLAIN) == len(ZERO)
    for case, (without, with_) in zip(PLAIN, answers["trained"], strict=True):
        steps = [record for record in with_[0] if "loss" in record]
        assert len(with_[0]) == 2 * len(steps) == 2 * len(without[0])
        for key in SAME:
            assert [r[key] for r in steps] == [r[key] for r in without[0]], (case, key)
        assert all(torch.equal(without[1][name], end) for name, end in with_[1].items()), case
        assert without[2].keys() == with_[2].keys() and len(with_[2]) == STEPS
        for at, tensors in with_[2].items():
            assert tensors.keys() == without[2][at].keys()
            assert all(torch.equal(without[2][at][key], x) for key, x in tensors.items()), case
        losses = [record["eval_loss"] for record in with_[0] if "eval_loss" in record]
        assert len(set(losses)) == STEPS, "what was trained does not show"


def test_nothing_is_dropped_in_an_evaluation(
    answers: dict[str, Any], setting: tuple[Path, dict[str, Documents]]
) -> None:
    """The last one meets the weights that the run leaves, with the adapter merged."""
    for number in DROPS:
        records = answers["trained"][number][1][0]
        weights = load_file(setting[0] / f"runs/trained-True-{number}/hf/model.safetensors")
        base = load_file(setting[0] / PLAIN[number].model / "model.safetensors")
        assert mismatch(records[-1], wanted(PLAIN[number], weights, setting)) == []
        assert mismatch(records[-1], wanted(PLAIN[number], base, setting))


@pytest.mark.parametrize("how", ["stopped before", "stopped inside"])
def test_a_resumed_run_evaluates_what_is_missing(answers: dict[str, Any], how: str) -> None:
    keys = ("step", "eval_loss", "eval_perplexity", "eval_target_tokens", "eval_sets")
    straight, resumed = answers[how]
    at = resumed.index({"resumed_from_step": 2})
    assert "eval_loss" in resumed[at + 1] and not any("eval_loss" in r for r in resumed[:at])
    ends = [
        [[r[key] for key in keys] for r in records if "eval_loss" in r]
        for records in (straight, resumed)
    ]
    assert [step for step, *_ in ends[0]] == [2, 4]
    assert ends[0] == ends[1]
    losses = [[r["loss"] for r in records if "loss" in r] for records in (straight, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_every_algorithm_and_stage_is_tried() -> None:
    algorithms = {LAYOUTS[case.layout][0] or "whole" for case in CASES}
    assert algorithms == set(ALGORITHMS) and {case.zero for case in CASES} == set(ZERO)
    assert len({(case.layout, case.zero) for case in CASES}) == len(LAYOUTS) * len(ZERO) // 2
    assert {choice for case in CASES for choice in case.sets} == set(SETS)
