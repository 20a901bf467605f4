"""The benchmark of pipelines: stages that sleep, what is simulated of them, bounds and tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.lab.results import NOT_YET
from benchmarks.pipelines import between, computing, copies, report
from benchmarks.pipelines.sleeping import (
    RANKS,
    SCHEDULES,
    Contender,
    Setting,
    measured,
    simulated,
)
from tests.support.ranks import spawn
from uspft.job import Job

MIB = 1 << 20
ABOUT: dict[str, Any] = {
    "date": "2026-11-25T20:00",
    "machine": {"cores": 2, "cpu": "CPU", "memory_gib": 24, "load_average_before": 0.5},
    "versions": {"torch": "2.13"},
}
SLEPT = {"forward": 0.1, "backward": 0.2}


def slept(_: int) -> dict[str, Any]:
    setting = Setting(1000, 1, 0.02, 4096, (3,), tuple(SCHEDULES))
    return {"setting": setting.as_record(), "measured": measured(setting.as_record(), print)}


def test_ranks_that_sleep_take_no_less_than_is_simulated() -> None:
    found, *_ = spawn(RANKS, slept)
    assert len(found["measured"]["messages"]) == 2 * RANKS
    steps = report.steps_of(found)
    assert [step.one.name for step in steps] == [f"{name}, m 3" for name in SCHEDULES]
    assert len(found["measured"]["of chunks"]) == 2 * RANKS
    for step in steps:
        schedule = SCHEDULES[step.one.schedule]
        parts = schedule.virtual * schedule.chunks
        least = {"forward": 0.02 / parts, "backward": 0.04 / parts}
        took = found["measured"]["contenders"][step.one.name]["slept"]
        assert took["forward"] >= least["forward"] and took["backward"] >= least["backward"]
        assert len(step.seconds) == 1 and step.measured >= simulated(step.one, least, 0)


def test_what_is_simulated_is_the_papers_where_messages_take_no_time() -> None:
    for schedule, virtual in {"gpipe": 1, "1f1b": 1, "interleaved": 2}.items():
        each = {kind: seconds / virtual for kind, seconds in SLEPT.items()}
        want = (8 * virtual + RANKS - 1) * 0.3 / virtual
        assert simulated(Contender(schedule, 8), each, 0) == pytest.approx(want)
    assert simulated(Contender("gpipe", 2), SLEPT, 0.01) == pytest.approx(5 * 0.3 + 6 * 0.01)


def test_at_equal_costs_two_hosts_take_what_the_papers_say() -> None:
    found = [computing.of_equal_costs(computing.Contender(name, 64, 2)) for name in computing.NAMES]
    assert found == pytest.approx([9, 7.5, 6.75])


def of_computing(ratio: float, spread: float) -> dict[str, Any]:
    """A part whose steps take so many times what is simulated, and whose repeats differ."""
    setting = computing.Setting(100, 3, 4, 32, (8,), (2,))
    contenders, messages = {}, {}
    for one in setting.contenders:
        parts = SCHEDULES[one.schedule].virtual * SCHEDULES[one.schedule].chunks
        each = {"forward": 1.1 / parts, "backward": 2.2 / parts}
        took = [[each[action.kind] for action in actions] for actions in one.lists]
        seconds = ratio * computing.simulated(one, took, 0.0)
        repeats = [seconds, seconds * spread, seconds]
        contenders[one.name] = {"seconds": repeats, "took": took}
        messages[str(computing.message_bytes(setting, one))] = [0.0]
    measured = {"messages": messages, "contenders": contenders}
    return {**ABOUT, "setting": setting.as_record(), "measured": measured}


def test_steps_that_compute_are_held_to_what_their_actions_took() -> None:
    assert report.wrong_computing(of_computing(1.09, 1.04)) == []
    late = report.wrong_computing(of_computing(1.2, 1.04))
    assert len(late) == 3 and late[0] == "1f1b, 256 tokens, m 2 takes 1.20 times what is simulated"
    assert report.wrong_computing(of_computing(1.2, 1.06)) == [], "no verdict"
    assert "there is no verdict" in report.computing_sentence(of_computing(1.0, 1.06))
    assert "verdict" not in report.computing_sentence(of_computing(1.0, 1.04))
    line = "| 256 | 2 | seqpipe | 7.42 | 7.42 to 7.72 | 1.000 | 0.75 | 0.75 | 1.00 | 1.00 |"
    assert report.computing_table(of_computing(1.0, 1.04)).splitlines()[-1] == line


def test_copies_by_turns_are_held_to_their_way() -> None:
    setting = copies.Setting(100, 1, 2, 128, 64, (1, 2))
    seconds = {copies.COMPUTATION: [1.0], copies.TRANSFERS: [1.2], "1": [2.3], "2": [1.8]}
    seconds[copies.AT_ONCE] = [1.3]
    part = {**ABOUT, "setting": setting.as_record(), "measured": {"seconds": seconds}}
    assert copies.way_gone(seconds, 2) == pytest.approx(0.5 / (2.3 - 1.7))
    assert report.wrong_copies(part) == []
    seconds["2"] = [1.9]
    assert report.wrong_copies(part) == ["2 copies go 67% of the way to their bound"]
    assert "| 2 copies | 1.90 | 1.90 | 1.70 | 67% | 80% |" in report.copies_table(part)
    assert copies.rate_mbit(10**6, 0.5) == 16


def meant(_: int) -> dict[str, Any]:
    setting = copies.Setting(100, 1, 1, 128, 32, (1, 2))
    return copies.measured(setting.as_record(), print)


def test_what_is_computed_alone_and_moved_alone_is_what_blocks_do() -> None:
    found, *_ = spawn(copies.HOSTS, meant)
    # Into and out of two blocks, forward and backward: half of the row each time.
    assert found["sent_bytes"] == 8 * 16 * 128 * 4
    alone = {copies.COMPUTATION, copies.TRANSFERS, copies.AT_ONCE}
    assert set(found["seconds"]) == {*alone, "1", "2"}


def made(**slower: float) -> dict[str, Any]:
    """A part whose steps take what is simulated, or so many times as long, by schedule."""
    setting = Setting(100, 3, 0.1, MIB, (2, 8))
    contenders = {}
    for one in setting.contenders:
        each = {kind: s / (2 if one.schedule == "interleaved" else 1) for kind, s in SLEPT.items()}
        seconds = simulated(one, each, 0.02) * slower.get(one.schedule, 1.0)
        contenders[one.name] = {"seconds": [seconds, 9.0, 0.5], "slept": each}
    about = {"messages": [0.02, 9.0, 0.01], "contenders": contenders}
    return {**ABOUT, "setting": asdict(setting), "measured": about}


def test_steps_are_held_to_the_simulator_and_to_its_order() -> None:
    assert report.wrong_steps(made()) == []
    late = report.wrong_steps(made(gpipe=1.11))
    assert late == [f"gpipe, m {m} takes 1.11 times what is simulated" for m in (2, 8)]
    pairs = list(report.apart(report.steps_of(made())))
    assert [(a.one.name, b.one.name) for a, b in pairs] == [("interleaved, m 8", "1f1b, m 8")]
    turned = report.wrong_steps(made(interleaved=1.09, **{"1f1b": 0.9}))
    assert turned == ["interleaved, m 8 is not faster than 1f1b"]


def test_bytes_are_held_to_the_formula() -> None:
    one = {"inputs": [4, 1], "counted_bytes": [1019 * MIB, 100], "predicted_bytes": [1000 * MIB, 1]}
    one["predicted_bytes"] = [1000 * MIB, 100]
    other = {**one, "counted_bytes": [1000 * MIB, 103]}
    part = {"by_schedule": {"gpipe": one, "1f1b": other, "interleaved": {**other}}}
    assert report.wrong_bytes(part) == ["1f1b, rank 1: 103 bytes, and 100 by the formula"]
    assert "| gpipe | 1,019 | 0 | 1.000 to 1.019 | 4, 1 |" in report.bytes_table(part)


def test_every_layout_between_hosts_is_a_job(tmp_path: Path) -> None:
    names = tuple(between.LAYOUTS)
    setting = between.Setting(100, 1, 2, 64, 4, 32, names, str(tmp_path))
    between.make_jobs(setting)
    for name in names:
        recipe = Job.read(setting.place(name)).recipe
        assert recipe.deepspeed.zero_optimization["stage"] == between.LAYOUTS[name].zero
    assert between.Setting.of({**setting.as_record(), "folder": str(tmp_path)}) == setting
    staged = ["stages" in name for name in names]
    assert staged == sorted(staged), "an engine with stages comes after those without"


def test_the_tables_say_what_was_measured() -> None:
    layouts = {
        name: {
            "seconds": [4.0 / number, 9.0, 0.1],
            "host_bytes": [40 * MIB / number] * 3,
            "held_bytes": [MIB, 2 * MIB],
        }
        for number, name in enumerate(between.LAYOUTS, 1)
    }
    setting = between.Setting(100, 3, 4, 256, 8, 256, tuple(between.LAYOUTS))
    part = {**ABOUT, "setting": setting.as_record(), "measured": layouts}
    shown = report.figures({"schedules": made(), "between": part})
    line = "| stages 2 × tensor 2 | 3 | 0.80 | 0.10 to 9.00 | 8.0 | 1.0 to 2.0 |"
    assert shown["between"].splitlines()[-1] == line
    assert "takes 5.0 (data 4), 2.5 (tensor 2 × data 2) and" in shown["stages between hosts"]
    assert "at least 2 times as much" in shown["stages between hosts"]
    assert "of 1 pairs that are simulated to be 15% apart, 1 are" in shown["simulated"]
    first = median([step.simulated for step in report.steps_of(made())][:1])
    assert f"| gpipe | 2 | {first:.2f} |" in shown["schedules"]
    assert set(report.figures({}).values()) == {NOT_YET}
