"""Numbers on pages: figures are what their files say, and no table has a number of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lab.results import RESULTS, ROOT
from benchmarks.pages import ELSEWHERE, FIGURE, MAKERS, PROGRAM, figures, main, pages, remade

BY_CODE = ROOT / "docs" / "keys.md"
"""This page is made of the code, as tests/unit/config/test_reference.py holds it."""
PAGES = {page.relative_to(ROOT).as_posix(): page for page in pages() if page != BY_CODE}
MADE = re.compile(r"<!-- made: (\w+) -->.*?<!-- end of \1 -->", re.S)
"""Parts of pages that are made of tables in the code, as tests compare them."""
TABLES = {
    ("README.md", "`context_parallel_algo`"): "the registry's words: test_readme.py compares them",
    ("README.md", "page"): "models' names",
    ("docs/choosing.md", "you have"): "cards and sizes that a reader has; recipes of these names",
    ("docs/hosts.md", "NVIDIA driver"): "versions, of install.py's table",
    ("docs/hosts.md", "compute capability"): "NVIDIA's names, and versions of flash-attn",
    ("docs/planning.md", "part"): "the formula of a step, and ZeRO's stages",
    ("docs/resume.md", "what you see"): "exit codes",
    ("docs/verify.md", "exit code"): "exit codes",
    ("uspft/model/README.md", "family (`model_type`)"): "Phi-3's own names of its lengths",
}
"""Tables that may have numbers, by page and first head, each with the reason."""
SENTENCES = {
    ("docs/data.md", "8 bytes a token"): "the type in which token ids are kept",
    ("docs/hosts.md", "within 20 s"): "how long the launcher waits for a silent host",
    ("docs/long-context.md", "within 2 %"): "the bound of tests/parity/test_memory.py",
    ("docs/outputs.md", "more than 15 s"): "when the screen says what it waits for",
    (
        "docs/planning.md",
        "over 1.10 ×",
    ): "which pairs count, by benchmarks/planning/judge.py",
    ("docs/planning.md", "within 12 %"): "what the planner calls a tie on shipped figures",
    ("docs/planning.md", "within 5 %"): "what the planner calls a tie on measured figures",
    ("docs/verify.md", "3 % too many"): "what `--inject scale` does",
}
"""What the program does by a number of its own, by page and words, each with the reason."""

CODE = re.compile(r"`([^`]*)`")
BARE = re.compile(r"[-+−]?\d[\d.,]*\s*(×|%|\w{1,3})?")
NUMBER = re.compile(r"(?<![\w.-])[-+−]?\d")
UNITS = r"×(?! ?\d| \w+ \d)|%|times\b|m?s\b|seconds\b|minutes\b|[KMGT]i?B\b|[KMGT]bit\b|bytes\b"
CLAIM = re.compile(rf"(?<![\w.-])\d[\d.,]*(?: (?:to|and|or) \d[\d.,]*)? ?(?:{UNITS})")


def words_of(text: str) -> str:
    """Return a text without its code, but for numbers set as code, and without links' places."""
    told = CODE.sub(lambda code: code[1] if BARE.fullmatch(code[1]) else "code", text)
    return re.sub(r"\]\([^)]*\)", "]", told)


def own_lines(text: str) -> Iterator[str]:
    """Yield the lines of a page that are neither made of a file nor shown as code."""
    inside = False
    for line in FIGURE.sub("", text).splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield line


def numbers_in_tables(text: str) -> dict[str, list[str]]:
    """Return the cells with a number of the tables that are made of no file, by first head."""
    found: dict[str, list[str]] = {}
    head = None
    for line in own_lines(text):
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]
        head = cells[0] if head is None else head
        told = [cell for cell in cells if NUMBER.search(words_of(cell))]
        if told:
            found.setdefault(head, []).extend(told)
    return found


def claims(text: str) -> list[str]:
    """Return what sentences say with a number and a unit, each with some words before it."""
    found = []
    for line in own_lines(text):
        if not line.startswith("|"):
            told = words_of(line)
            for claim in CLAIM.finditer(told):
                found.append(told[max(0, claim.start() - 24) : claim.end() + 12])
    return found


