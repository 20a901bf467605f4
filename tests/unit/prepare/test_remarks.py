"""What other degrees of expert parallelism take, and the number of ranks that divide experts where
a recipe leaves it open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.data_cases import block, write_lengths
from tests.support.shapes import TINY
from uspft.checkpoint.folder import Checkpoint
from uspft.config import Recipe, load
from uspft.data.corpus.prepare import prepare
from uspft.job import Job
from uspft.planner.rank import as_long
from uspft.prepare.examine import Examined, examine
from uspft.prepare.make_plan import course_of, ranking_of, step_of
from uspft.prepare.remarks import (
    changes_on_resuming,
    expert_side,
    intervals_told,
    length_of_run,
    too_short,
)
from uspft.training.learning_rate import learning_rate

RECIPES = Path(__file__).parents[3] / "recipes"
LORA = "qwen3-30b-a3b-lora-ulysses-32k.yaml"
DEGREE = "parallel_config.expert_parallel"


def examined(name: str, *words: str, ranks: int = 8) -> Examined:
    return examine(RECIPES / name, words, 1, ranks)


def side(found: Examined) -> str | None:
    assert found.shape
    hardware = found.known.hardware_on(found.layout.ranks)
    return expert_side(found.recipe, found.shape, found.layout, hardware)


@pytest.mark.parametrize("hardware", ["h100", "l20"])
def test_auto_is_the_first_of_plan(hardware: str) -> None:
    found = examined(LORA, f"launch.hardware={hardware}")
    step = step_of(found)
    order = ranking_of(found, step).layouts
    own = found.layout
    asked = [
        one.layout.experts
        for one in order
        if one.layout.pipeline == 1 and (one.layout.ulysses, one.layout.data) == (2, 4)
    ]
    assert sorted(asked) == [1, 2, 4, 8]
    assert own.experts == asked[0] == int(found.recipe.parallel_config.expert_parallel)
    (line,) = [line for line in found.settled if line.startswith(f"auto: {DEGREE}: ")]
    assert f"{DEGREE}: {own.experts}, since with " in line


def test_links_decide_it() -> None:
    """Where gathers pass behind products experts stay; on slow links it pays to send tokens."""
    degrees = [examined(LORA, f"launch.hardware={name}").layout.experts for name in ("h100", "l20")]
    assert degrees[0] < degrees[1]


def test_a_model_without_experts_has_none_to_divide() -> None:
    name = "qwen3-8b-text-ring-64k.yaml"
    found = examined(name, f"{DEGREE}=auto")
    assert found.layout.experts == 1 and side(found) is None


@pytest.mark.parametrize(("rows", "degree"), [(1, 8), (4, 1)])
def test_check_says_what_other_degrees_take(rows: int, degree: int) -> None:
    """Each as `plan` prices a recipe that has it."""
    words = (f"training.micro_batch_size={rows}", "launch.hardware=l20")
    told = side(examined(LORA, f"{DEGREE}={degree}", *words))
    assert told and f"{rows * 16_384:,} tokens" in told and f"{128 // degree} of a layer's" in told
    others = [d for d in (1, 2, 4, 8) if d != degree][:3]
    seconds = {}
    for one in (degree, *others):
        found = examined(LORA, f"{DEGREE}={one}", *words)
        own = ranking_of(found, step_of(found)).own
        assert own
        seconds[one] = own.seconds
    said = [f"expert_parallel {d} takes {as_long(seconds[d], seconds[degree])}" for d in others]
    assert told.split("; ")[1:] == said and len({*said}) == 3


def examined_over(folder: Path, rows: int, **changes: Any) -> Examined:
    """A recipe of a model with 8 query heads, on as many processes as its degrees ask for."""
    (folder / "config.json").write_text(json.dumps({**TINY, "model_type": "llama"}))
    (folder / "d.jsonl").write_text('{"input_ids": [1, 2]}\n')
    tree = {
        "model": {"config": str(folder / "config.json"), "dtype": "float32"},
        "data": {"train": str(folder / "d.jsonl"), "sequence_length": 64},
        "training": {"steps": 1, "global_batch_size": rows, "micro_batch_size": 1},
        "launch": {"device": "cpu"},
    }
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value}
    (folder / "r.yaml").write_text(yaml.safe_dump(tree))
    return examine(folder / "r.yaml", [], 1, None)


def hybrid(ulysses: int, ring: int = 1, **more: Any) -> dict[str, Any]:
    ways = {"context_parallel": ulysses * ring, "ulysses_degree_in_cp": ulysses}
    return {**ways, "context_parallel_algo": "hybrid_cp", **more}


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (hybrid(8, 2), []),
        (
            hybrid(16, 2),
            [
                "parallel_config.ulysses_degree_in_cp: Ulysses splits 8 query heads over 16 ranks:"
                " 8 of them compute no attention; split heads 8 ways at most, and tokens the rest"
            ],
        ),
        (
            {"context_parallel": 16, "context_parallel_algo": "ulysses_cp"},
            [
                "parallel_config.context_parallel: Ulysses splits 8 query heads over 16 ranks: 8 of"
                " them compute no attention; split heads 8 ways at most, and tokens the rest"
            ],
        ),
        (
            hybrid(4, model_parallel=4),
            [
                "parallel_config.ulysses_degree_in_cp: Ulysses splits 2 query heads of a tensor "
                "rank over 4 ranks: 2 of them compute no attention; split heads 2 ways at most, "
                "and tokens the rest"
            ],
        ),
        ({"context_parallel": 16, "context_parallel_algo": "ring_cp"}, []),
    ],
)
def test_ulysses_ranks_without_heads(
    tmp_path: Path, parallel: dict[str, Any], told: list[str]
) -> None:
    assert examined_over(tmp_path, 1, parallel_config=parallel).wasted == told


@pytest.mark.parametrize(
    ("rows", "micro", "told"),
    [
        (8, 1, []),
        (4, 2, ["4 rows a step leave 4 of 8 places empty (one pass of 4 replicas, 2 rows each)"]),
        (1, 1, ["a row a step leaves 3 of 4 places empty (one pass of 4 rows)"]),
        (6, 1, ["6 rows a step leave 2 of 8 places empty (2 passes of 4 rows)"]),
    ],
)
def test_replicas_without_rows(tmp_path: Path, rows: int, micro: int, told: list[str]) -> None:
    found = examined_over(
        tmp_path, rows, training={"micro_batch_size": micro}, parallel_config={"data_parallel": 4}
    )
    fewer = "a smaller training.micro_batch_size, or " * (micro > 1) + "use fewer processes"
    remedy = f"which compute padding; write a multiple of {4 * micro}, or {fewer}"
    assert found.wasted == [f"training.global_batch_size: {line}, {remedy}" for line in told]


def test_one_replica_is_not_told_to_use_fewer_processes(tmp_path: Path) -> None:
    (line,) = examined_over(tmp_path, 1, training={"micro_batch_size": 2}).wasted
    assert "(one pass of 1 replica, 2 rows each)" in line
    assert line.endswith("; write a multiple of 2, or a smaller training.micro_batch_size")


def test_each_strategy_is_looked_at_and_its_samples_are_not(tmp_path: Path) -> None:
    strategies = [{"max_length": 16}, {"max_length": 64, **hybrid(16)}]
    (line,) = examined_over(tmp_path, 1, parallel_config={"strategies": strategies}).wasted
    assert line.startswith("parallel_config.strategies[1].ulysses_degree_in_cp: Ulysses splits 8 ")


def recipe(folder: Path, **changes: Any) -> Recipe:
    tree: dict[str, Any] = {
        "model": {"name_or_path": "x"},
        "data": {"train": "x", "sequence_length": 8, "shuffle": False},
        "optimizer": {"learning_rate": 0.01},
        "training": {"steps": 10, "global_batch_size": 2},
        **changes,
    }
    (folder / "r.yaml").write_text(json.dumps(tree))
    return load(folder / "r.yaml").recipe


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four rows of 8 tokens, of which 26 tokens are documents."""
    data = block(write_lengths(tmp_path / "a.jsonl", [8, 6, 7, 5]), sequence_length=8)
    return prepare(data, None, 10_000, tmp_path / "cache")


