"""Rounding passes, mistakes do not; and what `verify` says of both."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.verify import REFERENCE, RING, layouts, recipe, result
from uspft.planner.ways import MAX_LAYOUTS, candidates, chosen
from uspft.prepare.examine import examine
from uspft.prepare.layout_findings import run_findings
from uspft.verify.report import FIXED, MAX_TOLERANCE, PLAIN, Report, measured_tolerance, mismatches
from uspft.verify.work import Difference, Measured, Result

ROOT = Path(__file__).parents[3]


def report(*results: Result | None, inject: str | None = None, plain: Result | None = None) -> Any:
    every = layouts(recipe(**RING), 2)[: len(results)]
    every = [
        one if found else replace(one, reason="why", key="data.sequence_length")
        for one, found in zip(every, results, strict=True)
    ]
    facts = {"dtype": "float32", "command": "../launch.sh verify r.yaml"}
    return Report.of(facts, (REFERENCE, plain), list(zip(every, results, strict=True)), inject)


def test_the_verdict_of_all() -> None:
    good, bad = result(), result(off=0.1)
    assert report(good, good, plain=good).ok and report(good, None).ok
    assert not report(good, bad).ok and not report(good, plain=bad).ok and not report(None).ok
    assert report(bad, bad, inject="mask").ok
    assert not report(bad, good, inject="mask").ok and not report(good, inject="mask").ok
    assert not report(bad, inject="mask", plain=bad).ok
    text = report(good, bad, None).text()
    told = "not tried: 1 of 3 layouts by data.sequence_length, ulysses2: why"
    assert "ring2 (the recipe's)" in text and told in text
    assert "gradient of q off by 1.0e-01" in text and "whole rows differ too" in text
    nowhere = replace(
        report(good), reference=Measured([2.0], [1.0], [7], "step 2: the loss is nan")
    )
    assert not nowhere.ok and "one process: step 2: the loss is nan" in nowhere.text()
    missed = report(bad, good, inject="mask").text()
    assert "NOT CAUGHT: --inject mask shows in 1 of 2 layouts, not in data2" in missed
    entries = json.loads(json.dumps(report(good, result(off=math.inf)).as_json(), allow_nan=False))
    assert [one["verdict"] for one in entries["layouts"]] == ["equal", "DIFFERS"]
    assert entries["verdict"] == "differs"


def test_what_is_left_out_is_counted_by_reason() -> None:
    every = layouts(recipe(data={"sequence_length": 100}, **RING), 8)
    kept = chosen(every, 9)
    found = [(one, result() if one.reason is None else None) for one in kept]
    facts = {"dtype": "float32", "command": "../launch.sh verify r.yaml"}
    lines = Report.of(facts, (REFERENCE, None), found, None).text().splitlines()
    told = [line for line in lines if line.startswith("not ")]
    counts = Counter(one.key for one in kept if one.reason)
    assert len(told) == 3 and counts.keys() == {"data.sequence_length", None}
    by_length, by_limit, meshes = sorted(told, key=lambda line: ("list" in line, "--all" in line))
    length = f"{counts['data.sequence_length']} of {len(every)} layouts by data.sequence_length"
    assert by_length.startswith(f"not tried: {length}, such as ")
    assert ": 100 tokens are not a multiple of " in by_length
    assert by_limit == (
        f"not tried: {counts[None]} of {len(every)} layouts, beyond the 9 that are tried; "
        "`../launch.sh verify r.yaml --all` tries them too"
    )
    assert meshes.startswith("not in the list: matrices on meshes; ") and "meshslice" in meshes


def test_the_page_shows_what_is_left_out_of_the_quickstart() -> None:
    page = (ROOT / "docs" / "verify.md").read_text()
    shown = re.search(r"^\$ \./launch\.sh verify (\S+) (\S+)\n((?:not .*\n)+)```", page, re.M)
    assert shown
    found = examine(ROOT / shown[1], [shown[2]], 1, None, trains=False)
    every = candidates(
        found.recipe,
        found.layout.ranks,
        lambda of, layout: run_findings(of, layout, found.shape),
    )
    tried = [(one, None if one.reason else result()) for one in chosen(every, MAX_LAYOUTS)]
    facts = {"dtype": "float32", "command": f"./launch.sh verify {shown[1]} {shown[2]}"}
    text = Report.of(facts, (REFERENCE, None), tried, None).text()
    assert [line for line in text.splitlines() if line.startswith("not ")] == shown[3].splitlines()


def scaled(share: float, loss: float = 2.0, mlp: float | None = None) -> Result:
    """Every gradient off by a share."""
    groups = {"attention": Difference(share, "q"), "mlp": Difference(mlp or share, "up")}
    return Result(Measured([loss], [1.0 + share], [7]), groups)


@pytest.mark.parametrize(
    ("wrong", "scale"),
    [
        (scaled(2e-3, loss=2.004), True),
        (scaled(2e-3), True),  # gradients alone
        (scaled(2e-3, loss=2.4), False),
        (scaled(2e-3, mlp=2e-2), False),
        (scaled(math.inf), False),
        (result(off=0.1), False),
        (Result(Measured(stopped="step 1: the loss is nan"), {}), False),
    ],
)
def test_one_factor_in_all_is_a_scale_and_not_attention(wrong: Result, scale: bool) -> None:
    every = report(wrong, result(), wrong, wrong, wrong).text()
    assert "every layout that shares rows differs" in every
    assert ("a wrong scale" in every) == scale == ("attention kernel, mask or" not in every)
    assert ("a wrong scale" in report(wrong, wrong).text()) == scale
    some = report(wrong, result(), result()).text()
    assert "only some layouts differ" in some and ("a wrong scale" in some) == scale


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (result(loss=2.0001), "loss"),
        (result(loss=math.nan), "loss"),
        (result(norm=1.001), "gradient norm"),
        (result(norm=math.inf), "gradient norm"),
        (result(off=1e-3), "gradient of q"),
        (result(off=math.inf), "gradient of q"),
        (Result(Measured([2.0], [1.0], [6]), {}), "target tokens"),
        (Result(Measured(stopped="step 1: the loss is nan"), {}), "the loss is nan"),
        (Result(Measured(), {}), "loss"),
    ],
)
def test_a_mismatch_is_named(wrong: Result, word: str) -> None:
    assert mismatches(result(), REFERENCE, FIXED["float32"]) == []
    found = mismatches(wrong, REFERENCE, FIXED["float32"])
    assert found and word in found[0]


def test_in_bfloat16_the_yardstick_is_one_process_beside_float32() -> None:
    plain = result(loss=2.005, off=0.05)
    assert measured_tolerance("float32", REFERENCE, plain) == FIXED["float32"]
    assert measured_tolerance("bfloat16", REFERENCE, None) == FIXED["bfloat16"]
    found = measured_tolerance("bfloat16", REFERENCE, plain)
    assert found.loss == pytest.approx(4 * 0.005 / 2.005)
    assert found.of_group("attention") == pytest.approx(0.2)
    assert found.of_group("mlp") == FIXED["bfloat16"].every / 4
    far = measured_tolerance("bfloat16", REFERENCE, result(loss=9.0, off=9.0))
    assert (far.loss, far.of_group("attention")) == (PLAIN["bfloat16"].loss, MAX_TOLERANCE)
