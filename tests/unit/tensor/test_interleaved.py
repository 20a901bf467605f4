"""Copies that cross into blocks and out of them start in the order in which others expect them."""

from __future__ import annotations

import pytest
import torch

from uspft.comm import Group
from uspft.tensor.interleaved import into_block
from uspft.tensor.put_off import PutOff


def test_copies_start_one_after_another_and_backward_the_other_way() -> None:
    alone, x = Group(None, (0,), 0), torch.ones(3, 2).requires_grad_()
    crossing = into_block(alone, (2, 1), PutOff(), splits_tokens=False)
    with pytest.raises(RuntimeError, match="copy 1 starts where copy 0 is expected"):
        crossing.begin(x[2:], 1)
    crossing = into_block(alone, (2, 1), PutOff(), splits_tokens=False)
    begun = [crossing.begin(part, copy) for copy, part in enumerate(x.split((2, 1)))]
    came = [crossing.awaited(one, copy) for copy, one in enumerate(begun)]
    (came[0].sum() + 2 * came[1].sum()).backward()
    assert x.grad is not None and x.grad.tolist() == [[1, 1], [1, 1], [2, 2]]
