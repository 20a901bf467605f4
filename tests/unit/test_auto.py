"""What `auto` chooses, and that it says why."""

from __future__ import annotations

import pytest

from uspft.sequence import ALGORITHMS, Heads
from uspft.sequence.auto import recommend

LLAMA_8B, QWEN_7B = Heads(32, 8, 128), Heads(28, 4, 128)


@pytest.mark.parametrize(
    ("ranks", "per_host", "heads", "packed", "want"),
    [
        (8, 8, LLAMA_8B, False, ("ulysses_cp", None)),
        (8, 8, LLAMA_8B, True, ("planned_cp", 1)),
        (8, 8, QWEN_7B, False, ("planned_cp", 4)),
        (16, 8, LLAMA_8B, True, ("planned_cp", 8)),
        (16, 8, LLAMA_8B, False, ("planned_cp", 8)),
        (32, 8, QWEN_7B, True, ("planned_cp", 4)),
        (4, 2, None, True, ("planned_cp", 1)),
    ],
)
def test_the_rules(
    ranks: int, per_host: int, heads: Heads | None, packed: bool, want: tuple[str, int | None]
) -> None:
    choice = recommend(ranks, per_host, heads, packed=packed)
    assert choice[:2] == want
    assert choice.why and "\n" not in choice.why
    assert choice.algorithm in ALGORITHMS
