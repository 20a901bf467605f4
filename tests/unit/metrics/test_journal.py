"""Peaks by device name, FLOPs of a step counted by hand, and the journal after a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from uspft.metrics import Best, Journal
from uspft.planner.machine import PEAK_BF16, peak_flops
from uspft.planner.products import step_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla V100-SXM2-32GB", None),
        ("", None),
    ],
)
def test_a_peak_is_that_of_the_whole_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_every_peak_can_be_reached() -> None:
    assert {name: peak_flops(f"NVIDIA {name}") for name in PEAK_BF16} == PEAK_BF16
    assert len(PEAK_BF16) == 19


def test_the_flops_of_a_step_are_those_counted_by_hand() -> None:
    # Ten weights, three tokens: 2 · 10 · 3 forward, twice that backward.
    assert step_flops(10, 3, 0, (2, 4, 8)) == 60 + 120
    # Three causal tokens are 6 pairs. A head of 8: q·k and the sum of v are 2 · 8 · 6 each,
    # backward twice that; 4 heads, 2 layers.
    assert step_flops(0, 3, 6, (2, 4, 8)) == (2 * 96 + 2 * 192) * 4 * 2
    assert step_flops(10, 3, 6, (2, 4, 8)) == 180 + 4608
    # Four of the ten are frozen: their own gradients, 2 · 4 · 3, are not worked out.
    assert step_flops(10, 3, 0, (2, 4, 8), frozen=4) == 60 + 120 - 24


def lines(path: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_journal_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    for step in (1, 2, 3, 4):
        journal.write({"step": step})
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # killed while it wrote
    journal.cut_back(3)
    journal.write({"step": 4})
    resumed = {"resumed_from_step": 3}
    assert lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}, resumed, {"step": 4}]
    # A second time, before the first resumption: it goes with the steps that came after it.
    journal.cut_back(2)
    assert lines(path) == [{"step": 1}, {"step": 2}, {"resumed_from_step": 2}]
    # And from the same step again: what happened stays.
    journal.cut_back(2)
    assert lines(path)[2:] == [{"resumed_from_step": 2}] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_journal_that_is_gone_starts_with_the_resumption(tmp_path: Path) -> None:
    Journal(tmp_path / "metrics.jsonl").cut_back(7)
    assert lines(tmp_path / "metrics.jsonl") == [{"resumed_from_step": 7}]


def test_the_earliest_least_loss_is_the_best(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    assert Best.of(journal.evaluations()) == Best(None, float("inf"), 0)
    seen = []
    for step, loss in ((1, None), (2, 3.0), (3, 2.5), (4, 2.5), (5, None), (6, 2.4)):
        journal.write({"step": step, "loss": 0.1})
        journal.write({"step": step, "eval_loss": loss})
        best = Best.of(journal.evaluations())
        seen.append((best.step, best.since))
    assert seen == [(None, 1), (2, 0), (3, 0), (3, 1), (3, 2), (6, 0)]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "eval_lo')  # killed while it wrote
    assert Best.of(journal.evaluations()) == Best(6, 2.4, 0)
