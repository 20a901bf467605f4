"""What speaks against experts that ranks divide beside other keys, by key and value."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.known import recipe
from uspft.config.layout_rules import experts
from uspft.config.recipe import Recipe
from uspft.config.strategies import ranks_in_lockstep


def asked(zero: dict[str, Any], degree: int = 2, **parallel: Any) -> Recipe:
    plain = recipe("zero1")
    degrees = plain.parallel_config.model_copy(update={"expert_parallel": degree, **parallel})
    deepspeed = plain.deepspeed.model_copy(update={"zero_optimization": zero})
    return plain.model_copy(update={"parallel_config": degrees, "deepspeed": deepspeed})


WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"stage": 0}, "stage", "is 0, beside parallel_config.expert_parallel 2", "1, 2 or 3"),
    ({"contiguous_gradients": False}, "contiguous_gradients", "is false", "write true"),
    ({"round_robin_gradients": True}, "round_robin_gradients", "is true", "write false"),
    ({"stage": 3, "reduce_scatter": False}, "reduce_scatter", "is false", "write true"),
    ({"stage": 3, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size", "is 2", "leave"),
]


@pytest.mark.parametrize(("zero", "key", "what", "remedy"), WRONG)
def test_what_is_wrong_beside_divided_experts_is_refused(
    zero: dict[str, Any], key: str, what: str, remedy: str
) -> None:
    ((found, said, instead),) = experts(asked(zero))
    assert found == f"deepspeed.zero_optimization.{key}" and what in said and remedy in instead
    assert list(experts(asked(zero, 1))) == []


def test_weights_do_not_move_where_experts_are_divided() -> None:
    ((key, what, remedy),) = experts(asked({}, switching="move"))
    assert key == "parallel_config.switching" and "is move" in what and "in_place" in remedy


@pytest.mark.parametrize("zero", [{}, {"stage": 2, "contiguous_gradients": True}, {"stage": 3}])
def test_what_is_right_beside_divided_experts_passes(zero: dict[str, Any]) -> None:
    assert list(experts(asked(zero))) == []


def test_ranks_that_divide_experts_run_as_many_micro_batches() -> None:
    assert ranks_in_lockstep(asked({})) and not ranks_in_lockstep(asked({}, 1))
    assert ranks_in_lockstep(asked({"stage": 2}, 1))
