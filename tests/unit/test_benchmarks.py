"""The benchmarks' pure parts: documents, what counts as right, bytes, the table."""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.attention import _options
from benchmarks.check import LARGEST_ERROR, dense, errors
from benchmarks.convergence import BASE, YARDSTICK, compare
from benchmarks.convergence_data import rows_of
from benchmarks.convergence_ranks import Backwards
from benchmarks.counting import SentBytes, written_bytes
from benchmarks.documents import MIXES, documents_of
from benchmarks.engines import ENGINES, Attention
from benchmarks.engines.alone import _by_documents
from benchmarks.engines.per_document import zigzag
from benchmarks.layer import Layer
from benchmarks.report import markdown, rows, text
from benchmarks.setting import CHECK_TOKENS, Setting
from uspft.batch import Segments
from uspft.kernels import Block, Mask
from uspft.kernels.dense import dense_attention

SETTING = Setting(4, 25, 8192, 8, 2, "halves", 3, ("ring_cp",))


@pytest.mark.parametrize("tokens", [256, CHECK_TOKENS, 8192, 32768])
def test_documents_fill_the_row(tokens: int) -> None:
    assert len(MIXES) == 4
    for mix in MIXES:
        row = documents_of(mix, tokens)
        assert row == documents_of(mix, tokens), "not seeded"
        assert row.bounds[0] == 0 and row.bounds[-1] == row.length == tokens
        assert (len(row.bounds) == 2) == (mix == "one")


def test_the_mixes_are_what_they_say() -> None:
    halves = Layer(documents_of("halves", 8192), 8, 2).lengths
    assert halves == [4096, 2048, 1024, 512, 256, 128, 64, 64]
    code = Layer(documents_of("code", 32768), 8, 2).lengths
    assert all(n % 2 for n in code[:-1]) and max(code) > 10 * sorted(code)[len(code) // 2]
    short = Layer(documents_of("short", 8192), 8, 2).lengths
    assert len(short) > 40 and max(short) <= 256


def test_dense_is_dense_and_a_wrong_engine_is_seen() -> None:
    layer = Layer(Segments((0, 13, 40), 40), 4, 2, dim=8)
    truth = dense(layer)
    q, k, v, dout = (layer.draw(name).double() for name in ("q", "k", "v", "dout"))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    blocks = [Block(a, b, a, b, Mask.CAUSAL) for a, b in layer.documents]
    out, _ = dense_attention(*inputs, blocks, layer.scale)
    want = (out, *torch.autograd.grad(out, inputs, dout))
    for name, tensor in zip(("out", "dq", "dk", "dv"), want, strict=True):
        assert torch.allclose(truth[name], tensor), name
    held = torch.arange(layer.tokens)
    right = errors(Attention(held, _by_documents(layer.lengths)), layer, truth)
    assert len(right) == 4 and max(right.values()) < LARGEST_ERROR
    wrong = errors(Attention(held, _by_documents([layer.tokens])), layer, truth)
    assert len(wrong) == 4 and min(wrong.values()) > LARGEST_ERROR
    assert errors(Attention(held[:0], _by_documents([])), layer, truth) == {}


def test_zigzag_deals_out_every_token() -> None:
    held = torch.cat([zigzag(rank, 3, 24) for rank in range(3)])
    assert sorted(held.tolist()) == list(range(24))
    assert zigzag(0, 3, 24).tolist() == [0, 1, 2, 3, 20, 21, 22, 23]


def test_a_transfer_that_is_not_counted_is_an_error(tmp_path: Any) -> None:
    unknown = SimpleNamespace(_schema=SimpleNamespace(name="c10d::broadcast_"))
    with pytest.raises(ValueError, match="broadcast_ is not counted"):
        SentBytes().__torch_dispatch__(unknown, ())
    before = written_bytes()
    (tmp_path / "file").write_bytes(bytes(1000))
    assert written_bytes() - before == 1000


def record(name: str, walls: list[float], **more: Any) -> dict[str, Any]:
    """A record of two ranks; the second takes the wall time, the first half of it."""
    rounds = [
        {"wall_seconds_by_rank": [wall / 2, wall], "cpu_seconds_by_rank": [wall / 2, wall]}
        for wall in walls
    ]
    base = {"name": name, "kind": "ours", "status": "ok", "reason": "", "note": ""}
    sent = {"sent_bytes_by_rank": [2**20, 2**21], "written_bytes_by_rank": [2**20, 2**21]}
    return {**base, **sent, "errors": {"out": 3e-7}, "rounds": rounds, **more}


def test_the_table() -> None:
    refused = {"status": "cannot", "reason": "why", "errors": {}}
    records = [
        record("no_communication", [1.0, 9.0, 2.0]),
        record("ring_cp", [3.0, 4.0, 5.0], written_bytes_by_rank=[2**20, 2**22]),
        record("peer", [], **refused),
    ]
    floor, ring, peer = rows(records)
    assert floor[:4] == ("no_communication", "2.000", "1.000 – 9.000", "1.00")
    assert ring[1:9] == ("4.000", "3.000 – 5.000", "2.00", "3.000", "4.000", "1.50", "2.00", "–")
    assert "sockets say 100% else" in ring[-1] and floor[-1] == ""
    assert peer[0] == "peer" and peer[-1] == "cannot: why" and set(peer[1:-1]) == {"–"}
    assert "between hosts" not in markdown("t", records) + text("t", records)
    records[1]["between_hosts_bytes_by_host"] = [2**20, 2**21]
    assert rows(records)[1][8] == "3.00" and "between hosts" in text("t", records)
    assert len({len(line.split(" | ")) for line in markdown("t", records).splitlines()[2:]}) == 1


def test_settings_and_options() -> None:
    assert SETTING.name == "8192-8x2-halves-2hosts-25mbit"
    assert "2 hosts × 2 processes, 25 Mbit/s" in SETTING.sentence
    assert SETTING.layer(CHECK_TOKENS).tokens == CHECK_TOKENS
    options = _options([])
    assert (options.processes, options.tokens, options.heads) == (2, 8192, (8, 2))
    assert options.engines == tuple(ENGINES) and len(ENGINES) == 16
    assert _options(["--hosts", "25"]).processes == 4
    for words in (["--hosts", "25", "--processes", "2"], ["--heads", "8/3"], ["--engines", "x"]):
        with pytest.raises(SystemExit):
            _options(words)


def test_a_curve_is_compared_over_its_own_steps() -> None:
    losses = {BASE.name: [3.0, 2.0, 1.0], YARDSTICK.name: [3.0, 2.5, 9.0], "x": [3.0, 3.0]}
    back, other = compare(losses)
    assert (back["largest"], back["of_yardstick"]) == (8.0, 1.0)
    assert other["steps"] == 2
    assert (other["largest"], other["yardstick"], other["of_yardstick"]) == (1.0, 0.5, 2.0)


def test_the_rows_of_each_step_come_backwards() -> None:
    stream: Any = SimpleNamespace(row=lambda index: index)
    assert [Backwards(stream, 4).row(i) for i in range(8)] == [3, 2, 1, 0, 7, 6, 5, 4]


def test_prompts_are_signatures_with_their_docstrings(tmp_path: Path) -> None:
    data = rows_of("prompts", tmp_path)
    assert data["train_on"] == "completion"
    records = [json.loads(line) for line in Path(data["train"]).read_text().splitlines()]
    assert len(records) > 1000
    for record in records[::500]:
        whole = textwrap.dedent(record["prompt"] + record["completion"])
        (function,) = ast.parse(whole).body
        assert isinstance(function, ast.FunctionDef) and ast.get_docstring(function)
        assert record["completion"].strip()
