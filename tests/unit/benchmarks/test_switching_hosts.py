"""The benchmark of hot switching on two hosts: its samples, what takes part, formulas, tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.results import NOT_YET
from benchmarks.switching import report
from benchmarks.switching.automatic import ALONE, BESIDE, HOTSPA, corpora, hotspa, taken
from benchmarks.switching.contenders import BOUND, PEER, STATIC, SWITCHED, contenders
from benchmarks.switching.corpus import even, scaled, write_samples
from benchmarks.switching.formulas import held_bytes, sent_bytes
from benchmarks.switching.predicted import predicted_seconds
from benchmarks.switching.report import figures
from benchmarks.switching.setting import Setting, make_jobs, make_model, make_samples
from uspft.config.strategies import strategies_of
from uspft.prepare.examine import Examined
from uspft.prepare.known import shipped

LENGTHS = (9, 20, 30, 64, 250, 512)
ABOUT: dict[str, Any] = {
    "date": "2026-11-21T20:00",
    "machine": {"cores": 2, "cpu": "CPU", "memory_gib": 24, "load_average_before": 0.5},
    "versions": {"torch": "2.13"},
}


def test_samples_have_the_whole_distribution(tmp_path: Path) -> None:
    every = [100 * i for i in range(1, 1001)]
    assert scaled(every, 10, 4096) == [round(4096 * i / 10) for i in range(1, 11)]
    assert scaled([1, 1, 1000], 3, 512) == [8, 8, 512], "never too short to have a target"
    alike = even(1000, 100)
    assert len(alike) == 10 and max(alike) < 100 and min(alike) > 97
    write_samples(tmp_path / "s", LENGTHS, 3, 50)
    ids = [json.loads(line)["input_ids"] for line in (tmp_path / "s").read_text().splitlines()]
    steps = [ids[i : i + 6] for i in (0, 6, 12)]
    assert all(sorted(map(len, step)) == list(LENGTHS) for step in steps)
    assert steps[0] != steps[1] and max(map(max, ids)) < 50 and min(map(min, ids)) >= 3


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_rank_holds_a_share_of_the_longest_row_at_most(ranks: int) -> None:
    every = contenders(ranks)
    assert [one.kind for one in every.values()].count(SWITCHED) == 6
    assert {one.kind for one in every.values()} == {SWITCHED, STATIC, PEER, BOUND}
    for one in every.values():
        for share, degrees in one.strategies.items() if one.kind in (SWITCHED, STATIC) else ():
            sharing = degrees.get("context_parallel", 1) * degrees.get("model_parallel", 1)
            assert share * sharing >= ranks
    families = {one.family for one in every.values() if one.kind == SWITCHED}
    assert families <= {one.family for one in every.values() if one.kind == STATIC}


def test_the_formulas_of_what_is_sent() -> None:
    """In float32, of four ranks and tensor degrees 1, 2 and 4, as the page of moves has them."""
    every = {name: sent_bytes(one, 4) for name, one in contenders(4).items()}
    named = (
        "tensor 4, 2, 1 in place",
        "tensor 4, 2, 1 moved by owners",
        "tensor 4, 2, 1 moved straight",
    )
    assert [every[name] for name in named] == [9, 8, 11]
    held = {name: held_bytes(one, 4) for name, one in contenders(4).items()}
    assert [held[name] for name in named] == [7, 4, 5] and held["static tensor 4"] == 4
    assert every["static tensor 4"] == 0 and every["static tensor 2 × planned 2"] == 3


@pytest.mark.parametrize("ranks", [4, 8])
def test_every_recipe_is_one_that_runs(ranks: int, tmp_path: Path) -> None:
    names = tuple(contenders(ranks))
    setting = Setting(ranks, 100, 1, 1, 64, 1, LENGTHS, names, str(tmp_path))
    make_model(setting)
    make_samples(tmp_path, LENGTHS, 4)
    found = make_jobs(setting)
    assert len(found) == len(names) - 1, "all but DeepSpeed's, which has none"
    assert all(one.layout.ranks == ranks for one in found.values())


def made(seconds: Mapping[str, float]) -> dict[str, Any]:
    """A result of four ranks in three rounds, each contender's 10 % around its seconds."""
    step = {
        "written_bytes": 4 * 9_000 + 64,
        "own_bytes": {"ring": 64, "switch": 7},
        "host_bytes": 2**20,
        "switch_seconds": 0.25,
    }
    measured = {
        name: {
            "seconds": [1.1 * each, each, 0.9 * each],
            "steps": [step],
            "held_bytes": 4000,
            "live_bytes": 2**21,
        }
        for name, each in seconds.items()
    }
    measured[BOUND] |= {"predicted_seconds": 0.5, "schedule_seconds": 0.002}
    setting = {"ranks": 4, "mbit": 50, "stage": 1, "rounds": 3, "lengths": [8, 9, 1024]}
    setting |= {"layers": 2, "hidden": 128}
    stages = [{"setting": setting, "measured": measured}]
    fast = {"mbit": 10_000, "seconds": 2.0}
    layouts = {**ABOUT, "parameters": 1000, "fast_links": fast, "stages": stages}
    return {"by_ranks": {"4": {"layouts": layouts}}}


