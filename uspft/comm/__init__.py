"""Transfers between ranks: the group is always an argument, and what is sent is counted.

Only the few numbers that `total` and `largest` reduce are not counted.
"""

from uspft.comm.collectives import (
    Expected,
    Move,
    Waited,
    all_to_all,
    expect_gather,
    expect_parts,
    gather_over,
    largest,
    max_over,
    said_by_all,
    shift,
    start_all_to_all,
    start_gather,
    start_sum_over,
    start_sum_parts,
    sum_over,
    sum_parts,
    total,
    with_backward,
)
from uspft.comm.group import KINDS, Books, Group, deadline, limit_of, set_deadline

__all__ = [
    "KINDS",
    "Books",
    "Expected",
    "Group",
    "Move",
    "Waited",
    "all_to_all",
    "deadline",
    "expect_gather",
    "expect_parts",
    "gather_over",
    "largest",
    "limit_of",
    "max_over",
    "said_by_all",
    "set_deadline",
    "shift",
    "start_all_to_all",
    "start_gather",
    "start_sum_over",
    "start_sum_parts",
    "sum_over",
    "sum_parts",
    "total",
    "with_backward",
]
