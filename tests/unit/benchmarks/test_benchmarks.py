"""The benchmarks' pure parts: documents, what counts as right, bytes, the table."""

from __future__ import annotations

import ast
import json
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.attention.check import LARGEST_ERROR, dense, errors
from benchmarks.attention.counting import SentBytes, written_bytes
from benchmarks.attention.documents import MIXES, documents_of
from benchmarks.attention.engines import ENGINES
from benchmarks.attention.engines.alone import one_process
from benchmarks.attention.engines.per_document import zigzag
from benchmarks.attention.layer import Layer
from benchmarks.attention.options import options_of, settings_of
from benchmarks.attention.report import rows, summary, text
from benchmarks.attention.setting import CHECK_TOKENS, Setting
from benchmarks.convergence import rows as convergence
from benchmarks.convergence.comparison import compare, is_off
from benchmarks.convergence.curves import BASE, CURVES, YARDSTICK
from benchmarks.convergence.ranks import Backwards
from benchmarks.convergence.rows import STDLIB, rows_of
from benchmarks.lab.machine import measured_on
from benchmarks.lab.results import RESULTS, read, write
from benchmarks.lab.tables import as_tokens, listed, markdown, span
from benchmarks.memory.report import GROUPS, GROUPS_EXCHANGE, GROUPS_RING, at_work
from benchmarks.orders.figures import MOST_SECONDS
from benchmarks.planning.hosts import figures as hosts
from benchmarks.planning.hosts.__main__ import joined
from benchmarks.predictions import LONGEST, RECIPES, Rows
from benchmarks.step import figures
from benchmarks.step.case import Case, Measured
from uspft.data.files.sources import list_files
from uspft.kernels import Block, Mask
from uspft.kernels.plain import dense_attention
from uspft.segments import Segments

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


def test_dense_is_dense_and_a_wrong_engine_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(Segments((0, 13, 40), 40), 4, 2, dim=8)
    truth = dense(layer)
    q, k, v, dout = (layer.draw(name).double() for name in ("q", "k", "v", "dout"))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    blocks = [Block(a, b, a, b, Mask.CAUSAL) for a, b in layer.documents]
    out, _ = dense_attention(*inputs, blocks, layer.scale)
    want = (out, *torch.autograd.grad(out, inputs, dout))
    for name, tensor in zip(("out", "dq", "dk", "dv"), want, strict=True):
        assert torch.allclose(truth[name], tensor), name
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    right = errors(one_process(layer), layer, truth)
    assert len(right) == 4 and max(right.values()) < LARGEST_ERROR
    one_document = replace(layer, documents=Segments.single(layer.tokens))
    wrong = errors(one_process(one_document), layer, truth)
    assert len(wrong) == 4 and min(wrong.values()) > LARGEST_ERROR
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    assert errors(one_process(layer), layer, truth) == {}, "the others wait"


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
    assert "between hosts" not in text("t", records)
    records[1]["between_hosts_bytes_by_host"] = [2**20, 2**21]
    assert rows(records)[1][8] == "3.00" and "between hosts" in text("t", records)


def test_settings_and_options() -> None:
    assert SETTING.name == "8192-8x2-halves-2hosts-25mbit"
    assert "2 hosts × 2 processes, 25 Mbit/s" in SETTING.sentence
    assert SETTING.title.endswith(SETTING.sentence)
    assert SETTING.layer(CHECK_TOKENS).tokens == CHECK_TOKENS
    options = options_of([])
    assert (options.processes, options.tokens, options.heads) == (2, 8192, (8, 2))
    assert options.engines == tuple(ENGINES) and len(ENGINES) == 16
    assert options_of(["--hosts", "25"]).processes == 4
    for words in (["--hosts", "25", "--processes", "2"], ["--heads", "8/3"], ["--engines", "x"]):
        with pytest.raises(SystemExit):
            options_of(words)


def test_a_command_line_names_its_cases() -> None:
    options = options_of("--documents one,short --processes 4 --heads 32/8 --rounds 2".split())
    names = [setting.name for setting in settings_of(options)]
    assert names == ["8192-32x8-one-4p", "8192-32x8-short-4p"]


def test_a_curve_is_compared_over_its_own_steps() -> None:
    losses = {BASE.name: [3.0, 2.0, 1.0], YARDSTICK.name: [3.0, 2.5, 9.0], "x": [3.0, 3.0]}
    back, other = compare(losses)
    assert back["largest"] == back["yardstick"] == 8.0
    assert other["steps"] == 2
    assert (other["largest"], other["yardstick"]) == (1.0, 0.5)
    assert not is_off(other) and is_off({"largest": 1.01, "yardstick": 0.5})
    assert not is_off({"largest": 1e-3, "yardstick": 0.0})


