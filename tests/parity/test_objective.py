"""A new objective is one class and one row of the table: nothing else is told of it.

Two toys, whose losses are no sums over tokens: of pairs of documents that share a row, and of
single documents, whose rows run under several layouts in one step. Each document is split over
ranks; one process of transformers takes each alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from torch import Tensor

from tests.support import switching
from tests.support.degrees import wrong_of
from tests.support.launch import records_in
from tests.support.models import Documents, Reference, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, held, prepared, small_recipe
from tests.support.stages import ZERO
from uspft.config import RecipeError, load
from uspft.config.algorithms import OBJECTIVES, ObjectiveRow
from uspft.objective import Divisor, Term, document_sums, once

pytestmark = pytest.mark.timeout(600)

ROW, STEPS, PAIRS_PER_STEP, RATE, CLIP, BETA = 48, 2, 2, 1e-3, 0.05, 0.05
LENGTHS = [31, 17, 20, 28, 40, 8, 15, 33]
"""Of pairs, each of which fills a row."""
EACH_PAIR = Divisor("pairs", lambda batch: len(batch.share.documents) // 2)
EACH_DOCUMENT = Divisor("documents", lambda batch: len(batch.share.documents))


def of_pairs(logps: Tensor, before: Tensor) -> tuple[Tensor, ...]:
    """The loss of pairs of documents, one after the other, and how often the first is likelier.

    before: what another forward pass gave, which has no gradient.
    """
    first, second = (logps - before / 2).view(-1, 2).unbind(1)
    return -F.logsigmoid(BETA * (first - second)).sum(), (first > second).to(logps.dtype).sum()


def of_documents(logps: Tensor, before: Tensor) -> tuple[Tensor, ...]:
    return (F.softplus(-BETA * (logps - before / 2)).square().sum(),)


Values = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Toy:
    """What a function of documents' summed log-probabilities is as an objective: two forwards of a
    micro-batch, the first of which is a reference."""

    terms: tuple[Term, ...]
    values: Values

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, model: Any, batch: Any, scales: Any) -> Tensor:
        with torch.no_grad():
            before = self.logps(model, batch)
        values = torch.stack(type(self).values(self.logps(model, batch), before))
        return once(values * values.new_tensor(scales), batch)

    def logps(self, model: Any, batch: Any) -> Tensor:
        call = model.begin(batch)
        hidden = model.layers(call, model.embedding(call)).hidden
        return document_sums(-model.head(call, hidden, None), batch)

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"twice": 2 * means["loss"]}

    def loss_of_guessing(self, vocabulary: int) -> float | None:
        return None


class Pairs(Toy):
    terms = Term("loss", EACH_PAIR), Term("likelier", EACH_PAIR)
    values = of_pairs


class Singles(Toy):
    terms = (Term("loss", EACH_DOCUMENT),)
    values = of_documents


ROWS = [
    ObjectiveRow("pairs", f"{__name__}:Pairs"),
    ObjectiveRow("singles", f"{__name__}:Singles"),
]
HYBRID = {"context_parallel": 4, "context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": 2}
TENSOR = {"model_parallel": 2}
TOKENS = {"model_parallel": 2, "use_seq_parallel": True}
BOTH = {**TOKENS, "context_parallel": 2, "context_parallel_algo": "ring_cp"}
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "ulysses 2 × ring 2, ZeRO 1": (HYBRID, "zero1", {}),
    "ulysses 2 × ring 2, ZeRO 3": (HYBRID, "zero3 whole", {"loss_tile_tokens": 3}),
    "tensor 2, ZeRO 1": (TENSOR, "zero1", {"loss_tile_tokens": 5}),
    "tensor 2, ZeRO 3": (TENSOR, "zero3 whole", {}),
    "tensor 2 with tokens, ZeRO 1": (TOKENS, "zero1", {}),
    "tensor 2 with tokens × ring 2, ZeRO 3": (BOTH, "zero3", {"gradient_checkpointing": True}),
}
SWITCHED = {
    "in place": switching.Case("both", "zero3"),
    "moved": switching.Case("tensor held", "zero1", moves=True),
}


def recipe(name: str, folder: Path, data: Documents) -> dict[str, Any]:
    parallel, zero, memory = CASES[name]
    return small_recipe(
        folder / "model",
        data.path,
        ROW,
        data={"packing": "best_fit", "eval": str(data.path)},
        parallel_config=parallel,
        deepspeed={"zero_optimization": ZERO[zero]},
        training={
            "objective": "pairs",
            "steps": STEPS,
            "global_batch_size": PAIRS_PER_STEP,
            "max_grad_norm": CLIP,
        },
        memory={"gradient_checkpointing": False, **memory},
    )


def ran(asked: dict[str, Any], output: Path) -> Any:
    """The records of a run, what its weights become, and Adam's mean of its gradients."""
    from uspft.training.loop import train

    run = prepared(asked, output)
    train(run, lambda: False)
    ended = held(run.engine), held(run.engine, "exp_avg")
    close(run)
    return records_in(output / "metrics.jsonl"), *ended


