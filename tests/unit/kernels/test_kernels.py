"""One-device attention: the probe, joins of partial results, masks; and the probe's own control."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import invalidate_caches
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import spawn
from tests.support.varlen import varlen_on_cpu
from uspft.assemble import _head_shapes, _said_by_all, _same_job
from uspft.config.problems import RunFailed
from uspft.families.table import CAPPED_KERNELS
from uspft.kernels import (
    Block,
    Grouped,
    Mask,
    Partial,
    believed_kernel,
    capped,
    choose,
    cuda,
    torch_cpu,
    varlen,
)
from uspft.kernels.dense import SEEN, dense_attention
from uspft.kernels.kernel import BlockOutput, Kernel
from uspft.kernels.probe import SHORT, probe
from uspft.kernels.torch_cpu import TorchCpu
from uspft.kernels.varlen import VarlenKernel
from uspft.layout import Layout
from uspft.sequence.rows.spans import Holding, blocks_between

CPU, GPU, FLOAT = torch.device("cpu"), torch.device("cuda"), torch.float32
HEADS = (4, 2, 16)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4, 16), (8, 2, 16), (6, 1, 24)])
def test_the_cpu_kernel_passes_the_probe(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    probe(TorchCpu(), heads, dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.7, 50.0])
@pytest.mark.parametrize("tile", [2**18, 12])
def test_the_capped_kernel_passes_the_probe(
    dtype: torch.dtype, softcap: float, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped, "TILE_SCORES", tile)
    if tile < 100:  # thousands of pieces
        monkeypatch.setattr("uspft.kernels.probe.LONG", SHORT)
    for heads in ((4, 4, 16), (8, 2, 16), (6, 1, 24)):
        probe(capped.TorchCapped(softcap), heads, dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.7, 50.0])
def test_the_probe_sees_a_forgotten_softcap(dtype: torch.dtype, softcap: float) -> None:
    forgetful = TorchCpu()
    forgetful.softcap = softcap
    with pytest.raises(RuntimeError, match="is wrong on this machine"):
        probe(forgetful, HEADS, dtype, CPU)


@pytest.mark.parametrize("softcap", [0.7, 50.0])
def test_the_probe_allows_half_types_an_approximate_tanh(
    softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # float16 has the relative error of the GPU's instruction.
    monkeypatch.setattr(Tensor, "tanh_", lambda x: x.copy_(x.tanh().half()))
    kernel = capped.TorchCapped(softcap)
    for dtype in (torch.bfloat16, torch.float16):
        probe(kernel, HEADS, dtype, CPU)
    with pytest.raises(RuntimeError, match="is wrong on this machine"):
        probe(kernel, HEADS, FLOAT, CPU)


def test_the_probe_meets_the_tiles_that_users_run(monkeypatch: pytest.MonkeyPatch) -> None:
    strips = torch_cpu._strips
    monkeypatch.setattr(torch_cpu, "_strips", lambda *shape: list(strips(*shape))[:-1])
    with pytest.raises(RuntimeError, match="wrong on this machine: dq is off"):
        probe(TorchCpu(), HEADS, FLOAT, CPU)


def test_pieces_of_blocks_cover_each_score_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capped, "TILE_SCORES", 40)
    for block in (
        Block(3, 30, 5, 32, Mask.CAUSAL),
        Block(0, 29, 4, 33, Mask.FLIPPED),
        Block(1, 4, 0, 33, Mask.FULL),
        Block(0, 33, 7, 8, Mask.FULL),
    ):
        pieces = list(capped._pieces([block]))
        met = torch.zeros(33, 33, dtype=torch.int)
        for piece in pieces:
            assert (piece.q1 - piece.q0) * (piece.k1 - piece.k0) <= 40
            square = met[piece.q0 : piece.q1, piece.k0 : piece.k1]
            square += SEEN[piece.mask](torch.ones_like(square))
        whole = torch.zeros_like(met)
        square = whole[block.q0 : block.q1, block.k0 : block.k1]
        square += SEEN[block.mask](torch.ones_like(square))
        assert torch.equal(met, whole)


TILED_SHAPES = ((70, 4), (90, 2), (90, 2), (70, 4))
TILED = (
    Block(0, 33, 0, 33, Mask.CAUSAL),
    Block(33, 70, 34, 71, Mask.CAUSAL),
    Block(0, 40, 71, 90, Mask.FULL),
    Block(34, 37, 0, 34, Mask.FULL),
    Block(40, 66, 0, 26, Mask.FLIPPED),
)
"""Long and short, wide and tall; no query meets a key twice."""
BACKWARD = torch_cpu._BACKWARD


def computed(kernel: Any, inputs: Any, blocks: Any, *, at_once: bool = False) -> list[Tensor]:
    """out, dq, dk and dv of a kernel, joined and added up; forward block by block, or at once."""
    q, k, v, dout = inputs
    partial = Partial(q)
    for call in [blocks] if at_once else [[block] for block in blocks]:
        partial.add(kernel.forward((q, k, v), call, 0.3))
    out, lse = partial.result()
    queries, keys = kernel.backward((q, k, v), (out, lse, dout), blocks, 0.3)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for start, stop, (dq,) in queries:
        grads[0][start:stop] += dq
    for start, stop, pair in keys:
        for total, part in zip(grads[1:], pair, strict=True):
            total[start:stop] += part
    return [out, *grads]


def expected(dense: Any, inputs: Any) -> list[Tensor]:
    """out, dq, dk and dv of the written-out formula."""
    *qkv, dout = inputs
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, _ = dense(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def test_the_variable_length_path_passes_the_probe() -> None:
    probe(varlen_on_cpu(), (4, 2, 16), torch.float32, CPU)


PACKED = [Block(a, b, a, b, Mask.CAUSAL) for a, b in pairwise((0, 17, 18, 40, 70))]
WINDOWED = blocks_between(Holding([(0, 70)]), Holding([(0, 70)]), [(0, 50), (50, 53), (53, 70)], 9)
SHARED = (
    Block(0, 20, 0, 30, Mask.FULL),
    Block(20, 30, 30, 35, Mask.FULL),
    Block(35, 70, 0, 31, Mask.FULL),
    Block(0, 20, 35, 55, Mask.FLIPPED),
    Block(20, 40, 60, 80, Mask.FLIPPED),
)
"""Neighbours by query, by key and not at all."""


@pytest.mark.parametrize(
    ("blocks", "runs"), [(PACKED, (1, 1)), (SHARED, (2 + 1, 2 + 2)), (TILED, (4, 5))]
)
def test_neighbours_are_one_part(blocks: Sequence[Block], runs: tuple[int, int]) -> None:
    q, k, v, dout = (torch.randn(n, h, 8) for n, h in TILED_SHAPES)
    parts = varlen_on_cpu().forward((q, k, v), blocks, 0.3)
    lse = torch.zeros(4, 70)
    queries, keys = varlen_on_cpu().backward((q, k, v), (q, lse, dout), blocks, 0.3)
    assert (len(parts), len(queries), len(keys)) == (runs[0], *runs)
    if blocks is PACKED:
        assert (parts[0].q0, parts[0].q1, len(parts[0].out)) == (0, 70, 70)


PREFIXES = [
    *(Block(5 * n, 5 * n + 5, 0, 40 + 10 * n, Mask.FULL) for n in range(5)),
    Block(30, 32, 80, 84, Mask.FULL),
    Block(32, 40, 84, 90, Mask.FULL),
]
"""Runs of a document's queries that see ever more of its keys, and two short documents."""


