"""The choice of this device's attention kernel by `model.attention`; a kernel is used only after it
has passed the probe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from uspft.blocks import WIDEST
from uspft.kernels import cuda
from uspft.kernels.kernel import Kernel
from uspft.kernels.plain import ByWidth, TorchCapped
from uspft.kernels.probe import probe
from uspft.kernels.torch_cpu import TorchCpu

HeadShape = tuple[int, int, int]
"""The number of query heads, the number of KV heads, and the head dim."""


class KernelSource(NamedTuple):
    """Where a CUDA kernel comes from."""

    module: str
    """The module that must be installed."""
    make: Callable[[], Kernel]
    """A function that returns the kernel."""
    capped: Callable[[float], Kernel] | None = None
    """A function that returns the kernel with a soft-cap; None: it does not support one."""


SOURCES = {
    "flash_attn_3": KernelSource("flash_attn_interface", partial(cuda.torch_flash, "FA3")),
    "flash_attn_4": KernelSource("flash_attn.cute", cuda.flash_attn_4),
    "flash_attn_2": KernelSource(
        "flash_attn.flash_attn_interface", cuda.flash_attn_2, cuda.flash_attn_2
    ),
    "torch": KernelSource("torch", cuda.torch_flash, TorchCapped),
}
"""The sources of CUDA kernels by name, the fastest first; torch's own is always installed.
flash_attn_3 runs only on compute capability 9.0, and is refused elsewhere."""


def is_installed(name: str) -> bool:
    """Return whether a kernel's module is installed, without importing anything."""
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
    """Return the kernel for `wish`, and a line for each installed kernel that was tried before it
    and failed.

    wish: the value of `model.attention`; `auto` is the fastest kernel that is installed, loads and
    passes the probe on every rank. shapes: the heads of each call that must be right. softcap: that
    of the model's scores. said_by_all: gathers each rank's message, collective. Raises the error of
    the last kernel tried, from any rank: ImportError where the kernel does not load, RuntimeError
    where it fails or is wrong. AcceleratorError is raised at once, since the device is lost.
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
    """Return (name, function that returns the kernel) for each kernel to try: the same on every
    rank, even if different kernels are installed."""
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
    """Return a kernel that has passed the probe on this rank, or the error for which it is
    refused."""
    if not is_installed(name):
        return None, _absent(name)
    try:
        kernel = make()
        if device.type != "cpu" and any(dim > WIDEST for *_, dim in shapes):
            kernel = ByWidth(kernel)
        for heads in shapes:
            probe(kernel, heads, dtype, device)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # packages refuse a device or a shape with various errors
        return None, error
    return kernel, None


def _absent(name: str) -> ImportError:
    return ImportError(f"{name} is not installed")


def _told(error: Exception | None) -> str:
    """Return an error as one line, or "" for none."""
    return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]


def _refusal(name: str, said: list[str]) -> str:
    """Return one line on why a kernel was refused.

    said: each rank's message, "" where it passed.
    """
    rank, what = next((rank, what) for rank, what in enumerate(said) if what)
    return f"{name} refused{f' on rank {rank}' if len(set(said)) > 1 else ''}: {what}"


HOPPER = (9, 0)
WHEELS = "https://download.pytorch.org/whl"


def slower(kernel: Kernel, device: torch.device) -> str | None:
    """Return a line where another kernel would be much faster on this device, else None."""
    if device.type != "cuda":
        return None
    if isinstance(kernel, ByWidth):
        return (
            f"flash kernels take heads of at most {WIDEST} features: layers with wider ones attend "
            "in plain operations of torch in float32, ten times slower or more"
        )
    pip = f"{sys.executable} -m pip install"
    if kernel.softcap and kernel.name == "torch":
        return (
            "scores are soft-capped, and flash-attn 2, whose kernel can do that, is not in use: "
            "attention takes plain operations of torch in float32, ten times slower or more; "
            f"{pip} flash-attn"
        )
    on_hopper = torch.cuda.get_device_capability(device) == HOPPER
    if kernel.softcap or not on_hopper or kernel.name not in ("torch", "flash_attn_2"):
        return None
    build = "cu" + (torch.version.cuda or "").replace(".", "")
    return (
        "neither flash-attn 3 nor 4 is in use: on this GPU their attention is 1.5 to 2 times as "
        f"fast; {pip} --no-deps --index-url {WHEELS}/{build} flash-attn-3, or {pip} --pre "
        f'"flash-attn-4[{build[:4]}]", which compiles for half a minute or more when a run starts'
    )