FAULTS: dict[str, tuple[str, Any]] = {
    "left out": ("sum_over", lambda x, *_: x),
    "multiplied": ("_unchanged", lambda gradient: gradient * 4),
}
"""What another rank holds of a document is left out of its sum; a gradient that all four ranks have
alike is summed over them, as that of a differentiable all-reduce is."""


@contextmanager
def broken(fault: str) -> Iterator[None]:
    name, instead = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"uspft.objective.{name}", instead)
        yield


def work(rank: int, folder: Path, pairs: Documents, singles: Documents) -> dict[str, Any]:
    OBJECTIVES.update((row.name, row) for row in ROWS)
    found = {name: ran(recipe(name, folder, pairs), folder / name) for name in CASES}
    for name, case in SWITCHED.items():
        asked = switching.recipe(case, folder, singles, objective="singles")
        found[name] = ran(asked, folder / name)
    for fault in FAULTS:
        with broken(fault):
            found[fault] = ran(recipe(next(iter(CASES)), folder, pairs), folder / fault)
    return found if rank == 0 else {}


def alone(
    folder: Path,
    steps: list[list[Any]],
    values: Values,
    each: int,
    clip: float,
) -> tuple[Reference, Callable[[list[Any]], list[float]]]:
    """The same steps in one process, each document alone; and what the trained model evaluates to.

    each: the documents that count as one.
    """
    net = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).train()
    trained = dict(net.named_parameters())
    start = {name: p.detach().clone() for name, p in trained.items()}
    groups = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": 1.0},
        {"params": [p for p in trained.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)

    def means(documents: list[Any]) -> list[Tensor]:
        logps = []
        for ids, labels in documents:
            logits = net(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            logps.append(-F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
        every = torch.stack(logps)
        return [value * each / len(documents) for value in values(every, every.detach())]

    losses, norms, moments = [], [], tuple[dict[str, Tensor], ...]()
    for documents in steps:
        adam.zero_grad()
        loss = means(documents)[0]
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), clip)))
        losses.append(float(loss.detach()))
        adam.step()
        held = {name: adam.state[p]["exp_avg"].clone() for name, p in trained.items()}
        moments = held, moments[-1] if moments else held
    counts = [len(documents) // each for documents in steps]
    end = {name: p.detach().clone() for name, p in trained.items()}
    want = Reference(losses, norms, counts, [RATE] * len(steps), start, end, *moments)
    return want, lambda documents: [float(mean.detach()) for mean in means(documents)]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents, Documents]:
    folder = tmp_path_factory.mktemp("objective")
    for name in ("model", "llama"):
        make_model(folder / name, "llama", heads=8, kv_heads=4)
    pairs = make_documents(folder / "pairs.jsonl", LENGTHS, masked=[0.0, 0.4, 0.8])
    singles = make_documents(folder / "singles.jsonl", switching.LENGTHS, masked=[0.0, 0.5])
    return folder, pairs, singles


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, Documents, Documents]) -> dict[str, Any]:
    found: dict[str, Any] = spawn(4, work, *setting)[0]
    return found


