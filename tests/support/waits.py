"""Where the host waits for the device: what a GPU would be asked before the host goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ASKS = {
    "aten._local_scalar_dense",  # item, bool, int, float of a tensor
    "aten.nonzero",
    "aten.masked_select",
    "aten.equal",
    "aten.is_nonzero",
    "aten._unique2",
    "aten.repeat_interleave",
}
"""Operations whose result, or its shape, the host reads."""
TAKES = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.cpu: "cpu"}
"""Methods that copy to the host, and on CPU run no operation."""


class _Asked(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is aten.index.Tensor and any(
            x is not None and x.dtype is torch.bool for x in args[1]
        )
        if str(func.overloadpacket) in ASKS or by_mask:
            self._found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class _Taken(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TAKES:
            self._found[TAKES[func]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Count inside the `with` block, by operation, how often the host would wait for a GPU."""
    found: Counter[str] = Counter()
    with _Asked(found), _Taken(found):
        yield found