def test_the_rows_of_each_step_come_backwards() -> None:
    stream: Any = SimpleNamespace(row=lambda index: index)
    assert [Backwards(stream, 4).row(i) for i in range(8)] == [3, 2, 1, 0, 7, 6, 5, 4]


def test_prompts_are_signatures_with_their_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = list_files(STDLIB, "text")
    assert len(every) > 500
    monkeypatch.setattr(convergence, "list_files", lambda *_: every[::10])
    data = rows_of("prompts", tmp_path)
    assert data["train_on"] == "completion"
    records = [json.loads(line) for line in Path(data["train"]).read_text().splitlines()]
    assert len(records) > 100
    for record in records[::50]:
        whole = textwrap.dedent(record["prompt"] + record["completion"])
        (function,) = ast.parse(whole).body
        assert isinstance(function, ast.FunctionDef) and ast.get_docstring(function)
        assert record["completion"].strip()


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read(tmp_path, "step") == {}
    result = {"a": [1.5, None], "b": {"c": "é"}}
    assert write(tmp_path / "new", "step", result).name == "step.json"
    assert read(tmp_path / "new", "step") == result


def test_the_figures_of_a_step() -> None:
    def run(engine: str, *seconds: float, loss: float = 2.0) -> Measured:
        return Measured(engine, list(seconds), [loss], [1.0])

    ours_alone, theirs_alone = figures.ALONE
    found = [run(figures.OURS, 1, 2, 3), run(figures.THEIRS, 4, 4, 1), run(figures.OURS, 5, 6, 7)]
    found += [run(ours_alone, 6), run(theirs_alone, 10, loss=2.5)]
    result = figures.record(found, Case(256, 3, Path("nowhere")), "ring_cp")
    assert result["median_step_seconds"] == {
        figures.OURS: 4,
        figures.THEIRS: 4,
        ours_alone: 6,
        theirs_alone: 10,
    }
    assert (result["ratio"], result["largest_relative_loss_difference"]) == (1, 0.25)
    lines = figures.table(result).splitlines()[2:]
    assert lines[0] == "| uspft, `ring_cp` | 4.00 | 1.00 | 1.00 to 7.00 | 2 |"
    assert lines[3] == "| half of one process's step, Trainer | 5.00 | 1.25 | 5.00 | 1 |"


def test_a_rate_stays_beside_another_one_of_the_same_case_and_layouts() -> None:
    one = joined({}, {"tokens": 8}, {"40": "then"}, {"40": {"a": {}}})
    both = joined(one, {"tokens": 8}, {"100": "now"}, {"100": {"a": {}}})
    assert both["about"] == {"100": "now", "40": "then"} and list(both["by_mbit"]) == ["100", "40"]
    for case, layout in (({"tokens": 9}, "a"), ({"tokens": 8}, "b")):
        other = joined(both, case, {"100": "later"}, {"100": {layout: {}}})
        assert other["about"] == {"100": "later"} and list(other["by_mbit"]) == ["100"]


def test_the_orders_of_layouts() -> None:
    """A pair in the other order is named where its times are apart; two that plan puts together are
    in none, and following plan costs what its first takes beside the fastest."""
    found: dict[str, Any] = {
        "a": {"steps": [1.0, 9.0, 2.0], "predicted": 1.0},
        "b": {"steps": [3.0], "predicted": 0.5},
        "c": {"steps": [4.0], "predicted": 1.0},
        "d": {"steps": [4.2], "predicted": 0.8},
    }
    wrong = [("a", "b", 1.5), ("a", "c", 2.0), ("a", "d", pytest.approx(2.1))]
    assert hosts.disagreements(found) == wrong
    assert not hosts.holds(found)
    good = {**found, "b": {"steps": [3.0], "predicted": 1.5}, "c": {"steps": [4.0], "predicted": 3}}
    good["d"] = {"steps": [4.2], "predicted": 2.0}
    assert hosts.holds(good) and hosts.disagreements(good) == []
    late = {**good, "a": {"steps": [2.0], "predicted": 1.6}}
    assert hosts.judged(late)[:3] == (4, 5, 1.5) and not hosts.holds(late)
    rates = {"100": found, "50": good}
    cells = " | ".join(["2.00 | 1.00 to 9.00 | 1.00"] * 2)
    assert hosts.table(rates).splitlines()[2] == f"| a | {cells} |"
    one, other = hosts.verdict(rates).splitlines()
    assert one.startswith(
        "- 100 Mbit/s: 2 of 5 pairs that are apart in order, but not a and b (1.50"
    )
    assert "; regret 1.500, mean error" in one
    assert other.startswith("- 50 Mbit/s: 5 of 5 pairs that are apart in order; regret 1.000")


