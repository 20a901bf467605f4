"""What a first loss says, and the digest of a row's tokens."""

from __future__ import annotations

import numpy as np
import pytest

from uspft.data.loader import DIGEST, _digest, _in_documents
from uspft.segments import Segments
from uspft.training.guards import _each, first_loss_warning


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
    warning = first_loss_warning(loss, 8192, random=random)
    assert (warning is None) == (said is None)
    if warning and said:
        assert said in warning and f"{loss:.2f}" in warning and "9.01" in warning


def test_the_digest_is_of_tokens_at_positions() -> None:
    dice = np.random.default_rng(0)
    held = list(dice.integers(0, 50_000, (3, 1000)))  # ids, labels, positions
    held[1][::3] = -100
    places = np.arange(1000)
    whole = _digest(places, held)
    mixed = dice.permutation(1000)
    assert _digest(mixed, [x[mixed] for x in held]) == whole
    halves = [_digest(part, [x[part] for x in held]) for part in (mixed[:300], mixed[300:])]
    assert sum(halves) % DIGEST == whole
    for broken in held:
        broken[[3, 4]] = broken[[4, 3]]  # two tokens change places
        assert _digest(places, held) != whole
        broken[[3, 4]] = broken[[4, 3]]
    assert _digest(places, held) == whole


def test_positions_are_counted_in_documents() -> None:
    assert _in_documents(Segments((0, 3, 5), 7)).tolist() == [0, 1, 2, 0, 1, 0, 0]


def test_what_ranks_hold_is_told_from_least_to_most() -> None:
    assert _each(2048, 2048) == "2 KiB on each"
    assert _each(0, 3072) == "0 B to 3 KiB on each"