def test_keys_that_queries_share_are_not_copied_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = varlen_on_cpu()
    forward, keys = kernel._forward, []

    def noting(q: Tensor, k: Tensor, *rest: Any) -> Any:
        keys.append((len(k), k.untyped_storage().data_ptr()))
        return forward(q, k, *rest)

    monkeypatch.setattr(kernel, "_forward", noting)
    q, k, v, _ = (torch.randn(n, h, 8) for n, h in TILED_SHAPES)
    kernel.forward((q, k, v), PREFIXES, 0.3)
    copied = [length for length, where in keys if where != k.untyped_storage().data_ptr()]
    assert sum(copied) <= len(k) < sum(b.k1 - b.k0 for b in PREFIXES)
    assert sorted(length for length, _ in keys) == [50, 50, 60, 70, 80]


def test_lengths_are_sent_to_the_device_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a layer, with 70 stages and two windows."""
    sent: list[Tensor] = []
    monkeypatch.setattr(varlen, "_put", lambda x, device: sent.append(x) or x)
    varlen._calls.cache_clear()
    kernel, x = varlen_on_cpu(), torch.randn(300, 1, 8)
    stages = [[Block(0, n, n, 2 * n, Mask.FULL)] for n in range(2, 142)]
    for blocks in stages * 2:
        kernel.forward((x, x, x), blocks, 0.3)
    assert len(sent) == 2 * 140


@pytest.mark.parametrize("blocks", [PACKED, WINDOWED, SHARED, PREFIXES, TILED])
def test_the_variable_length_path_equals_dense_attention(blocks: Sequence[Block]) -> None:
    inputs = tuple(torch.randn(n, h, 8, dtype=torch.float64) for n, h in TILED_SHAPES)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense_attention(q, k, v, blocks, 0.3)

    found = computed(varlen_on_cpu(), inputs, blocks)
    at_once = computed(varlen_on_cpu(), inputs, blocks, at_once=True)
    for got, again, want in zip(found, at_once, expected(dense, inputs), strict=True):
        assert torch.allclose(got, want) and torch.allclose(again, want)


@pytest.mark.parametrize("kernel", [TorchCpu(), capped.TorchCapped(2.0)])
def test_uneven_head_groups_equal_dense_attention(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped, "TILE_SCORES", 30)
    monkeypatch.setattr(torch_cpu, "TILE", 7)
    monkeypatch.setattr(torch_cpu, "STRIP", 7)
    q, k, v, dout = (torch.randn(20, n, 8, dtype=torch.float64) for n in (4, 2, 2, 4))
    blocks = [Block(0, 20, 0, 20, Mask.CAUSAL)]
    uneven = Grouped(kernel, [((0, 1), (0, 1)), ((1, 4), (1, 2))])
    spread = torch.tensor([0, 1, 1, 1])

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense_attention(q, k[:, spread], v[:, spread], blocks, 0.3, softcap=kernel.softcap)

    found = computed(uneven, (q, k, v, dout), blocks)
    for got, want in zip(found, expected(dense, (q, k, v, dout)), strict=True):
        assert torch.allclose(got, want)


@pytest.mark.parametrize("tile", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("strip", [1, 40, 1000])
@pytest.mark.parametrize("joined", [20, 1000])
def test_tiles_of_the_cpu_kernel_equal_dense_attention(
    tile: int, strip: int, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_cpu, "TILE", tile)
    monkeypatch.setattr(torch_cpu, "STRIP", strip)
    monkeypatch.setattr(torch_cpu, "JOINED_ROWS", joined)
    inputs = tuple(torch.randn(n, h, 8, dtype=torch.float64) for n, h in TILED_SHAPES)
    found = computed(TorchCpu(), inputs, TILED)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dense_attention(q, k, v, TILED, 0.3)

    for got, want in zip(found, expected(dense, inputs), strict=True):
        assert torch.allclose(got, want, rtol=1e-11, atol=1e-11)


def test_a_tile_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    strips = torch_cpu._strips
    monkeypatch.setattr(torch_cpu, "_strips", lambda *shape: list(strips(*shape))[:-1])
    with pytest.raises(AssertionError):
        test_tiles_of_the_cpu_kernel_equal_dense_attention(16, 40, 1000, monkeypatch)


@pytest.mark.parametrize("length", range(17, 3000, 7))
def test_strips_are_even_and_no_power_of_two(length: int) -> None:
    width = torch_cpu._even(length, torch_cpu.STRIP)
    assert width.bit_count() > 1
    assert width % 16 == 0 and width - torch_cpu.STRIP <= 16
    assert -(-length // width) <= -(-length // torch_cpu.STRIP)


@pytest.mark.parametrize(("dtype", "calls"), [(torch.float32, 3 * 3 + 2), (torch.bfloat16, 1)])
def test_types_that_tiles_would_round_are_not_tiled(
    dtype: torch.dtype, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = []

    def counting(*args: Any, **options: Any) -> Any:
        count.append(args)
        return BACKWARD(*args, **options)

    monkeypatch.setattr(torch_cpu, "_BACKWARD", counting)
    n = 3 * torch_cpu.STRIP
    x = tuple(torch.randn(n, 1, 8, dtype=dtype) for _ in range(4))
    computed(TorchCpu(), x, [Block(0, n, 0, n, Mask.CAUSAL)])
    assert len(count) == calls


@pytest.mark.parametrize(
    "kernel",
    [
        TorchCpu(),
        capped.TorchCapped(2.0),
        varlen_on_cpu(),
        Grouped(TorchCpu(), [((0, 1), (0, 1)), ((1, 4), (1, 2))]),
    ],
    ids=lambda kernel: kernel.name,
)
def test_a_block_reads_its_own_tokens_only(kernel: Any) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(30, n, 8) for n in (4, 2, 2, 4))
    blocks = [
        Block(0, 12, 0, 12, Mask.CAUSAL),
        Block(12, 15, 12, 15, Mask.CAUSAL),
        Block(15, 30, 15, 30, Mask.CAUSAL),
    ]

    before = computed(kernel, (q, k, v, dout), blocks)
    for block in blocks:
        broken = [x.clone() for x in (q, k, v, dout)]
        for x in broken:
            x[: block.q0], x[block.q1 :] = torch.nan, torch.nan
        rows = slice(block.q0, block.q1)
        after = computed(kernel, broken, blocks)
        assert all(torch.equal(x[rows], y[rows]) for x, y in zip(before, after, strict=True))
        assert not torch.equal(before[0], after[0])


class Broken(TorchCpu):
    """A kernel whose scale is a little off."""

    def forward(self, qkv: Any, blocks: Any, scale: float) -> list[BlockOutput]:
        return super().forward(qkv, blocks, scale * 1.01)


class Shifted(TorchCpu):
    """A kernel whose lse is off, as one that forgets the scale's logarithm would have it."""

    def forward(self, qkv: Any, blocks: Any, scale: float) -> list[BlockOutput]:
        return [part._replace(lse=part.lse + 0.05) for part in super().forward(qkv, blocks, scale)]


