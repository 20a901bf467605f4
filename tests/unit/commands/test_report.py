"""The page of output folders: what is drawn is what was written, whoever wrote it."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.support.data_cases import write_lines
from tests.support.launch import ROOT, environment
from uspft.__main__ import main
from uspft.commands.pages import (
    CELLS,
    POINTS,
    Chart,
    Series,
    figure,
    load_map,
    thinned,
    ticks,
)
from uspft.commands.report import leave_report, page_of
from uspft.commands.report_runs import predicted_of, read_runs
from uspft.prepare.host import Invocation

HOSTILE = "<script>alert('x')</script> & \"https://evil.example/\""
LOADS = [[0.0, 2.5, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0]]
VOID = ("meta",)
STEPS = 1000
Page = Callable[..., str]


def loss(step: int) -> float:
    """A curve with one spike, which no thinning may lose."""
    return 42.5 if step == 617 else 9 * math.exp(-step / 300) + 0.1 * (step % 7)


def record(step: int) -> dict[str, Any]:
    found = {"step": step, "learning_rate": 1e-3, "loss": loss(step), "grad_norm": 1 + step % 5}
    found |= {"tokens": 512, "step_seconds": 0.5, "tokens_per_second": 1024.0, "mfu": None}
    found |= {"peak_memory_bytes": 3 << 30, "comm_bytes": {"ring": 5 << 20, HOSTILE: 7}}
    return found | {"strategy": "ring2", "expert_load": 2.5}


def lines() -> list[str]:
    """Of a run that was resumed, started again, evaluated, and is in the middle of a line."""
    every: list[Any] = [{"data": {"read": 6, "kept": 5, "dropped": {HOSTILE: 1}}}]
    for step in range(1, STEPS + 1):
        every.append(record(step))
        if step % 100 == 0:
            every.append({"step": step, "eval_loss": loss(step) + 1, "eval_seconds": 0.1})
        if step == 500:
            every += [{"step": 500, "save_seconds": 1.0}, {"resumed_from_step": 500}]
            every.append({"restart": 1, "after_step": 500, "why": HOSTILE})
    every[-2] |= {"expert_loads": LOADS, "expert_rank_loads": [[1.5, 0.5]] * 2}
    every[3] |= {"loss": None, "strategies": [{"name": "ulysses2", "seconds": 0.25}]}
    return [*map(json.dumps, every), '{"step": 1001, "lo']


def fill(folder: Path, written: list[str]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(written))
    bad = {"step": 300, "rows": [1, 2], "why": HOSTILE, "skipped": True}
    (folder / "incidents.jsonl").write_text(json.dumps(bad) + "\n")
    surroundings = {"command": f"uspft {HOSTILE}", "ranks": 2, "gpus": [HOSTILE]}
    (folder / "environment.json").write_text(json.dumps(surroundings))
    (folder / "recipe.yaml").write_text(f"# {HOSTILE}\nseed: [\n")
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("report") / "my <run>", lines())


@pytest.fixture
def page(output: Path, tmp_path: Path) -> Page:
    def made(*folders: Path) -> str:
        words = map(str, folders or (output,))
        assert main(["report", *words, "-o", str(tmp_path / "page.html")]) == 0
        return (tmp_path / "page.html").read_text()

    return made


def chart(page: str, title: str) -> str:
    (found,) = re.findall(rf"<figure><figcaption><b>{title}.*?</figure>", page, re.S)
    return found


def drawn(figure: str) -> list[list[tuple[float, float]]]:
    """The points of each line, in the chart's own numbers: its axes are read off their ticks."""
    x, y = [], []
    for at, height, anchor, text in re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([\d.,e+-]+)<', figure
    ):
        value = float(text.replace(",", ""))
        (y.append((float(height) - 4, value)) if anchor == "end" else x.append((float(at), value)))

    def read(at: float, axis: list[tuple[float, float]]) -> float:
        (a, low), (b, high) = axis[0], axis[-1]
        return low + (at - a) / (b - a) * (high - low)

    every = re.findall(r'<polyline class="[\w ]+" points="([^"]+)"', figure)
    pairs = [[tuple(map(float, one.split(","))) for one in line.split()] for line in every]
    return [[(read(a, x), read(b, y)) for a, b in line] for line in pairs]


def wrong_points(found: list[tuple[float, float]], of: Callable[[int], float]) -> list[Any]:
    """The points that are not on a curve, as far as a tenth of a pixel tells."""
    steps = [(round(step), value) for step, value in found]
    return [(step, value) for step, value in steps if abs(value - of(step)) > 0.05]


