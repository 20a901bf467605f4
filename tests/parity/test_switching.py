"""Steps whose rows run under several layouts side by side, beside one process of transformers.

Samples of a step are bucketed by length, packed inside each bucket, and dealt out to groups of
different degrees: context parallel alone, tensor parallel held whole and over two ranks, both.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import Documents, make_documents, make_model, reference
from tests.support.ranks import spawn
from tests.support.runs import GROUPS, prepared, run_recipe
from tests.support.switching import (
    BATCH,
    BOUNDS,
    CLIP,
    LENGTHS,
    RATE,
    STEPS,
    Case,
    check,
    documents_of,
    recipe,
    wanted,
    without_marks,
    wrong_of,
)
from uspft.comm import total
from uspft.engine.quarantine import reduce_in_one_order
from uspft.parameters import counting
from uspft.switching.move.switch import deliveries, held_stock, owned_stock

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "heads": 8, "kv_heads": 4},
    "qwen3": {"kind": "qwen3", "heads": 8, "kv_heads": 2},
    "tied": {"kind": "qwen3", "heads": 4, "kv_heads": 2, "tie_word_embeddings": True},
    "deep": {"kind": "llama", "heads": 4, "kv_heads": 2, "num_hidden_layers": 4},
}


NAMES = {
    "context": ["data4", "ring2-data2", "ulysses4"],
    "planned": ["data4", "planned4", "ulysses2-ring2"],
    "alike": ["ulysses4"] * 3,
    "tensor": ["data4", "tensor2-data2", "tensor4"],
    "tensor held": ["tensor2-data2", "tensor2-ring2", "tensor4"],
    "both": ["data4", "ring2-data2", "tensor2-ring2"],
    "tokens": ["data4", "tensor2-data2", "tensor4"],
    "stages": ["data4", "tensor2-data2", "tensor2-pipeline2"],
    "stages shared": ["data2-pipeline2", "ring2-pipeline2", "pipeline4"],
    "stages or tensor": ["tensor2-data2", "data2-pipeline2", "pipeline4"],
}


CASES = [
    Case("context", "zero2", rows=2, checkpointed=True),
    Case("planned", "zero3", "qwen3", packing="none"),
    Case("tensor", "zero3", "qwen3", checkpointed=True),
    Case("tensor held", "zero2", tiles=True),
    Case("both", "zero3", rows=3),
    Case("tokens", "zero1", "qwen3"),
    Case("tokens", "zero3", adapter=True, checkpointed=True),
    Case("tensor held", "zero1", "qwen3", rows=2, checkpointed=True, moves=True),
    Case("both", "zero1", adapter=True, moves=True),
    # weights start in pipeline4, the most sharded layout, which divides no matrices
    Case("stages or tensor", "zero1", "deep", moves=True),
    Case("stages", "zero1", "tied", moves=True),
    Case("stages shared", "zero1", "deep", rows=2, adapter=True, checkpointed=True, moves=True),
]
STAGES = CASES[-2]
GROUPED = Case("tokens", "zero2", checkpointed=True, adapter=True, tiles=True, groups=True)
OTHERS = [
    Case("context", "zero1"),
    Case("context", "zero3"),
    Case("alike", "zero1", packing="none"),
    Case("planned", "zero1", "qwen3", rows=2),
    Case("tensor", "zero1"),
    Case("tensor held", "zero1", "qwen3", rows=2),
    Case("tensor held", "zero3", checkpointed=True),
    Case("both", "zero1", adapter=True),
    Case("tensor", "zero1", moves=True),
    Case("tokens", "zero1", "qwen3", packing="none", moves=True),
]
"""More of them, by `--full`."""
RESUMED = {
    Case("tensor held", "zero3"): Case("alike", "zero2"),
    Case("planned", "zero3", "qwen3"): Case("stages", "zero1", "qwen3", moves=True),
    STAGES: Case("tensor held", "zero3", "tied"),
}
"""The strategies of the first step, and those under which the run goes on."""
OTHERS_RESUMED = {
    Case("context", "zero1"): Case("tensor", "zero3"),
    Case("tensor", "zero1", moves=True): Case("context", "zero3"),
}

EPOCH = {"epochs": 1, "global_batch_size": 13}
"""Of 18 samples, so that the last step has five."""


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("switching")
    for name, kind in MODELS.items():
        make_model(folder / name, **kind)
    return folder, make_documents(folder / "d.jsonl", LENGTHS, masked=[0.0, 0.9, 0.4])


def others(rank: int, folder: Path, data: Documents) -> dict[Any, Any]:
    return ran(OTHERS, OTHERS_RESUMED, folder / "others", folder, data)


def ran(
    cases: list[Case],
    resumed: dict[Case, Case],
    output: Path,
    folder: Path,
    data: Documents,
) -> dict[Any, Any]:
    """By case, or by pair of cases that one run goes through."""
    found: dict[Any, Any] = {}
    for number, case in enumerate(cases):
        found[case] = run_recipe(recipe(case, folder, data), output / f"run-{number}")
    for number, (first, then) in enumerate(resumed.items()):
        own, saved = output / f"resumed-{number}", {"checkpoint": {"every_steps": 1}}
        run_recipe({**recipe(first, folder, data, steps=1), **saved}, own)
        again = {**recipe(then, folder, data), **saved}
        found[first, then] = without_marks(run_recipe(again, own, resume=True))
    return found


def work(rank: int, folder: Path, data: Documents) -> dict[Any, Any]:
    found = ran(CASES, RESUMED, folder / "runs", folder, data)
    found["an epoch"] = run_recipe(recipe(CASES[0], folder, data, **EPOCH), folder / "epoch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uspft.switching.deal.dealing.SwitchingLoader.of_group", first_row_twice)
        patch.setattr("uspft.training.guards.Guards.rows", lambda *_: None)
        found["wrong"] = run_recipe(recipe(CASES[0], folder, data), folder / "wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uspft.parameters.counting.times", both_ends_for_one)
        found["both ends"] = run_recipe(recipe(STAGES, folder, data), folder / "both-ends")
    for name, mended in (("other orders", True), ("summed as they come", False)):
        with pytest.MonkeyPatch.context() as patch:
            theirs = partial(come_in_other_orders, rank, mended)
            patch.setattr("uspft.engine.zero.reduce_in_one_order", theirs)
            found[name] = run_recipe(recipe(GROUPED, folder, data), folder / name)
    found["switch"] = switched(folder, data)
    return found if rank == 0 else {}


def come_in_other_orders(rank: int, mended: bool, optimizer: Any, together: Any) -> None:
    """A layer's gradients come in an order of each rank's own, as under different layouts."""
    if mended:
        reduce_in_one_order(optimizer, together)
    take, waiting = optimizer.process_gradients, list[tuple[Any, int]]()
    of = {id(p): some for some in together for p in some}
    assert len(together) == 2, "a group for each layer, since ranks run different layouts"

    def come(parameter: Any, group: int) -> None:
        some = of.get(id(parameter), [parameter])
        waiting.append((parameter, group))
        if len(mine := [one for one in waiting if any(one[0] is p for p in some)]) == len(some):
            for one in mine[rank % len(some) :] + mine[: rank % len(some)]:
                take(*one)
            waiting[:] = [one for one in waiting if not any(one[0] is p for p in some)]

    optimizer.process_gradients = come


TIMES = counting.times


def both_ends_for_one(shards: Any, name: str, degree: int, *, splits_tokens: bool) -> int:
    """A fault: what the first and the last stage make of a tied table counts as one gradient."""
    found = TIMES(shards, name, degree, splits_tokens=splits_tokens)
    return found * (2 if name in shards.at_both_ends else 1)


def switched(folder: Path, data: Documents) -> tuple[tuple[int, int], tuple[float, float]]:
    """The bytes that this rank sends in a step with rows of every layout, and the planner's; and
    the step's loss, with what an evaluation of the same rows gave before."""
    run = prepared(recipe(STAGES, folder, data), folder / "counted")
    engine, everyone = run.engine, run.engine.holders.everyone
    batches = run.loader.batches(2)
    with engine.evaluating():
        told = [(batch.world.mesh.counts, engine.terms(batch)["loss"]) for batch in batches]
    once = sum(value for counts, value in told if counts)
    (loss,) = total([once], everyone, engine.device)
    everyone.books.close()
    result = engine.step(batches, RATE, stop=False)
    sent = everyone.books.close()["switch"]
    shapes, rank, planned = engine.shapes, engine.holders.rank, 0
    home, hosts = engine.holders.shards, tuple(GROUPS.host_of(each) for each in range(4))
    assert hosts == (0, 0, 1, 1)
    owned = owned_stock(home, shapes)
    assert len({batch.world.layout.stored_as for batch in batches}) == 3
    for shards in engine.every.values():
        for one in deliveries(owned, held_stock(shards, shapes), hosts):
            if one.sender != one.receiver:
                planned += 4 * one.leaves.elements * (rank in (one.sender, one.receiver))
    engine.close()
    return (sent, planned), (result.loss, loss / result.counts["target_tokens"])