class Blind(TorchCpu):
    """A kernel that takes any memory to lie token by token."""

    def forward(self, qkv: Any, blocks: Any, scale: float) -> list[BlockOutput]:
        q, k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in qkv)
        return super().forward((q, k, v), blocks, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [Broken(), Shifted(), Blind()])
def test_the_probe_finds_a_broken_kernel(kernel: Any, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="is wrong on this machine"):
        probe(kernel, (4, 2, 64), dtype, CPU)


def test_the_cpu_kernel_takes_any_strides() -> None:
    q, k, v = (torch.randn(n, 8, 20, dtype=torch.float64).transpose(1, 2) for n in (4, 2, 2))
    q, k, v = (x.permute(1, 0, 2) for x in (q, k, v))
    blocks = [Block(0, 20, 0, 20, Mask.CAUSAL)]
    assert q.stride(-1) != 1
    (part,) = TorchCpu().forward((q, k, v), blocks, 0.3)
    want, _ = dense_attention(q, k, v, blocks, 0.3)
    assert torch.allclose(part.out, want)


def test_joining_parts_whose_weights_differ_by_more_than_a_float_can_hold() -> None:
    q = torch.randn(6, 2, 8) * 40
    k, v = torch.randn(9, 2, 8) * 40, torch.randn(9, 2, 8)
    partial = Partial(q)
    for block in (Block(0, 6, 0, 4, Mask.FULL), Block(2, 6, 4, 9, Mask.FULL)):
        partial.add(TorchCpu().forward((q, k, v), [block], 1.0))
    blocks = [Block(0, 6, 0, 4, Mask.FULL), Block(2, 6, 4, 9, Mask.FULL)]
    want, lse = dense_attention(q, k, v, blocks, 1.0)
    out, got = partial.result()
    assert torch.allclose(out, want, atol=1e-5) and torch.allclose(got, lse, rtol=1e-5)


