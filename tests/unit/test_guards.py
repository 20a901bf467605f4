"""What a first loss says, and the digest of a row's tokens."""

from __future__ import annotations

import numpy as np
import pytest

from uspft.data.loader import DIGEST, _digest
from uspft.guards import first_loss_warning


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
    ids, labels = dice.integers(0, 50_000, (2, 1000))
    labels[::3] = -100
    places = np.arange(1000)
    whole = _digest(places, ids, labels)
    mixed = dice.permutation(1000)
    assert _digest(mixed, ids[mixed], labels[mixed]) == whole
    halves = [_digest(places[part], ids[part], labels[part]) for part in (mixed[:300], mixed[300:])]
    assert sum(halves) % DIGEST == whole
    for broken in (ids, labels):
        broken[[3, 4]] = broken[[4, 3]]  # two tokens change places
        assert _digest(places, ids, labels) != whole
        broken[[3, 4]] = broken[[4, 3]]
    assert _digest(places, ids, labels) == whole