def test_what_is_drawn_is_what_was_written(page: Page) -> None:
    losses, evaluations = drawn(chart(page(), "loss</b>"))
    assert wrong_points(losses, loss) == [] and 100 < len(losses) <= POINTS
    assert (round(losses[0][0]), round(losses[-1][0])) == (1, STEPS)
    assert 617 in {round(step) for step, _ in losses}, "the spike"
    assert wrong_points(evaluations, lambda step: loss(step) + 1) == [] and len(evaluations) == 10
    assert wrong_points(losses, lambda step: loss(step + 3)), "another curve is told apart"
    (rings, _) = drawn(chart(page(), "sent by the busiest rank"))
    assert {round(sent, 2) for _, sent in rings} == {5.0}, "MiB"


def test_every_line_is_in_the_overview_or_a_chart(page: Page) -> None:
    text = unescape(page())
    for told in ("1 to 1,000, 1,000 of them logged", "512,000 tokens in 500 s", "ring2"):
        assert told in text
    assert f"resumed from step 500; started again after step 500: {HOSTILE}" in text
    assert text.count(f"\nbad step 300: {HOSTILE}") == text.count("<figure>") - 2, "in charts"
    assert "best 1.8" in text and "Incidents: 1<" in text
    under = chart(page(), "seconds under each strategy")
    assert "ulysses2 0.25" in under and under.count("<circle") == 1
    assert "MFU</b>" not in text, "nobody told it"


def test_loads_are_on_the_map(page: Page) -> None:
    found = chart(page(), "tokens of each expert by layer, step 1,000")
    cells = re.findall(r"<title>layer (\d), expert (\d): ([\d.]+) × the mean</title>", found)
    assert [float(load) for _, _, load in cells] == [*LOADS[0], *LOADS[1]]
    shades = re.findall(r'class="(more|less)" x="[\d.]+" .*?fill-opacity="([\d.]+)"', found)
    assert shades[:4] == [("less", "1.00"), ("more", "1.00"), ("less", "0.50"), ("less", "0.00")]
    of_ranks = chart(page(), "tokens of each rank by layer")
    assert of_ranks.count("layer 1, rank 0: 1.5 × the mean") == 1


def test_of_many_experts_neighbours_share_a_cell() -> None:
    loads = [[float(layer == 7 and expert == 300) for expert in range(512)] for layer in range(94)]
    drawn_map = load_map("experts", loads, "expert")
    cells = re.findall(r"<title>layer (\d+), experts ([\d–]+): (\d) × the mean</title>", drawn_map)
    assert 2000 < len(cells) <= CELLS and len(cells) % 94 == 0
    assert [cell[:2] for cell in cells if cell[2] != "0"] == [("7", "300–305")]


