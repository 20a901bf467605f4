"""On which side of the crossover recipes are, and the number of ranks that divide experts where a
recipe leaves it open."""

from __future__ import annotations

from pathlib import Path

import pytest

from uspft.prepare.examine import Examined, examine
from uspft.prepare.expert_side import expert_side
from uspft.prepare.make_plan import hardware_of, ranking_of, step_of

RECIPES = Path(__file__).parents[3] / "recipes"
LORA = "qwen3-30b-a3b-lora-ulysses-32k.yaml"
DEGREE = "parallel_config.expert_parallel"


def examined(name: str, *words: str, ranks: int = 8) -> Examined:
    return examine(RECIPES / name, words, 1, ranks)


def side(found: Examined) -> str | None:
    assert found.shape
    return expert_side(found.recipe, found.shape, found.layout)


@pytest.mark.parametrize("hardware", ["h100", "l20"])
def test_auto_is_the_first_of_plan(hardware: str) -> None:
    found = examined(LORA, f"launch.hardware={hardware}")
    step = step_of(found)
    order = ranking_of(found, step, hardware_of(found, 1)).layouts
    own = found.layout
    asked = [
        one.layout.experts
        for one in order
        if one.layout.pipeline == 1 and (one.layout.ulysses, one.layout.data) == (2, 4)
    ]
    assert sorted(asked) == [1, 2, 4, 8]
    assert own.experts == asked[0] == int(found.recipe.parallel_config.expert_parallel)
    (line,) = [line for line in found.settled if line.startswith(f"auto: {DEGREE}: ")]
    assert f"{DEGREE}: {own.experts}, since with " in line


def test_links_decide_it() -> None:
    """Where gathers pass behind products experts stay; on slow links it pays to send tokens."""
    degrees = [examined(LORA, f"launch.hardware={name}").layout.experts for name in ("h100", "l20")]
    assert degrees[0] < degrees[1]


def test_a_model_without_experts_has_none_to_divide() -> None:
    name = "qwen3-8b-text-ring-64k.yaml"
    found = examined(name, f"{DEGREE}=auto")
    assert found.layout.experts == 1 and side(found) is None


@pytest.mark.parametrize(
    ("rows", "degree", "said"),
    [
        (1, 8, "below the crossover of 21,973: dispatch sends less than it saves"),
        (2, 8, "above the crossover of 21,973: dispatch sends more than it saves"),
        (1, 1, "expert_parallel 2 or 4 or 8 sends less"),
        (2, 1, "expert_parallel 2 sends less"),
        (4, 1, "none of these sends less"),
    ],
)
def test_check_says_on_which_side_a_recipe_is(rows: int, degree: int, said: str) -> None:
    """Frozen experts have no gradients: 4 bytes of each, of the 8 with which they cross over at
    twice as many tokens."""
    words = (f"{DEGREE}={degree}", f"training.micro_batch_size={rows}")
    told = side(examined(LORA, *words))
    assert told and told.endswith(said)
    assert f"{rows * 16_384:,} tokens" in told and f"{128 // degree} of a layer's 128" in told
