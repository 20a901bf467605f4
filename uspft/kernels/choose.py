"""`model.attention` → the kernel of this device, believed after it has been probed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from uspft.kernels import cuda
from uspft.kernels.capped import TorchCapped
from uspft.kernels.kernel import Kernel
from uspft.kernels.probe import probe
from uspft.kernels.torch_cpu import TorchCpu


class Source(NamedTuple):
    """Where a CUDA kernel comes from: a module that must be installed, and what makes it.

    capped: makes one with a soft-cap; None: it has none.
    """

    module: str
    make: Callable[[], Kernel]
    capped: Callable[[float], Kernel] | None = None


SOURCES = {
    "flash_attn_4": Source("flash_attn.cute", partial(cuda.torch_flash, "FA4")),
    "flash_attn_3": Source("flash_attn_interface", partial(cuda.torch_flash, "FA3")),
    "flash_attn_2": Source("flash_attn.flash_attn_interface", cuda.flash_attn_2, cuda.flash_attn_2),
    "torch": Source("torch", cuda.torch_flash, TorchCapped),
}
"""The fastest first; torch's own is always there."""


def is_installed(name: str) -> bool:
    """Whether a kernel's module is there; nothing is imported."""
    package, _, part = SOURCES[name].module.partition(".")
    found = find_spec(package)
    folders = [Path(folder) for folder in (found and found.submodule_search_locations) or ()]
    inside = any((folder / end).exists() for folder in folders for end in (part, f"{part}.py"))
    return found is not None and (inside or not part)


def believed_kernel(
    wish: str,
    shapes: Sequence[tuple[int, int, int]],
    dtype: torch.dtype,
    device: torch.device,
    softcap: float | None = None,
) -> Kernel:
    """The kernel of `model.attention`; `auto`: the fastest that is installed, loads and passes.

    shapes: query heads, KV heads, head dim of each call that must be right; softcap: of the model's
    scores. Raises what the last one tried did: ImportError where it does not load, RuntimeError
    where it fails or is wrong here.
    """
    makers: list[Callable[[], Kernel]]
    if device.type == "cpu":
        makers = [TorchCpu if softcap is None else partial(TorchCapped, softcap)]
    else:
        names = [name for name in SOURCES if is_installed(name)] if wish == "auto" else [wish]
        makers = [make for name in names if (make := _maker(SOURCES[name], softcap))]
    for number, make in enumerate(makers, 1):
        try:
            kernel = make()
            for heads in shapes:
                probe(kernel, heads, dtype, device)
            return kernel
        except Exception:  # packages refuse a device or a shape each in their own way
            if number == len(makers):
                raise
    raise AssertionError("there always is a kernel to try")


def _maker(source: Source, softcap: float | None) -> Callable[[], Kernel] | None:
    if softcap is None:
        return source.make
    return partial(source.capped, softcap) if source.capped else None
