"""Every installed CUDA kernel at the sizes of real models; the same at small sizes on CPU."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.attention import Bench, Layer, dense, leaks, make_inputs, shared
from uspft.kernels import Kernel, choose
from uspft.kernels.probe import TOLERANCE, probe
from uspft.kernels.torch_cpu import TorchCpu
from uspft.segments import Segments
from uspft.sequence import Heads


class Place(NamedTuple):
    """Where a kernel runs; size: by what small lengths and head dims are multiplied there."""

    device: torch.device
    dtype: torch.dtype
    size: int
    source: str = ""

    def kernel(self) -> Kernel:
        if not self.source:
            return TorchCpu()
        return choose.SOURCES[self.source].make()

    def heads(self, query: int, kv: int) -> Heads:
        return Heads(query, kv, 32 * self.size)

    def inputs(self, heads: Heads, tokens: int) -> list[torch.Tensor]:
        return [x.to(self.device, self.dtype) for x in make_inputs(heads, tokens)]


ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
)
PLACES = [pytest.param(Place(torch.device("cpu"), torch.float32, 1), id="cpu")] + [
    pytest.param(
        Place(torch.device("cuda"), torch.bfloat16, 4, name), id=f"cuda-{name}", marks=ON_GPU
    )
    for name in choose.SOURCES
    if choose.is_installed(name)
]
DOCUMENTS = (0, 225, 226, 625, 1000)
"""Of 1,024 tokens, the last ones padding."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("heads", [(32, 8), (3, 1)])
def test_the_probe(place: Place, heads: tuple[int, int]) -> None:
    for dtype in {place.dtype, torch.bfloat16}:
        probe(place.kernel(), place.heads(*heads), dtype, place.device)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 192, 256])
def test_every_head_dim_passes_the_probe(place: Place, dim: int) -> None:
    """Those of the models in configs/models and of their families."""
    probe(place.kernel(), (4, 2, dim), place.dtype, place.device)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("window", [None, 128])
def test_long_packed_rows_equal_dense_attention(place: Place, window: int | None) -> None:
    length = 1024 * place.size
    row = Segments(tuple(place.size * start for start in DOCUMENTS), length)
    layer = Layer(Bench.alone(place.kernel()), [row], window and window * place.size)
    inputs = place.inputs(place.heads(4, 2), length)
    scale = inputs[0].shape[-1] ** -0.5
    got = shared(inputs, layer, layer.index(), scale)
    for name, x, want in zip(
        ("out", "dq", "dk", "dv"), got, dense(inputs, layer, scale), strict=True
    ):
        off = float((x.double() - want).norm() / want.norm())
        assert off <= TOLERANCE[place.dtype], f"{name} is off by {off:.1e}"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("window", [None, 11])
def test_documents_never_see_one_another(place: Place, window: int | None) -> None:
    rows = [Segments((0, 17, 40, 41, 95), 96), Segments((0, 31), 96)]
    layer = Layer(Bench.alone(place.kernel()), rows, window)
    # GPUs add up gradients in any order.
    same: Any = partial(torch.allclose, rtol=0.1, atol=0.1) if place.source else torch.equal
    found = leaks(layer, place.inputs(place.heads(8, 2), 192), 0.2, same)
    assert len(found) == 5 and all(map(all, found.values())), found
