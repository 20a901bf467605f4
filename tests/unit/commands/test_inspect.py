"""`inspect` shows rows in 80 columns, and as a page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.data_cases import TOKENIZER, write_lines
from tests.support.launch import ROOT
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


@pytest.mark.timeout(120)
def test_in_a_terminal(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(recipe), "--rows", "1"]) == 0
    told, _, said = capsys.readouterr().out.partition("\nlengths: ")
    assert f"{recipe.parent}/a.jsonl:4: 4," in told and "dropped (data.overlong: drop)" in told
    assert [line for line in said.splitlines() if len(line) > 80] == []
    assert "\x1b" not in said and "\\x1b[31m" in said
    whole = said.replace("\n", "")
    assert "«Answer short↵⇥lines<|im_end|>»" in whole
    assert "tokens … " in whole and "row 1 (step 1): 1,024 tokens, 3 documents" in whole
    held = re.findall(r" rank \d: [^(]+\((\d+) tokens, \d+ targets\)", whole)
    assert sum(map(int, held)) == 1024 and len(held) == 4
    assert "rows: 1 of 1,024 tokens in the first epoch" in said


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


@pytest.mark.timeout(120)
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