def test_what_tables_are_made_of() -> None:
    table = markdown(["a", "b"], [["x", "1"]])
    assert table == "| a | b |\n| --- | ---: |\n| x | 1 |"
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert span([2.0, 1.0, 1.5], 1) == "1.0 to 2.0" and span([1.001, 1.0]) == "1.00"
    assert span([]) == "–"
    assert [as_tokens(n) for n in (1000, 1 << 10, 1 << 20)] == ["0k", "1k", "1m"]


def test_a_sentence_says_when_and_on_what_it_was_measured() -> None:
    one = {
        "date": "2026-11-21T20:00",
        "machine": {"cores": 2, "cpu": "CPU", "memory_gib": 24, "load_average_before": 0.5},
        "versions": {"torch": "2.13"},
    }
    said = "2 shared cores (CPU), 24 GiB, torch 2.13; load average before: 0.5."
    assert measured_on([one]) == f"Measured 2026-11-21 on {said}"
    other = {**one, "date": "2026-11-22T01:00"}
    assert measured_on([other, one]).startswith("Measured 2026-11-21 to 2026-11-22 on 2 shared")


NOT_MEASURED: set[str] = set()
"""Results of benchmarks that no machine has run to the end yet."""


def test_results_are_one_file_a_benchmark_and_three_pictures_at_most() -> None:
    names = {path.name for path in RESULTS.iterdir()}
    home = RESULTS.parent
    mains = [path.parent.relative_to(home) for path in home.rglob("__main__.py")]
    benchmarks = {"-".join(path.parts) for path in mains}
    assert len(benchmarks) == 19
    results = {name for name in names if name.endswith(".json")}
    assert results | NOT_MEASURED == {f"{b}.json" for b in benchmarks}
    assert results & NOT_MEASURED == set(), "it is measured: leave it out of NOT_MEASURED"
    pictures = {name for name in names if name.endswith(".png")}
    assert len(pictures) <= 3 and len(names) == len(pictures) + len(results) + len(["README.md"])
    said = (RESULTS / "README.md").read_text()
    assert all(f"({name})" in said for name in names - {"README.md"})


def test_kept_cases_are_named_after_their_settings_and_were_right() -> None:
    cases = read(RESULTS, "attention")
    assert len(cases) == 35
    for name, case in cases.items():
        setting = Setting(**{**case["setting"], "engines": tuple(case["setting"]["engines"])})
        assert setting.name == name
        assert [each["name"] for each in case["records"]] == list(setting.engines)
        for each in case["records"]:
            assert bool(summary(each)) == (each["status"] == "ok")
            assert max(each["errors"].values(), default=0) < LARGEST_ERROR


MOST_AT_WORK = [
    ("524288-1", GROUPS, 5.5),
    ("4194304-8", GROUPS, 6.2),
    ("4194304-8", GROUPS_RING, 5.5),
    ("4194304-8", GROUPS_EXCHANGE, 5.5),
    ("16777216-32", GROUPS, 9.7),
]
"""Case, contender and the most layer inputs at work where attention goes by groups of heads."""


def test_kept_results_are_as_good_as_pages_say() -> None:
    memory = read(RESULTS, "memory")
    for case, name, most in MOST_AT_WORK:
        assert at_work(memory[case][name]) <= most, (case, name)
    convergence = read(RESULTS, "convergence")
    compared = {kind: compare(each) for kind, each in convergence["losses"].items()}
    assert compared == convergence["largest_differences"]
    assert all(len(each) == len(CURVES) - 1 for each in compared.values())
    for case in read(RESULTS, "orders")["cases"]:
        assert case["search_seconds"] <= 1.2 * MOST_SECONDS[case["tokens"]], case
        assert case["balance"] <= 1.05, case


def test_the_longest_rows_are_as_long_as_their_recipes_say() -> None:
    longest = {}
    for cards, name in LONGEST.items():
        one = Rows.of(name, ())
        longest[cards] = one.longest
        words = (RECIPES / f"{name}.yaml").read_text().replace("#", "").split()
        assert f"`check` predicts that {as_tokens(one.longest)} fit" in " ".join(words)
        assert one.recipe.data.sequence_length <= one.longest
    assert longest["8 cards"] >= 9 << 20 and longest["32 cards"] >= 26 << 20