class Balanced(HTMLParser):
    """Collects what a browser would fetch or run, and tags that are not closed as opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(page)
        self.wrong += [one for one in self.open if one != "html"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe", "use", "image"):
            self.wrong.append(tag)
        for name, _ in attrs:
            if name in ("src", "href") or name.startswith("on"):
                self.wrong.append(name)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}>")


def test_the_page_is_whole_and_asks_for_nothing(page: Page) -> None:
    text = page()
    assert Balanced(text).wrong == [] and "url(" not in text and "@import" not in text
    assert Balanced(text.replace("&lt;script", "<script", 1)).wrong, "what is not escaped is seen"
    assert len(text) < 500_000
    assert not re.search("https?://", text.replace("https://evil.example", ""))


def test_several_runs_share_charts(page: Page, output: Path, tmp_path: Path) -> None:
    other = fill(tmp_path / "other", [json.dumps(record(step)) for step in range(1, 51)])
    text = page(output, other)
    assert "<title>Report: my &lt;run&gt;, other</title>" in text
    _, evaluations, others = drawn(chart(text, "loss</b>"))
    assert (len(evaluations), len(others)) == (10, 50) and wrong_points(others, loss) == []
    assert 'class="s1 d0" points' in chart(text, "loss</b>") and Balanced(text).wrong == []


def test_what_cannot_be_read_is_named(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        code = main(["report", *words])
        told = capsys.readouterr()
        return f"{code} {told.out}{told.err}"

    none = str(tmp_path / "none")
    assert f"2 command line: {none}: is no folder; name the output folder of a run" in said(none)
    assert f"2 command line: {tmp_path}: has no metrics.jsonl; " in said(str(tmp_path))
    begun = fill(tmp_path / "begun", ['{"data": {}}', "{", "[1]", '{"step": 1, "lea'])
    assert "has no training step; metrics.jsonl: 2 lines 2, 3 damaged" in said(str(begun))
    (begun / "metrics.jsonl").write_text(f"{json.dumps(record(1))}\nx\n{json.dumps(record(2))}\n")
    assert "0 warning: " in (told := said(str(begun))) and "line 2 damaged, left out" in told
    assert (
        f"written: {begun}/report.html" in told and "damaged" in (begun / "report.html").read_text()
    )
    assert "0 " in said(str(begun)), "a report is made anew"
    (begun / "report.html").write_text("mine")
    assert "report.html: is there already, and is no report; name another file" in said(str(begun))
    assert (begun / "report.html").read_text() == "mine"
    assert "2 command line: report: has several folders" in said(str(begun), str(output))
    assert "--port: goes with --live" in said(str(begun), "--port", "8000")
    assert "-o: does not go with --live" in said(str(begun), "--live", "-o", none)
    assert "none/page.html: cannot be written: No such" in said(
        str(output), "-o", f"{none}/page.html"
    )


ODD = (
    *(None, True, "x", -1, 1e308, -1e308, math.nan, math.inf, 1e-320, 10**400),
    *([], {}, [1], [[1]], [[math.nan]], [[]], [["x"]], {"a": {"b": 1}}, [{"seconds": "x"}]),
)


def test_whatever_stands_in_a_field_is_no_fault_of_the_page(tmp_path: Path) -> None:
    """A field that is not as a run writes it is left out, and the others are drawn."""
    folder = fill(tmp_path / "odd", [])
    names = [*record(1), "strategies", "expert_loads", "expert_rank_loads", "eval_sets", "seconds"]
    names += ["resumed_from_step", "after_step", "why", "data"]
    for value in ODD:
        every: list[dict[str, Any]] = [record(1), record(2)]
        named = enumerate((name for name in names if name != "step"), 3)
        every += [record(step) | {name: value} for step, name in named]
        every += [{name: value, "step": 1, "eval_loss": value} for name in names]
        text = "".join(json.dumps(one) + "\n" for one in every)
        (folder / "metrics.jsonl").write_text(text)
        (folder / "incidents.jsonl").write_text(json.dumps({"step": value, "why": value}) + "\n")
        told = {"gpus": value, "ranks": value, "versions": value, "command": value}
        (folder / "environment.json").write_text(json.dumps(told))
        (run,) = read_runs([folder])
        found = page_of([run], [predicted_of(run, Invocation("report"))])
        assert Balanced(found).wrong == [] and "NaN" not in chart(found, "loss</b>")
        assert len(drawn(chart(found, "tokens per second"))[0]) >= 2, value


def test_what_is_predicted_is_what_plan_says(
    tmp_path: Path, page: Page, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    tree = {
        "model": {"config": str(ROOT / "configs/models/quickstart.json"), "dtype": "float32"},
        "data": {
            "train": str(write_lines(tmp_path / "a.jsonl", [{"input_ids": [*range(900)]}] * 9)),
            "sequence_length": 1024,
        },
        "parallel_config": {"context_parallel": 4, "context_parallel_algo": "ring_cp"},
        "training": {"steps": 2, "global_batch_size": 2},
        "launch": {"device": "cpu", "processes": 4},
    }
    folder = fill(tmp_path / "run", [json.dumps(record(1))])
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    (folder / "environment.json").write_text(json.dumps({"ranks": 4}))
    text = page(folder)
    capsys.readouterr()
    assert main(["plan", str(folder / "recipe.yaml"), "--ranks", "4", "--json"]) == 0
    (own,) = [one for one in json.loads(capsys.readouterr().out)["layouts"] if one["own"]]
    (guess,) = re.findall(r"<td>seconds of a step</td><td>([\d.]+)</td><td>0.5</td>", text)
    assert float(guess) == pytest.approx(own["step_seconds"], rel=0.01)
    memory = f"{own['memory_bytes'] / (1 << 20):.4g} MiB"
    assert f"(measured: what is resident)</td><td>{memory}</td><td>3 GiB</td><td>–</td>" in text
    assert "<td>MFU</td><td>–</td><td>–</td><td>–</td><td>no maker says" in text
    assert text.count("<td>the planner does not count it, ") == 1, "a kind of its own"
    assert "<td>3</td><td>4 of 4</td>" in text, "the last rank's tokens"
    (folder / "recipe.yaml").write_text("seed: 1\n")
    text = page(folder)
    assert "<td>seconds of a step</td><td>–</td><td>0.5</td><td>–</td><td></td>" in text
    assert text.count("training.global_batch_size: is missing") == 1, "why, once"


def test_a_step_of_several_layouts_is_predicted_as_plan_does(
    tmp_path: Path, page: Page, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    samples = [{"input_ids": [*range(length)]} for length in (1000, 60, 200, 130) * 4]
    shared = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
    tree = {
        "model": {"config": str(ROOT / "configs/models/quickstart.json"), "dtype": "float32"},
        "data": {"train": str(write_lines(tmp_path / "a.jsonl", samples)), "sequence_length": 1024},
        "parallel_config": {"strategies": [{"max_length": 256}, {"max_length": 1024, **shared}]},
        "training": {"steps": 2, "global_batch_size": 8},
        "launch": {"device": "cpu", "processes": 2},
    }
    folder = fill(tmp_path / "run", [json.dumps(record(1))])
    (folder / "recipe.yaml").write_text(json.dumps(tree))
    (folder / "environment.json").write_text(json.dumps({"ranks": 2}))
    assert "not predicted: the lengths of the data are not known here</div>" in page(folder)
    assert main(["preprocess", str(folder / "recipe.yaml")]) == 0
    text = page(folder)
    capsys.readouterr()
    assert main(["plan", str(folder / "recipe.yaml")]) == 0
    (own,) = re.findall(r"^switching +([\d.]+)$", capsys.readouterr().out, re.M)
    (guess,) = re.findall(r"<td>seconds of a step</td><td>([\d.]+)</td><td>0.5</td>", text)
    assert float(guess) == pytest.approx(float(own), abs=1e-3)  # each is rounded
    assert "not predicted: of several layouts in a step other numbers" in text


def test_a_run_that_went_well_does_not_fail_by_its_report(output: Path) -> None:
    """Whatever it is: here there is no examination to predict by."""
    recipe = SimpleNamespace(output_dir=output, parallel_config=SimpleNamespace(strategies=None))
    found: Any = SimpleNamespace(recipe=recipe, settled=(), shape=None)
    assert leave_report(found, Invocation("train")).startswith("warning: no report.html: ")
    assert not (output / "report.html").exists()


def test_a_live_page_is_made_anew(output: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "live", [json.dumps(record(1)), ""])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["-m", "uspft", "report", str(folder), "--live", "--port", port]
    with subprocess.Popen(
        [sys.executable, *words], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and "serving " in process.stdout.readline()
        first = urlopen(f"http://127.0.0.1:{port}/").read().decode()
        assert "1 to 1, 1 of them logged" in first and 'http-equiv="refresh"' in first
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(2)) + "\n")
        assert "1 to 2, 2 of them" in urlopen(f"http://127.0.0.1:{port}/").read().decode()
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{port}/metrics.jsonl")
        (folder / "metrics.jsonl").unlink()
        assert "has no metrics.jsonl" in urlopen(f"http://127.0.0.1:{port}/").read().decode()
        process.send_signal(2)
        assert process.wait(30) == 0
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("count", [1, 2, 3, POINTS, POINTS + 1, 10_007])
def test_thinning_keeps_the_ends_and_the_extremes(count: int) -> None:
    points = [(float(n), float((n * 7919) % 1009)) for n in range(count)]
    kept = thinned(points)
    assert len(kept) <= POINTS and kept == sorted(set(kept)) and set(kept) <= set(points)
    assert {points[0], points[-1]} <= set(kept)
    assert max(y for _, y in kept) == max(y for _, y in points)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (1e-9, 3e-9), (0.98, 1.02), (0, 3e12)])
def test_ticks_are_round_and_between(low: float, high: float) -> None:
    every = ticks(low, high)
    assert 2 <= len(every) <= 6 and all(low <= one <= high * (1 + 1e-9) for one in every)
    apart = every[1] - every[0]
    assert apart / 10 ** math.floor(math.log10(apart) + 1e-6) == pytest.approx(
        round(apart / 10 ** math.floor(math.log10(apart) + 1e-6))
    )


def test_a_chart_of_one_value_or_none_is_drawn() -> None:
    for points in ([(1, 0.0)], [(1, 2.0), (2, 2.0)], [(5, -1.0)], [(1, 1e-9), (2, 1e9)]):
        for log in (False, True):
            assert "NaN" not in figure(Chart("a", series=[Series("b", points)], log=log))
    assert figure(Chart("a", series=[Series("b", [])])) == ""