def test_a_query_without_a_key_has_out_zero_and_lse_minus_infinity() -> None:
    q = torch.randn(5, 2, 8)
    partial = Partial(q)
    partial.add(TorchCpu().forward((q, q, q), [Block(1, 3, 1, 3, Mask.CAUSAL)], 1.0))
    out, lse = partial.result()
    assert out[[0, 3, 4]].abs().sum() == 0 and (lse[:, [0, 3, 4]] == -torch.inf).all()
    assert out[1:3].isfinite().all() and lse[:, 1:3].isfinite().all()


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


STALE = ImportError("built for another torch\nand more")


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


def choosing(rank: int) -> list[Any]:
    """What this rank chooses, and why, where no kernel but torch's works on both."""
    tried: list[str] = []
    choose.probe = probe_on_cpu  # type: ignore[assignment]
    choose.SOURCES = fake_sources(
        tried,
        flash_attn_4=STALE if rank else None,
        flash_attn_3=None if rank else "absent",
        flash_attn_2=None if rank else "broken",
        torch=None,
    )
    kernel, refused = believed_kernel("auto", [HEADS], FLOAT, GPU, said_by_all=_said_by_all)
    try:
        believed_kernel("flash_attn_4", [HEADS], FLOAT, GPU, said_by_all=_said_by_all)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    job: Any = SimpleNamespace(fingerprint=lambda: rank, corpus=Path(), steps=1, resume_from=None)
    with pytest.raises(RunFailed, match=f"run different things .here {rank}"):
        _same_job(job)
    job.fingerprint = lambda: 1
    _same_job(job)
    return [kernel.name, tried, refused, told]


