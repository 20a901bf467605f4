"""What `auto` chooses, and that it says why."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.algorithms import ALGORITHMS
from uspft.planner.auto import Work, recommend
from uspft.planner.machine import read_hardware
from uspft.prepare.examine import examine
from uspft.prepare.invocation import CONFIGS
from uspft.segments import Segments
from uspft.sequence import Heads

H100 = read_hardware(CONFIGS / "hardware" / "h100.yaml")
LLAMA_8B, QWEN_7B = Heads(32, 8, 128), Heads(28, 4, 128)
WHOLE = [Segments.single(1 << 15)]
SHORT = [Segments(tuple(range(0, 1 << 15, 512)), 1 << 15)]
ODD = [Segments((0, 10_000), 3 << 13)]
LONG = [Segments((0, 30_000), 1 << 15)]


@pytest.mark.parametrize(
    ("ranks", "per_host", "heads", "rows", "want"),
    [
        (12, 8, LLAMA_8B, ODD, ("planned_cp", 4)),
        (6, 4, LLAMA_8B, ODD, ("planned_cp", 2)),
        (8, 8, LLAMA_8B, WHOLE, ("ulysses_cp", None)),
        (8, 8, LLAMA_8B, LONG, ("ulysses_cp", None)),
        (8, 8, LLAMA_8B, SHORT, ("planned_cp", 1)),
        (8, 8, QWEN_7B, WHOLE, ("planned_cp", 1)),
        (16, 8, LLAMA_8B, SHORT, ("planned_cp", 1)),
        (16, 8, LLAMA_8B, WHOLE, ("planned_cp", 8)),
        (32, 8, QWEN_7B, WHOLE, ("planned_cp", 4)),
        (16, 8, LLAMA_8B, None, ("planned_cp", 8)),
        (4, 2, None, None, ("planned_cp", 1)),
    ],
)
def test_the_rules(
    ranks: int,
    per_host: int,
    heads: Heads | None,
    rows: list[Segments] | None,
    want: tuple[str, int | None],
) -> None:
    choice = recommend(ranks, per_host, heads, rows and Work(rows), H100)
    assert choice[:2] == want, choice
    assert choice.why and "\n" not in choice.why
    assert choice.algorithm in ALGORITHMS


def long_tailed(seed: int) -> Segments:
    """A row of 64k tokens, its documents as long as source files are: log-normal."""
    draw = random.Random(seed)
    starts, length = [0], 1 << 16
    while (start := starts[-1] + max(16, int(draw.lognormvariate(7.3, 1.4)))) < length:
        starts.append(start)
    return Segments(tuple(starts), length)


@pytest.mark.parametrize("keep", [True, False])
def test_a_mixed_corpus_gets_the_planned_exchange(keep: bool) -> None:
    rows = [long_tailed(seed) for seed in range(4)]
    assert recommend(8, 8, LLAMA_8B, Work(rows, keep=keep), H100)[:2] == ("planned_cp", 1)


def test_fetching_keys_again_is_part_of_the_price() -> None:
    halves = [Segments((0, 1 << 14), 1 << 15)]
    assert recommend(8, 8, LLAMA_8B, Work(halves), H100).algorithm == "planned_cp"
    assert recommend(8, 8, LLAMA_8B, Work(halves, keep=False), H100).algorithm == "ulysses_cp"


def test_a_window_is_part_of_the_price() -> None:
    assert recommend(8, 8, LLAMA_8B, Work(WHOLE), H100).algorithm == "ulysses_cp"
    assert recommend(8, 8, LLAMA_8B, Work(WHOLE, (4096,) * 32), H100).algorithm == "planned_cp"
    mixed = (4096, None) * 16  # half of the layers see all
    assert recommend(8, 8, LLAMA_8B, Work(WHOLE, mixed), H100).algorithm == "ulysses_cp"


def test_a_run_chooses_again_when_it_knows_its_documents(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {name_or_path: meta-llama/Llama-3.1-8B}\n"
        f"data: {{train: {tmp_path / 'x.txt'}, sequence_length: 32k}}\n"
        "parallel_config: {context_parallel: 8, context_parallel_algo: auto}\n"
        "training: {steps: 1, global_batch_size: 1}\n"
        "launch: {device: cpu, processes: 8}\n"
    )
    before = examine(recipe, [], 1, None)
    assert before.recipe.parallel_config.context_parallel_algo == "planned_cp"
    assert before.why and "not known yet" in before.why
    after = before.knowing(work=Work(WHOLE))
    assert after.recipe.parallel_config.context_parallel_algo == "ulysses_cp"
    assert after.recipe.parallel_config.exchange_stages is None
    assert (after.layout.ulysses, after.layout.ring) == (8, 1) and "heads divide" in str(after.why)
    named = examine(recipe, ["parallel_config.context_parallel_algo=ring_cp"], 1, None)
    assert named.knowing(work=Work(WHOLE)).recipe == named.recipe and named.why is None
