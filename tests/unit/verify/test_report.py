"""The verdict over all layouts, and what may be behind it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.support.verify import REFERENCE, RING, layouts, recipe, result
from uspft.verify.report import Report
from uspft.verify.result import Difference, Measured, Result


def report(*results: Result | None, inject: str | None = None, plain: Result | None = None) -> Any:
    every = layouts(recipe(**RING), 2)[: len(results)]
    every = [
        one if found else replace(one, reason="why")
        for one, found in zip(every, results, strict=True)
    ]
    facts = {"dtype": "float32"}
    return Report.of(facts, (REFERENCE, plain), list(zip(every, results, strict=True)), inject)


def test_the_verdict_of_all() -> None:
    good, bad = result(), result(off=0.1)
    assert report(good, good, plain=good).ok and report(good, None).ok
    assert not report(good, bad).ok and not report(good, plain=bad).ok and not report(None).ok
    assert report(bad, bad, inject="mask").ok
    assert not report(bad, good, inject="mask").ok and not report(good, inject="mask").ok
    assert not report(bad, inject="mask", plain=bad).ok
    text = report(good, bad, None).text()
    assert "ring_cp 2 (the recipe's)" in text and "not tried: ulysses_cp 2: why" in text
    assert "gradient of q off by 1.0e-01" in text and "whole rows differ too" in text
    nowhere = replace(
        report(good), reference=Measured([2.0], [1.0], [7], "step 2: the loss is nan")
    )
    assert not nowhere.ok and "one process: step 2: the loss is nan" in nowhere.text()
    missed = report(bad, good, inject="mask").text()
    assert "NOT CAUGHT: --inject mask shows in 1 of 2 layouts, not in whole rows" in missed
    entries = json.loads(json.dumps(report(good, result(off=math.inf)).as_json(), allow_nan=False))
    assert [one["verdict"] for one in entries["layouts"]] == ["equal", "DIFFERS"]
    assert entries["verdict"] == "differs"


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