def steps_of(got: Any, counter: str) -> Any:
    """The answer with its steps' records alone, what they count under the name that is compared."""
    records, *ends = got
    steps = [{**record, "target_tokens": record[counter]} for record in records if "loss" in record]
    return steps, *ends


def wanted_pairs(folder: Path, data: Documents) -> Any:
    each = 2 * PAIRS_PER_STEP
    steps = [data.documents[at : at + each] for at in range(0, len(LENGTHS), each)]
    return alone(folder / "model", steps, of_pairs, 2, CLIP)


def test_pairs_of_documents_train_as_in_one_process(
    setting: tuple[Path, Documents, Documents], answers: dict[str, Any]
) -> None:
    folder, data, _ = setting
    want, evaluated = wanted_pairs(folder, data)
    assert all(norm > CLIP for norm in want.grad_norms), "clipping is active"
    wrong = {name: wrong_of(steps_of(answers[name], "pairs"), want) for name in CASES}
    assert {name: found for name, found in wrong.items() if found} == {}
    loss, likelier = evaluated(data.documents)
    for name in CASES:
        records = answers[name][0]
        (told,) = [record for record in records if "eval_loss" in record]
        assert told["eval_loss"] == pytest.approx(loss, rel=1e-4), name
        assert told["eval_twice"] == 2 * told["eval_loss"]
        assert told["eval_likelier"] == likelier and told["eval_pairs"] == len(LENGTHS) // 2
        assert "eval_perplexity" not in told
        for record in (record for record in records if "loss" in record):
            assert record["likelier"] in (0, 0.5, 1) and "target_tokens" not in record
            assert ("objective" in record["comm_bytes"]) == ("ring" in name)


def test_a_document_without_its_part_on_another_rank_is_seen(
    setting: tuple[Path, Documents, Documents], answers: dict[str, Any]
) -> None:
    folder, data, _ = setting
    want, _ = wanted_pairs(folder, data)
    found = wrong_of(steps_of(answers["left out"], "pairs"), want)
    assert any(line.startswith("loss ") for line in found)
    assert any(line.startswith("grad_norm ") for line in found)
    assert sum("the gradient of" in line for line in found) > len(want.moments) / 2


def test_a_gradient_that_ranks_sum_again_is_seen(
    setting: tuple[Path, Documents, Documents], answers: dict[str, Any]
) -> None:
    folder, data, _ = setting
    want, _ = wanted_pairs(folder, data)
    first = next(record for record in answers["multiplied"][0] if "loss" in record)
    assert first["loss"] == pytest.approx(want.losses[0], rel=1e-5), "which alone shows nothing"
    assert first["grad_norm"] == pytest.approx(4 * want.grad_norms[0], rel=1e-4)


def test_documents_train_under_several_layouts_in_one_step(
    setting: tuple[Path, Documents, Documents], answers: dict[str, Any]
) -> None:
    folder, _, data = setting
    each = switching.BATCH
    steps = [data.documents[at : at + each] for at in range(0, len(data.documents), each)]
    want, _ = alone(folder / "llama", steps, of_documents, 1, switching.CLIP)
    wrong = {name: wrong_of(steps_of(answers[name], "documents"), want) for name in SWITCHED}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_nobody_knows_an_objective_without_its_row(tmp_path: Path) -> None:
    asked = small_recipe(tmp_path, tmp_path, ROW, training={"objective": "casual"})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(asked))
    with pytest.raises(RecipeError, match="did you mean `causal`"):
        load(path)