def test_every_figure_is_what_its_file_says() -> None:
    shown = [figure for page in PAGES.values() for figure in FIGURE.findall(page.read_text())]
    stale = [name for name, page in PAGES.items() if remade(page.read_text()) != page.read_text()]
    assert stale == [], "run `python -m benchmarks.pages`"
    missing = set(MAKERS) - {path.stem for path in RESULTS.glob("*.json")} - {PROGRAM, *ELSEWHERE}
    assert all("Not measured yet." in figures(file).values() for file in missing)
    assert {path.stem for path in RESULTS.glob("*.json")} <= set(MAKERS)
    assert {(file, name) for file in MAKERS for name in figures(file)} == {
        (file, name) for file, name, _ in shown
    }
    assert len(shown) >= 50
    for name, page in PAGES.items():
        text = page.read_text()
        marks = text.count("<!-- figures:"), text.count("<!-- end -->")
        assert marks == (len(FIGURE.findall(text)),) * 2, name


def test_a_figure_that_is_not_what_its_file_says_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = figures("step")["table"]
    text = f"a\n<!-- figures: step, table -->\n{kept}\n<!-- end -->\nb\n"
    assert remade(text) == text
    page = tmp_path / "page.md"
    page.write_text(re.sub(r"\d\.\d\d", "9.99", text, count=1))
    monkeypatch.setattr("benchmarks.pages.pages", lambda: [page])
    monkeypatch.setattr("benchmarks.pages.ROOT", tmp_path)
    assert main(["--check"]) == 1 and page.read_text() != text
    assert main([]) == 0 and page.read_text() == text
    assert capsys.readouterr().out.splitlines() == ["page.md: differs", "page.md: written"]
    with pytest.raises(KeyError, match="none"):
        remade(text.replace("table", "none"))


def test_no_table_has_a_number_of_its_own() -> None:
    found = {
        (name, head): cells
        for name, page in PAGES.items()
        for head, cells in numbers_in_tables(MADE.sub("", page.read_text())).items()
    }
    assert {place: cells for place, cells in found.items() if place not in TABLES} == {}
    assert set(TABLES) <= set(found), "exceptions that nothing needs"
    assert len(TABLES) <= 20 and all(TABLES.values())


def test_no_sentence_claims_a_number_of_its_own() -> None:
    said = [(name, claim) for name, page in PAGES.items() for claim in claims(page.read_text())]
    left = [
        (name, claim)
        for name, claim in said
        if not any(name == page and words in claim for page, words in SENTENCES)
    ]
    assert left == []
    for page, words in SENTENCES:
        assert words in PAGES[page].read_text(), (page, words)
    assert len(TABLES) + len(SENTENCES) <= 20


def test_an_invented_number_is_found() -> None:
    table = "| engine | s |\n| --- | ---: |\n| Llama-3.1-8B under ZeRO-3 | {} |\n"
    for cell in ("1.24", "`1.24`", "about 3 times", "-0.5 %", "**2**", "a [7](x.md)"):
        assert numbers_in_tables(table.format(cell)) == {"engine": [cell]}
    for cell in ("–", "`model_parallel: 4`", "Qwen2.5-7B", "[a](b2.md)"):
        assert numbers_in_tables(table.format(cell)) == {}
    made = f"<!-- figures: step, table -->\n{table.format('1.24')}<!-- end -->\n"
    assert numbers_in_tables(made) == {}
    assert numbers_in_tables(f"```\n{table.format('1.24')}```\n") == {}
    for claim in (
        "is 1.34 × as fast",
        "takes 1.1 to 1.3 times",
        "within 15 %",
        "in 3.5 s",
        "4 GiB",
    ):
        assert len(claims(f"It {claim}.")) == 1, claim
    assert claims("Ulysses 2 × ring 2, a mesh of 4 × 2, `a=3 %`, steps 3 to 5\n") == []