def first_row_twice(loader: Any, group: Any) -> Any:
    """A fault: groups of single ranks all take the rows of the first of them."""
    world = loader.worlds[group.bucket]
    if world.layout.data == world.layout.ranks:
        plan = loader.plan(group.rows[0] // BATCH + 1)
        steps = [step for phase in plan.phases for step in phase.groups]
        group = next(one for step in steps for one in step if one.bucket == group.bucket)
    return loader.batch_of(world, group.rows)


@pytest.fixture(scope="module")
def answers(setting: tuple[Path, Documents]) -> dict[Any, Any]:
    found: dict[Any, Any] = spawn(4, work, *setting)[0]
    return found


def test_several_layouts_in_a_step_are_one_process(
    setting: tuple[Path, Documents], answers: dict[Any, Any]
) -> None:
    check({case: answers[case] for case in CASES}, *setting)


@pytest.mark.full
def test_more_layouts_in_a_step_are_one_process(setting: tuple[Path, Documents]) -> None:
    found = spawn(4, others, *setting)[0]
    assert len(found) == len(OTHERS) + len(OTHERS_RESUMED)
    check(found, *setting)


def test_a_row_that_two_groups_take_is_seen(
    setting: tuple[Path, Documents], answers: dict[Any, Any]
) -> None:
    folder, data = setting
    found = wrong_of(answers["wrong"], wanted("llama", False, folder, data.path))
    assert any("loss" in line for line in found)
    assert any("grad_norm" in line for line in found)


def test_a_table_whose_ends_count_as_one_is_seen(
    setting: tuple[Path, Documents], answers: dict[Any, Any]
) -> None:
    folder, data = setting
    found = wrong_of(answers["both ends"], wanted("tied", False, folder, data.path))
    assert any("grad_norm" in line for line in found)


def test_gradients_may_come_in_any_order(
    setting: tuple[Path, Documents], answers: dict[Any, Any]
) -> None:
    folder, data = setting
    want = wanted(GROUPED.model, GROUPED.adapter, folder, data.path)
    assert not wrong_of(answers["other orders"], want)
    assert any("grad_norm" in line for line in wrong_of(answers["summed as they come"], want))


def test_what_stages_move_is_what_was_planned(answers: dict[Any, Any]) -> None:
    """Weights to who needs them and gradients back, in float32, once into each of two hosts."""
    (sent, planned), (loss, evaluated) = answers["switch"]
    assert sent == planned > 0
    assert evaluated == pytest.approx(loss, rel=1e-6), "each row under its own layout"


def test_a_run_goes_on_under_other_strategies(
    setting: tuple[Path, Documents], answers: dict[Any, Any]
) -> None:
    check({pair: answers[pair] for pair in RESUMED.items()}, *setting)


def test_an_epoch_ends_with_its_last_sample(
    setting: tuple[Path, Documents], answers: dict[Any, Any]
) -> None:
    """Though the last step is a short one; rows that are counted on would begin anew."""
    folder, data = setting
    got, size = answers["an epoch"], EPOCH["global_batch_size"]
    documents = documents_of(data.path)
    assert len(documents) == STEPS * BATCH == 18
    assert [record["epoch"] for record in got[0]] == pytest.approx([size / 18, 1.0])
    assert "steps" not in recipe(CASES[0], folder, data, **EPOCH)["training"]
    steps = [documents[:size], documents[size:]]
    assert wrong_of(got, reference(folder / "llama", steps, rate=RATE, clip=CLIP)) == []


def test_a_record_tells_what_ran_under_each_strategy(answers: dict[Any, Any]) -> None:
    for case in CASES:
        layouts = NAMES[case.mix]
        for step, record in enumerate(answers[case][0]):
            lengths = LENGTHS[step * BATCH : (step + 1) * BATCH]
            parts = record["strategies"]
            assert [part["name"] for part in parts] == layouts
            assert record["strategy"] == " + ".join(dict.fromkeys(layouts))
            for low, bound, part in zip((0, *BOUNDS), BOUNDS, parts, strict=False):
                inside = [length for length in lengths if low < length <= bound]
                assert -(-sum(inside) // bound) <= part["rows"] <= len(inside)
                assert case.packing == "best_fit" or part["rows"] == len(inside)
                assert part["tokens"] == bound * part["rows"]
                assert (part["seconds"] > 0) == (part["rows"] > 0)
                alone = part["name"] == "data4"
                assert bool(part["comm_bytes"]) == (part["rows"] > 0 and not alone)
            assert ("switch_seconds" in record) == case.moves
            assert ("switch" in record["comm_bytes"]) == case.moves
            assert record["rows"] == sum(part["rows"] for part in parts)
            assert record["tokens"] == sum(part["tokens"] for part in parts)
