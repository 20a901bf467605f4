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

HeadShape = tuple[int, int, int]
"""Query heads, KV heads, head dim."""


class KernelSource(NamedTuple):
    """Where a CUDA kernel comes from: a module that must be installed, and what makes it.

    capped: makes one with a soft-cap; None: it has none.
    """

    module: str
    make: Callable[[], Kernel]
    capped: Callable[[float], Kernel] | None = None


SOURCES = {
    "flash_attn_4": KernelSource("flash_attn.cute", partial(cuda.torch_flash, "FA4")),
    "flash_attn_3": KernelSource("flash_attn_interface", partial(cuda.torch_flash, "FA3")),
    "flash_attn_2": KernelSource(
        "flash_attn.flash_attn_interface", cuda.flash_attn_2, cuda.flash_attn_2
    ),
    "torch": KernelSource("torch", cuda.torch_flash, TorchCapped),
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
    shapes: Sequence[HeadShape],
    dtype: torch.dtype,
    device: torch.device,
    softcap: float | None = None,
    *,
    said_by_all: Callable[[str], list[str]] = lambda mine: [mine],
) -> tuple[Kernel, list[str]]:
    """The kernel of `model.attention`, and a line for each that is there and was refused before it.

    `auto`: the fastest that is installed, loads and passes on every rank. shapes: of each call that
    must be right; softcap: of the model's scores; said_by_all: what each rank says, by rank, which
    is collective. Raises what the last one tried did, wherever: ImportError where it does not load,
    RuntimeError where it fails or is wrong; and AcceleratorError at once: the device is lost.
    """
    refused: list[str] = []
    error: Exception | None = None
    for name, make in _candidates(wish, device, softcap):
        kernel, error = _tried(name, make, shapes, dtype, device)
        said = said_by_all(_told(error))
        if kernel and not any(said):
            return kernel, refused
        if set(said) != {_told(_absent(name))}:
            refused.append(_refusal(name, said))
    error = error or RuntimeError(f"attention kernel {refused[-1]}; choose another model.attention")
    for line in refused[:-1]:
        error.add_note(line)
    raise error


def _candidates(
    wish: str, device: torch.device, softcap: float | None
) -> list[tuple[str, Callable[[], Kernel]]]:
    """The same on every rank: what is installed may differ."""
    if device.type == "cpu":
        return [("torch", TorchCpu if softcap is None else partial(TorchCapped, softcap))]
    names = SOURCES if wish == "auto" else [wish]
    return [(name, make) for name in names if (make := _maker(SOURCES[name], softcap))]


def _maker(source: KernelSource, softcap: float | None) -> Callable[[], Kernel] | None:
    if softcap is None:
        return source.make
    return partial(source.capped, softcap) if source.capped else None


def _tried(
    name: str,
    make: Callable[[], Kernel],
    shapes: Sequence[HeadShape],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Kernel | None, Exception | None]:
    """A kernel that has passed here, or why there is none."""
    if not is_installed(name):
        return None, _absent(name)
    try:
        kernel = make()
        for heads in shapes:
            probe(kernel, heads, dtype, device)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # packages refuse a device or a shape each in their own way
        return None, error
    return kernel, None


def _absent(name: str) -> ImportError:
    return ImportError(f"{name} is not installed")


def _told(error: Exception | None) -> str:
    """An error in one line; "" for none."""
    return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]


def _refusal(name: str, said: list[str]) -> str:
    """One line for what some ranks, or all, said."""
    rank, what = next((rank, what) for rank, what in enumerate(said) if what)
    return f"{name} refused{f' on rank {rank}' if len(set(said)) > 1 else ''}: {what}"