def test_ranks_choose_the_same_kernel() -> None:
    first, second = spawn(2, choosing)
    assert first[0] == second[0] == "torch" and first[2] == second[2]
    assert first[1] == ["flash_attn_4", "flash_attn_2", "torch", "flash_attn_4"]
    assert second[1] == ["flash_attn_4", "flash_attn_3", "flash_attn_2", "torch", "flash_attn_4"]
    assert first[2][:2] == [
        "flash_attn_4 refused on rank 1: ImportError: built for another torch",
        "flash_attn_3 refused on rank 0: ImportError: flash_attn_3 is not installed",
    ]
    assert first[2][2].startswith("flash_attn_2 refused on rank 0: RuntimeError: attention kernel")
    assert second[3].startswith("ImportError: built for another torch")
    assert first[3].startswith("RuntimeError: attention kernel flash_attn_4 refused on rank 1: Imp")


def test_a_softcap_takes_a_kernel_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    able = [name for name, source in choose.SOURCES.items() if source.capped]
    assert sorted(["auto", *able]) == sorted(CAPPED_KERNELS)
    assert believed_kernel("auto", [HEADS], FLOAT, CPU, 30.0)[0].softcap == 30.0
    assert believed_kernel("auto", [HEADS], FLOAT, CPU)[0].softcap is None
    monkeypatch.setattr(choose, "is_installed", lambda name: name in ("flash_attn_3", "torch"))
    monkeypatch.setattr(choose, "probe", probe_on_cpu)
    found, refused = believed_kernel("auto", [HEADS], FLOAT, GPU, 30.0)
    # flash_attn_3 is installed, and has none.
    assert isinstance(found, capped.TorchCapped) and not refused


