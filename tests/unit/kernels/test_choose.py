"""Which kernel is chosen: what is installed, in which order it is tried, and what is said."""

from __future__ import annotations

from importlib import invalidate_caches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.kernel_sources import STALE, fake_sources, probe_on_cpu
from tests.support.kernels import CPU, FLOAT, GPU, HEADS
from uspft.families.table import CAPPED_KERNELS
from uspft.kernels import believed_kernel, choose, plain, slower
from uspft.kernels.probe import probe
from uspft.kernels.torch_cpu import TorchCpu


def test_auto_tries_what_is_installed_the_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    wrong = {"flash_attn_4": STALE, "flash_attn_3": "broken", "flash_attn_2": None, "torch": None}
    sources = fake_sources(tried, absent="absent", **wrong)
    monkeypatch.setattr(choose, "SOURCES", sources)
    monkeypatch.setattr(choose, "probe", probe_on_cpu)
    kernel, refused = believed_kernel("auto", [HEADS], FLOAT, GPU)
    assert isinstance(kernel, TorchCpu)
    assert tried == ["flash_attn_4", "flash_attn_3", "flash_attn_2"]
    assert refused[0] == "flash_attn_4 refused: ImportError: built for another torch"
    assert refused[1].startswith("flash_attn_3 refused: RuntimeError: attention kernel")
    assert len(refused) == 2
    # Asked for by name: nothing else will do.
    with pytest.raises(RuntimeError, match="is wrong on this machine"):
        believed_kernel("flash_attn_3", [HEADS], FLOAT, GPU)
    with pytest.raises(ImportError, match="built for another torch"):
        believed_kernel("flash_attn_4", [HEADS], FLOAT, GPU)
    with pytest.raises(ImportError, match="absent is not installed"):
        believed_kernel("absent", [HEADS], FLOAT, GPU)
    assert believed_kernel("auto", [HEADS], FLOAT, CPU)[0].name == "torch"


def test_a_lost_device_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    lost = torch.AcceleratorError("an illegal memory access")
    monkeypatch.setattr(choose, "SOURCES", fake_sources(tried, flash_attn_4=lost, torch=None))
    with pytest.raises(torch.AcceleratorError):
        believed_kernel("auto", [HEADS], FLOAT, GPU)
    assert tried == ["flash_attn_4"]


def test_where_all_are_refused_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = fake_sources([], flash_attn_4=STALE, torch=RuntimeError("no kernel image"))
    monkeypatch.setattr(choose, "SOURCES", sources)
    with pytest.raises(RuntimeError, match="no kernel image") as found:
        believed_kernel("auto", [HEADS], FLOAT, GPU)
    assert found.value.__notes__ == ["flash_attn_4 refused: ImportError: built for another torch"]


def test_a_softcap_takes_a_kernel_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    able = [name for name, source in choose.SOURCES.items() if source.capped]
    assert sorted(["auto", *able]) == sorted(CAPPED_KERNELS)
    assert believed_kernel("auto", [HEADS], FLOAT, CPU, 30.0)[0].softcap == 30.0
    assert believed_kernel("auto", [HEADS], FLOAT, CPU)[0].softcap is None
    monkeypatch.setattr(choose, "is_installed", lambda name: name in ("flash_attn_3", "torch"))
    monkeypatch.setattr(choose, "probe", probe_on_cpu)
    found, refused = believed_kernel("auto", [HEADS], FLOAT, GPU, 30.0)
    # flash_attn_3 is installed, and has none.
    assert isinstance(found, plain.TorchCapped) and not refused


class Narrow(TorchCpu):
    """A kernel that takes heads of at most 256 features, as flash kernels do."""

    def forward(self, qkv: Any, *rest: Any) -> Any:
        if qkv[0].shape[-1] > 256:
            raise RuntimeError("only heads of at most 256 features")
        return super().forward(qkv, *rest)


def test_heads_that_no_flash_kernel_takes_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"torch": choose.KernelSource("torch", Narrow)}
    monkeypatch.setattr(choose, "SOURCES", sources)
    on_cpu = lambda kernel, heads, *_: probe(kernel, heads, FLOAT, CPU)  # noqa: E731
    monkeypatch.setattr(choose, "probe", on_cpu)
    found, refused = believed_kernel("auto", [(2, 1, 264), (4, 2, 16)], FLOAT, GPU)
    assert isinstance(found, plain.ByWidth) and not refused
    assert "heads of at most 256 features" in str(slower(found, GPU))
    assert isinstance(believed_kernel("auto", [(4, 2, 256)], FLOAT, GPU)[0], Narrow)
    for module in (plain, choose):  # without them the kernel is refused
        monkeypatch.setattr(module, "WIDEST", 512)
    with pytest.raises(RuntimeError, match="only heads of at most 256"):
        believed_kernel("auto", [(2, 1, 264)], FLOAT, GPU)


def test_a_kernel_that_fails_on_one_shape_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(choose, "probe", lambda kernel, heads, *rest: tried.append(heads[0]))
    believed_kernel("auto", [HEADS, (3, 1, 8)], FLOAT, CPU)
    assert tried == [HEADS[0], 3]


def test_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # type: ignore[no-untyped-call]
    here = [name for name in choose.SOURCES if choose.is_installed(name)]
    assert here == ["torch"]
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    invalidate_caches()
    assert choose.is_installed("flash_attn_4") and not choose.is_installed("flash_attn_2")
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "flash_attn" / "flash_attn_interface.py").touch()
    (tmp_path / "flash_attn_interface.py").touch()
    invalidate_caches()
    assert all(choose.is_installed(name) for name in choose.SOURCES)


@pytest.mark.parametrize(
    ("capability", "kernel", "softcap", "told"),
    [
        ((9, 0), "torch", None, "--no-deps --index-url https://download.pytorch.org/whl/cu130 fl"),
        ((9, 0), "flash_attn_2", None, '--pre "flash-attn-4[cu13]"'),
        ((9, 0), "flash_attn_3", None, ""),
        ((9, 0), "torch", 50.0, "flash-attn 2, whose kernel can do that, is not in use"),
        ((9, 0), "flash_attn_2", 50.0, ""),
        ((8, 0), "torch", None, ""),
        ((10, 0), "torch", 30.0, "pip install flash-attn"),
    ],
)
def test_what_is_lost_is_said_with_a_remedy(
    capability: tuple[int, int],
    kernel: str,
    softcap: float | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    here: Any = SimpleNamespace(name=kernel, softcap=softcap)
    said = slower(here, GPU)
    assert said is None if not told else said and told in said and "\n" not in said
    assert slower(here, CPU) is None