def test_rows_padding_steps_and_epochs_are_told(tmp_path: Path, corpus: Path) -> None:
    rows = "run: 4 rows of 8 tokens an epoch, 18.8% of them padding"
    assert length_of_run(recipe(tmp_path), corpus, 10) == [f"{rows}; 10 steps of 2 rows, 5 epochs"]
    once = {"epochs": 1, "global_batch_size": 3}
    told = length_of_run(recipe(tmp_path, training=once), corpus, 2)
    assert told == [f"{rows}; 2 steps of 3 rows, 1 epoch"]
    alone = {"steps": 3, "global_batch_size": 1}
    told = length_of_run(recipe(tmp_path, training=alone), corpus, 3)
    assert told == [f"{rows}; 3 steps of a row, 0.75 epochs"]
    many = {"steps": 10_000, "global_batch_size": 1}
    told = length_of_run(recipe(tmp_path, training=many), corpus, 10_000)
    assert told == [f"{rows}; 10,000 steps of a row, 2,500 epochs"]
    alone = {"steps": 1, "global_batch_size": 1}
    told = length_of_run(recipe(tmp_path, training=alone), corpus, 1)
    assert told == [f"{rows}; 1 step of a row, 0.25 epochs"]


def test_when_it_saves_and_evaluates_is_told(tmp_path: Path, corpus: Path) -> None:
    evaluated = {"train": "x", "eval": "y.jsonl", "sequence_length": 8, "shuffle": False}
    training = {"epochs": 6.5, "global_batch_size": 3, "eval_every_steps": 0.25}
    asked = recipe(
        tmp_path,
        data=evaluated,
        training=training,
        checkpoint={"every_epochs": 0.5, "keep_last": None},
    )
    # 26 rows are 9 steps; halves of an epoch end with rows 2, 4, 6, …, 26.
    course = course_of(asked, corpus)
    assert course == {"steps": 9, "saved_by_epochs": (1, 2, 3, 4, 5, 6, 7, 8, 9)}
    assert [*intervals_told(asked, Job(asked, corpus, identity={}, **course))] == [
        "checkpoints: after every 0.5 epochs (steps 1, 2, 3, …, 9) and at the end; all are kept",
        "evaluation: y.jsonl, after each 0.25 of all steps (steps 3, 6, 9) and at the end",
    ]
    assert [*intervals_told(asked, None)] == [
        "checkpoints: after every 0.5 epochs and at the end; all are kept",
        "evaluation: y.jsonl, after each 0.25 of all steps and at the end",
    ]
    share = recipe(tmp_path, checkpoint={"every_steps": 0.4})
    assert [*intervals_told(share, Job(share, corpus, 10, {}))] == [
        "checkpoints: after each 0.4 of all steps (steps 4, 8) and at the end; "
        "the newest 2 are kept"
    ]
    each = training | {"eval_every_steps": 1}
    often = recipe(tmp_path, data=evaluated, training=each, checkpoint={"every_epochs": 1})
    assert [*intervals_told(often, None)] == [
        "checkpoints: after every epoch and at the end; the newest 2 are kept",
        "evaluation: y.jsonl, after every step and at the end",
    ]
    stops = share.changed(training={"stop_step": 7})
    (line,) = intervals_told(stops, Job(stops, corpus, 10, {}))
    assert "(step 4)" in line
    plain = recipe(tmp_path, data=evaluated)
    assert [
        *intervals_told(plain, Job(plain, corpus, identity={}, **course_of(plain, corpus)))
    ] == [
        "evaluation: y.jsonl, at the end",
    ]