@pytest.mark.parametrize(
    ("heads", "ulysses", "calls"),
    [
        ((8, 2), 1, {(8, 2)}),
        ((8, 2), 2, {(4, 1)}),
        ((8, 2), 4, {(2, 1)}),
        ((6, 2), 4, {(1, 1), (2, 1)}),
        ((9, 3), 2, {(3, 1), (1, 1), (2, 1)}),
        ((3, 1), 8, {(1, 1)}),
    ],
)
def test_what_is_probed_are_the_calls_that_ranks_make(
    heads: tuple[int, int], ulysses: int, calls: set[tuple[int, int]]
) -> None:
    config = SimpleNamespace(
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=None, hidden_size=72
    )
    shapes = _head_shapes(config, Layout(ulysses=ulysses, ring=2))
    assert {(query, kv) for query, kv, _ in shapes} == calls and len(shapes) == len(calls)
    assert {dim for _, _, dim in shapes} == {72 // heads[0]}


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


class Switch:
    """torch's switch between flash attentions, which is the process's; aten's calls, by who ran."""

    def __init__(self) -> None:
        self.active: str | None = None
        self.ran: list[str | None] = []
        self.turned = 0

    def turn(self, package: str | None) -> None:
        self.active, self.turned = package, self.turned + 1

    def attention(self, **missing: Any) -> SimpleNamespace:
        found = {
            "current_flash_attention_impl": lambda: self.active,
            "activate_flash_attention_impl": self.turn,
            "restore_flash_attention_impl": lambda: self.turn(None),
        }
        return SimpleNamespace(**{name: way for name, way in found.items() if name not in missing})

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.ran.append(self.active)
        return args[0], args[0][..., 0].t()

    def backward(self, dout: Tensor, *qkv: Any, **options: Any) -> tuple[Tensor, ...]:
        self.ran.append(self.active)
        return qkv[:3]


@pytest.mark.parametrize("told", [True, False])
def test_each_kernel_runs_what_it_is_called(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = Switch()
    missing = {} if told else {"current_flash_attention_impl": True}
    aten = SimpleNamespace(
        _flash_attention_forward=switch.forward, _flash_attention_backward=switch.backward
    )
    monkeypatch.setattr(cuda, "attention", switch.attention(**missing))
    monkeypatch.setattr(torch.ops, "aten", aten)
    x = torch.randn(4, 1, 8)
    blocks = [Block(0, 4, 0, 4, Mask.CAUSAL)]

    def run(kernel: VarlenKernel) -> list[str | None]:
        switch.ran.clear()
        kernel.forward((x, x, x), blocks, 1.0)
        kernel.backward((x, x, x), (x, x[..., 0].t(), x), blocks, 1.0)
        return switch.ran

    own = cuda.torch_flash()
    assert run(own) == [None, None] and switch.turned == 0
    hopper, blackwell = cuda.torch_flash("FA3"), cuda.torch_flash("FA4")
    assert run(hopper) == ["FA3", "FA3"] and run(blackwell) == ["FA4", "FA4"]
    turned = switch.turned
    assert run(blackwell) == ["FA4", "FA4"] and run(hopper) == ["FA3", "FA3"]
    if told:  # or torch is told anew each time, and its own cannot be had back
        assert switch.turned == turned + 1 and run(own) == [None, None]
