"""Where kernels come from, each there, absent or wrong as a test says; and the probe on CPU."""

from __future__ import annotations

from typing import Any

from tests.support.kernels import CPU, FLOAT, HEADS, Broken
from uspft.kernels import Kernel, choose
from uspft.kernels.probe import probe
from uspft.kernels.torch_cpu import TorchCpu

STALE = ImportError("built for another torch\nand more")


def fake_sources(tried: list[str], **wrong: Exception | str | None) -> dict[str, choose.Source]:
    """Sources by name; wrong: what making one raises, "broken", "absent" or None, which works."""

    def source(name: str, wrong: Exception | str | None) -> choose.Source:
        def make() -> Any:
            tried.append(name)
            if isinstance(wrong, Exception):
                raise wrong
            return Broken() if wrong else TorchCpu()

        return choose.KernelSource("no_such_module" if wrong == "absent" else "torch", make)

    return {name: source(name, what) for name, what in wrong.items()}


def probe_on_cpu(kernel: Kernel, *rest: Any) -> None:
    probe(kernel, HEADS, FLOAT, CPU)
