"""Bytes that a rank sends to other ranks, for any engine alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """The mode counts in the dispatcher, by operation, what is sent while it is active.

    It costs time: never active in a timed round. A transfer that it does not know is an error, so
    that no engine looks cheaper than it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _SENT:
            self.bytes[name] += _SENT[name](args)
        elif name.startswith(_TRANSFERS) and name not in _SEND_NOTHING:
            raise ValueError(f"{name} is not counted; add it to benchmarks/attention/counting.py")
        return func(*args, **(kwargs or {}))


def written_bytes() -> int:
    """This returns what the process has written since its start to sockets and files.

    Linux counts it. gloo writes to its sockets with writev: payload and headers, whoever called.
    """
    return int(_numbers_after("/proc/self/io", "wchar:")[0])


def interface_bytes(name: str) -> int:
    """This returns what this network namespace has sent through an interface, headers included."""
    return int(_numbers_after("/proc/net/dev", f"{name}:")[8])


def _numbers_after(path: str, word: str) -> list[str]:
    for line in Path(path).read_text().splitlines():
        if line.strip().startswith(word):
            return line.split(":", 1)[1].split()
    raise ValueError(f"{path} has no {word}")


def _size(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_size(tensor) for tensor in tensors)


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """The process group among an operation's arguments: an object, or a name."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except RuntimeError:  # a reduce operation is such an object too
                continue
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(GroupName(value))
    raise ValueError("no process group among the arguments")


def _to_all_others(given: Tensor, args: Sequence[Any]) -> int:
    return _size(given) * (_group(args).size() - 1)


def _split(given: Tensor, sizes: Sequence[int], args: Sequence[Any]) -> int:
    """An all-to-all: everything but this rank's piece; no sizes: equal pieces."""
    group = _group(args)
    if not sizes:
        return _size(given) * (group.size() - 1) // group.size()
    return _size(given) * (sum(sizes) - sizes[group.rank()]) // max(1, sum(sizes))


_TRANSFERS = ("c10d::", "_c10d_functional::", "deepspeed::")
_SEND_NOTHING = {
    "c10d::recv_",
    "c10d::barrier",
    "c10d::monitored_barrier_",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}
_SENT: dict[str, Callable[[Sequence[Any]], int]] = {
    "c10d::send": lambda args: _size(args[0]),
    "c10d::alltoall_base_": lambda args: _split(args[1], args[4], args),
    "c10d::allgather_": lambda args: _to_all_others(args[1][0], args),
    "c10d::_allgather_base_": lambda args: _to_all_others(args[1], args),
    "_c10d_functional::all_to_all_single": lambda args: _split(args[0], args[2], args),
    "_c10d_functional::all_gather_into_tensor": lambda args: _to_all_others(args[0], args),
    "deepspeed::dim_zero_all_to_all": lambda args: _split(args[0], (), args),
}
