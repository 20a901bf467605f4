"""The modelled steps of hot switching: what lengths are drawn, what is compared, the tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lab.results import RESULTS, read
from benchmarks.switching.simulation.cases import (
    A800,
    LIBRARIES,
    LONG,
    PAPERS,
    SEARCHED,
    STAGED,
    WAYS,
    Case,
)
from benchmarks.switching.simulation.lengths import CORPORA, lengths, share_above
from benchmarks.switching.simulation.report import PAPER, figures, line

SMALL = Case("LLaMA-2 7B", CORPORA[1], 8192, 1, 8)


def test_lengths_have_a_long_tail_and_are_drawn_alike() -> None:
    for shape in CORPORA:
        drawn = lengths(shape, 32_768)
        assert drawn[:9] == lengths.__wrapped__(shape, 32_768)[:9]
        assert max(drawn) <= 32_768 and sorted(drawn)[len(drawn) // 2] < 1_200
        assert 0 < share_above(shape, 32_768, 16_384) < share_above(shape, 32_768, 8_192) < 0.1
    code, web = (share_above(shape, 32_768, 8_192) for shape in CORPORA)
    assert code > 3 * web


def test_cases_cover_the_papers_corpora_and_both_stages() -> None:
    assert {case.corpus.name for case in PAPERS} == set(PAPER)
    assert {case.stage for case in PAPERS} == {1, 3} and len(PAPERS) == 8 and len(LONG) == 2
    assert all(case.setting.ranks == 32 for case in (*PAPERS, *LONG))
    assert len({(c.stage, c.memory_bytes, c.between) for c in SEARCHED}) == len(SEARCHED) == 24


def test_slower_links_are_slower_between_hosts_alone() -> None:
    slow = replace(SMALL, between=1 / 8).hardware
    assert slow.inside == A800.inside
    given = {name for name, value in A800.between if name.endswith("bytes_per_second") and value}
    assert given == {"bytes_per_second", "host_bytes_per_second"}
    for name in given:
        assert getattr(slow.between, name) == getattr(A800.between, name) / 8
    others = {name: value for name, value in slow.between if name not in given}
    assert others == {name: value for name, value in A800.between if name not in given}


@pytest.mark.parametrize("way", ["matrices alone", "Ulysses alone"])
def test_a_way_keeps_to_its_layouts(way: str) -> None:
    found = SMALL.chosen(way)
    assert found.static
    for one in found.static:
        alone = one.priced.layout.context if way == "matrices alone" else one.priced.layout.tensor
        assert alone == 1


def test_a_line_and_its_figures() -> None:
    found = line(SMALL, WAYS)
    papers, searched, gains = figures({"papers": [found], "searched": [found]}).values()
    for each in (papers, searched):
        assert len(each.splitlines()) == 3
        heads, *_, cells = each.splitlines()
        assert heads.count("|") == cells.count("|")
    assert "LLaMA-2 7B, 8k, 1 | CommonCrawl | 2.99 ×" in papers
    static = found["ways"]["any layout"]["static"]
    mix = found["ways"]["any layout"]["mix"]["seconds"]
    assert f"| {static[1]:.3g} / {mix:.3g}: {static[1] / mix:.2f}, " in searched
    times = f"{static[1] / found['ways']['any layout']['mix']['seconds']:.2f}"
    assert f"- any layout: {times} times" in gains.splitlines()


def test_results_are_called_modelled_and_are_what_the_planner_says() -> None:
    kept = read(RESULTS, "switching-simulation")
    assert "modelled" in kept and len(figures(kept)) == 3
    assert len(kept["papers"]) == len(PAPERS) + len(LIBRARIES) + len(LONG)
    assert len(kept["searched"]) == len(SEARCHED)
    again = line(PAPERS[0], ["matrices alone", STAGED])
    for way, found in again["ways"].items():
        there = kept["papers"][0]["ways"][way]
        assert there["static"] == [found["static"][0], pytest.approx(found["static"][1])]
        seconds = pytest.approx(found["mix"]["seconds"])
        assert there["mix"] == {**found["mix"], "seconds": seconds}
    static, _ = again["ways"][STAGED]["static"]
    assert "pipeline" in static and "pipeline" not in again["ways"]["matrices alone"]["static"][0]
