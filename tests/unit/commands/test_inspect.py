"""`inspect` shows rows in 80 columns, and as a page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_cases import TOKENIZER, write_lines
from tests.support.launch import ROOT
from tests.support.models import make_documents, make_model
from uspft.__main__ import main

HOSTILE = "<script>alert('x')</script> & \x1b[31m 漢字 🙂"
VOID = ("meta",)


def chat(text: str) -> dict[str, object]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": f"Answer {text}"}]
    return {"messages": turns}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    records = [chat(HOSTILE), chat("word " * 300), chat("short\n\tlines"), chat("word " * 2000)]
    tree = {
        "model": {
            "config": str(ROOT / "configs/models/quickstart.json"),
            "tokenizer": str(TOKENIZER),
            "dtype": "float32",
        },
        "data": {
            "train": str(write_lines(tmp_path / "a.jsonl", records)),
            "sequence_length": 1024,
            "overlong": "drop",
            "shuffle": False,
        },
        "parallel_config": {"context_parallel": 4, "context_parallel_algo": "auto"},
        "training": {"steps": 2, "global_batch_size": 2},
        "launch": {"device": "cpu"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_in_a_terminal(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(recipe), "--rows", "1"]) == 0
    told, _, said = capsys.readouterr().out.partition("\nlengths: ")
    assert f"{recipe.parent}/a.jsonl:4: 4," in told and "dropped (data.overlong: drop)" in told
    assert [line for line in said.splitlines() if len(line) > 80] == []
    assert "\x1b" not in said and "\\x1b[31m" in said
    words = re.sub(r"\s", "", said)  # lines break anywhere
    assert "«Answershort↵⇥lines<|im_end|>»" in words and "tokens…" in words
    assert "row 1 (step 1): 1,024 tokens, 3 documents" in said
    held = re.findall(r"rank\d:[^(]+\((\d+)tokens,\d+targets\)", words)
    assert sum(map(int, held)) == 1024 and len(held) == 4
    assert "rows: 1 of 1,024 tokens in the first epoch" in said
    assert main(["inspect", str(recipe), "--rows", "99999"]) == 0
    all_of_it = capsys.readouterr().out
    assert "--rows: the first epoch has 1 row, and no more are shown\n" in all_of_it
    assert all_of_it.count("\nrow ") == 1


SHORT = [12, 30, 9, 50, 22, 41] * 4
SHARED = {"context_parallel": 2, "context_parallel_algo": "auto"}
LISTED = [{"max_length": 64}, {"max_length": 128, **SHARED}]


@pytest.mark.parametrize(
    ("lengths", "asked", "told"),
    [
        ([128, *SHORT], "auto", "strategies: several layouts, since by the lengths of the data "),
        ([128] * 6, "auto", "strategies: one layout, since by the lengths of the data "),
        ([128, *SHORT], LISTED, "rows: made from samples inside each step"),
    ],
    ids=["auto with a tail", "auto without", "listed"],
)
def test_rows_are_shown_in_the_layouts_that_a_run_chooses(
    lengths: list[int],
    asked: Any,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of data that is tokenised, with a model whose folder holds no tokenizer."""
    data = make_documents(tmp_path / "d.jsonl", lengths, masked=[0.0])
    tree = {
        "model": {"name_or_path": str(make_model(tmp_path / "model", "llama")), "dtype": "float32"},
        "data": {
            "train": str(data.path),
            "sequence_length": 128,
            "packing": "none",
            "shuffle": False,
            "cache_dir": str(tmp_path / "cache"),
        },
        "parallel_config": {"strategies": asked},
        "training": {"steps": 2, "global_batch_size": 64},
        "launch": {"device": "cpu", "processes": 2},
    }
    (tmp_path / "r.yaml").write_text(json.dumps(tree))
    assert main(["inspect", str(tmp_path / "r.yaml"), "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert told in out
    assert (told.startswith("strategies: one")) == ("in the first epoch" in out)
    assert "row 1 (step 1): 128 tokens, 1 document, 127 train, 0 padding" in out
    if asked != "auto":
        assert "row 2 (step 1): 64 tokens, 1 document, 11 train, 52 padding" in out
        assert "each row shared by 2" in out and "each row whole on one" in out
    first = " ".join(str(one) for one in data.documents[0][0][:12])
    assert first in " ".join(out.split()).replace("«", "")


class Balanced(HTMLParser):
    """Reads a page; every tag is closed, and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        self.open += [tag] * (tag not in VOID)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data * ("style" not in self.open)


def test_as_a_page(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = tmp_path / "page.html"
    for _ in range(2):  # a page may be written again
        assert main(["inspect", str(recipe), f"--html={page}"]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "http" not in text and "url(" not in text and "prefers-color-scheme: dark" in text
    found = Balanced()
    found.feed(text)
    assert found.open == []
    assert "<script>alert('x')</script> & \\x1b[31m 漢字 🙂" in found.text
    assert "a.jsonl:4: 4," in found.text and "dropped (data.overlong: drop)" in found.text
    assert re.search(r'title="place \d+, position 0, id 2">&lt;\|im_start\|&gt;', text)
    mine = tmp_path / "mine.txt"
    mine.write_text("kept")
    for wrong in (f"--html={mine}", f"--html={tmp_path}", "--html=/no/such/a.html", "--html="):
        assert main(["inspect", str(recipe), wrong]) == 2
        assert capsys.readouterr().err.startswith("command line: --html: ")
    assert mine.read_text() == "kept"