def test_the_tables_and_what_they_come_to() -> None:
    names = list(contenders(4))
    seconds = dict.fromkeys(names, 4.0) | {BOUND: 1.0, names[0]: 1.6, names[1]: 2.0}
    shown = figures(made(seconds))
    lines = {line.split(" | ")[0]: line for line in shown["4 ranks, ZeRO-1"].splitlines()}
    assert lines[f"| {BOUND}"] == (
        f"| {BOUND} | 1.00 | 0.90 to 1.10 | – | 4.00 | 0.50 | 1.0 | 9.00 | 9.00 | – | 2.0 "
        "| 4.00 | 7.00 | 2.0 |"
    )
    assert "| 0.25 |" in lines[f"| {names[4]}"] and len(lines) == len(names) + 2
    said = shown["summary"]
    assert "Ulysses 2.50, the ring 2.00, `planned_cp` 1.00 and tensor degrees 1.00 times" in said
    assert "them 1.00 to 2.50 times as fast as DeepSpeed's" in said and "takes 2.50 times" in said
    assert shown["measured"].endswith("Medians of rounds in turn, 3 under ZeRO-1.")
    assert (
        "Mbit/s (static Ulysses takes 2.0 s a step on links of 10,000)"
        in (shown["setting, 4 ranks"])
    )
    assert set(figures({}).values()) == {NOT_YET}


def test_what_auto_takes_is_shown_beside_the_best_layout_alone() -> None:
    seconds = {"mix": 2.1, "a alone": 2.0, "b alone": 4.0}
    measured = {name: {"seconds": [one], "predicted_seconds": 1.5} for name, one in seconds.items()}
    corpus = {"takes": "mix", "why": "", "setting": {"mbit": 50}, "measured": measured}
    shown = figures({"by_ranks": {"8": {"auto": {"corpora": {"no tail": corpus}}}}})
    assert shown["auto, 8 ranks"].splitlines()[2:] == [
        "| no tail | mix | takes | 2.10 | 2.10 | 1.05 | 1.50 |",
        "| no tail | a alone |  | 2.00 | 2.00 | 1.00 | 1.50 |",
        "| no tail | b alone |  | 4.00 | 4.00 | 2.00 | 1.50 |",
    ]
    took = "its step lasts 1.05 times as long as that of the fastest of 2 layouts alone."
    assert shown["auto"] == f"- 8 ranks, no tail: it takes `mix`; {took}"


def test_what_auto_takes_is_timed_beside_static_layouts(tmp_path: Path) -> None:
    """A recipe of each runs, and comes back from the JSON as it was."""
    names = ("static Ulysses 4",)
    setting = Setting(4, 100, 1, 1, 64, 1, LENGTHS, names, str(tmp_path))
    make_model(setting)
    make_samples(tmp_path, LENGTHS, 4)
    found = make_jobs(setting)[names[0]]
    hardware = shipped()["cpu"]
    for lengths in corpora(LENGTHS, setting.longest).values():
        one = taken(found, hardware, lengths)
        assert one.takes in one.timed and len(one.timed) >= BESIDE
        asked = replace(setting, names=tuple(one.timed), chosen=one.timed, mbit=len(lengths))
        record = {**json.loads(json.dumps(asked.as_record())), "folder": str(tmp_path)}
        assert Setting.of(record) == asked
        assert len(make_jobs(asked)) == len(one.timed)


def test_hotspas_example_stands_beside_its_authors_figures() -> None:
    names = [HOTSPA, f"tensor2-pipeline2 {ALONE}", f"data4 {ALONE}"]
    step = {"switch_seconds": 0.25}
    measured = {
        name: {"seconds": [each], "steps": [step]}
        for name, each in zip(names, (2.0, 5.0, 3.0), strict=True)
    }
    part = {"setting": {"mbit": 50}, "measured": measured}
    said = report.hotspa_ratio(part)
    assert "is 1.50 times as fast as the fastest of 2 static layouts (`data4 alone`)" in said
    assert "2.50 times as fast as the layout of its longest rows" in said
    assert "up to 1.5 (GitHub) and 2.99 (CommonCrawl) times" in said
    assert f"| {HOTSPA} | 2.00 | 2.00 | 0.25 | – |" in report.hotspa_table(part)


def test_hotspas_example_is_a_job(tmp_path: Path) -> None:
    base = Setting(4, 100, 1, 1, 64, 2, LENGTHS, ("static Ulysses 4",), str(tmp_path))
    make_model(base)
    make_samples(tmp_path, LENGTHS, 4)
    (recipe,) = make_jobs(base).values()
    hardware = shipped()["cpu"]
    timed = hotspa(recipe, hardware, LENGTHS)
    setting = replace(base, mbit=50, names=tuple(timed), chosen=timed)
    found = make_jobs(setting)
    every = [one.pipeline_stage for one in strategies_of(found[HOTSPA].recipe)]
    assert every == [1, 1, 2] and len(found) >= 4
    assert predicted_seconds(timed[HOTSPA], with_hardware(found[HOTSPA], hardware), LENGTHS) > 0


def with_hardware(found: Examined, hardware: Path) -> Examined:
    """The same, whose recipe names a file of figures."""
    launch = found.recipe.launch.model_copy(update={"hardware": str(hardware)})
    return replace(found, recipe=found.recipe.model_copy(update={"launch": launch}))
