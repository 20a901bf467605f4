"""What a first loss says, and what is said of the memory that ranks hold."""

from __future__ import annotations

import math

import pytest

from uspft.training.guards import each, first_loss_warning


@pytest.mark.parametrize(
    ("loss", "random", "said"),
    [
        (9.05, True, None),
        (8.2, True, None),
        (11.0, True, "initialisation"),
        (6.0, True, "initialisation"),
        (2.1, False, None),
        (9.0, False, None),
        (9.5, False, "tokenizer"),
    ],
)
def test_the_first_loss(loss: float, random: bool, said: str | None) -> None:
    warning = first_loss_warning(loss, math.log(8192), 8192, random=random)
    assert (warning is None) == (said is None)
    if warning and said:
        assert said in warning and f"{loss:.2f}" in warning and "9.01" in warning


def test_what_ranks_hold_is_told_from_least_to_most() -> None:
    assert each(2048, 2048) == "2 KiB on each"
    assert each(0, 3072) == "0 B to 3 KiB on each"
