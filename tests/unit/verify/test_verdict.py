"""Which mismatch a layout has, and how much of one its type allows."""

from __future__ import annotations

import math

import pytest

from tests.support.verify import REFERENCE, result
from uspft.verify.verdict import FIXED, MAX_TOLERANCE, PLAIN, measured_tolerance, mismatches
from uspft.verify.work import Measured, Result


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