def test_epochs_that_are_fewer_steps_and_a_warm_up_without_end_are_told(
    tmp_path: Path, corpus: Path
) -> None:
    epochs = recipe(tmp_path, training={"epochs": 3, "global_batch_size": 8})
    told = length_of_run(epochs, corpus, 2)
    assert told[:-1] == [
        "warning: training.global_batch_size: is 8 rows, and an epoch has 4, so that 3 epochs "
        "are 2 steps; write at most 4 for a step an epoch"
    ]
    rises = recipe(tmp_path, lr_schedule={"warmup_steps": 10})
    assert [*too_short(rises, 10)] == [
        "lr_schedule.warmup_steps: is 10, and the run has 10 steps, so that the learning rate "
        "rises to its end; write fewer, or warmup_ratio"
    ]
    assert not [*too_short(rises, 11)]


def test_with_strategies_an_epoch_ends_with_its_last_sample(tmp_path: Path) -> None:
    four = block(write_lengths(tmp_path / "four.jsonl", [4] * 4), sequence_length=8)
    corpus = prepare(four, None, 10_000, tmp_path / "cache")
    blocks = {
        "training": {"epochs": 1.5, "global_batch_size": 2},
        "checkpoint": {"every_epochs": 1},
    }
    strategies = {"strategies": [{"max_length": 4}, {"max_length": 8}]}
    samples = recipe(tmp_path, parallel_config=strategies, deepspeed={}, **blocks)
    assert course_of(samples, corpus) == {"steps": 3, "saved_by_epochs": (2,)}
    assert course_of(recipe(tmp_path, **blocks), corpus) == {"steps": 2, "saved_by_epochs": (1, 2)}


def test_with_strategies_samples_are_counted(tmp_path: Path, corpus: Path) -> None:
    strategies = [{"max_length": 4}, {"max_length": 8}]
    told = length_of_run(
        recipe(tmp_path, parallel_config={"strategies": strategies}, deepspeed={}), corpus, 10
    )
    assert told == ["run: 4 samples an epoch; 10 steps of 2 samples, 5 epochs"]


def checkpoint(folder: Path, step: int, was: Recipe, steps: int) -> Checkpoint:
    """The checkpoint of a step of a run that logs every second step."""
    rates = {n: learning_rate(n, steps, 0.01, was.lr_schedule) for n in range(2, step + 5, 2)}
    lines = [json.dumps({"step": n, "learning_rate": rate}) for n, rate in rates.items()]
    lines.insert(1, json.dumps({"step": 2, "eval_loss": 1.0}))
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "lear']))
    return Checkpoint(folder / f"checkpoints/step-{step:08d}", {"step": step})


def changes(now: Recipe, was: Checkpoint, corpus: Path, steps: int) -> list[str]:
    return list(changes_on_resuming(now, was, corpus, steps))


def test_a_rate_that_goes_on_is_not_told(tmp_path: Path, corpus: Path) -> None:
    same = recipe(tmp_path)
    assert changes(same, checkpoint(tmp_path, 5, same, 10), corpus, 10) == []
    constant = recipe(tmp_path, lr_schedule={"type": "constant", "warmup_steps": 2})
    assert changes(constant, checkpoint(tmp_path, 5, constant, 10), corpus, 20) == []


def test_more_steps_are_told_with_the_rate_before_and_after(tmp_path: Path, corpus: Path) -> None:
    linear = recipe(tmp_path, lr_schedule={"type": "linear", "warmup_ratio": 0.0})
    assert changes(linear, checkpoint(tmp_path, 8, linear, 10), corpus, 20) == [
        "learning rate: 2.00e-03 at step 8, 5.50e-03 from step 9 on: "
        "lr_schedule now runs over 20 steps from the first one"
    ]
    constant = recipe(tmp_path, lr_schedule={"type": "constant"})
    (line,) = changes(constant, checkpoint(tmp_path, 8, linear, 10), corpus, 10)
    assert line.startswith("learning rate: 2.00e-03 at step 8, 1.00e-02 from step 9 on")


@pytest.mark.parametrize(("step", "epoch", "lines"), [(2, 1.0, 1), (2, 1.5, 0), (4, 3.0, 0)])
def test_rows_behind_a_short_last_step_are_told(
    tmp_path: Path, corpus: Path, step: int, epoch: float, lines: int
) -> None:
    """An epoch has 4 rows, so that a second step of 3 has one where the run was to end there."""
    longer = recipe(tmp_path, training={"epochs": 3, "global_batch_size": 3})
    longer = longer.changed(lr_schedule={"type": "constant", "warmup_ratio": 0.0})
    was = checkpoint(tmp_path, step, longer, 4)
    record = {"step": step, "learning_rate": 0.01, "epoch": epoch}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record))
    words = (
        "warning: step 2 was the last of its run, with 1 of 3 rows; the 2 that follow are not "
        "trained on, since step 3 starts behind a whole step; checkpoint.resume=never "
        "takes all rows"
    )
    assert changes(longer, was, corpus, 4) == [words][:lines]


def test_where_nothing_is_recorded_nothing_is_told(tmp_path: Path, corpus: Path) -> None:
    anew = Checkpoint(tmp_path / "checkpoints/step-00000005", {"step": 5})
    assert changes(recipe(tmp_path), anew, corpus, 20) == []
