"""README is two pages whose tree, links and table of algorithms are so; the rest is in docs/."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.algorithms import ALGORITHMS, named
from uspft.__main__ import main
from uspft.config.algorithms import CONTEXT, TENSOR, WHOLE, Splits
from uspft.planner.ways import MAX_LAYOUTS
from uspft.segments import Segments
from uspft.sequence import Heads

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
DOCS = sorted(path.name for path in (ROOT / "docs").glob("*.md"))


class Line(NamedTuple):
    """A line of the table, without the algorithm's name."""

    split: str
    legal: str
    megatron: str


def table() -> dict[str, Line]:
    pattern = r"^\| (?:`(\w+)`|– \(`context_parallel: 1`\)) \| (.*) \| (.*) \| (\S+) \|$"
    rows = re.findall(pattern, README, re.M)
    return {name or "whole": Line(*rest) for name, *rest in rows if name != "auto"}


def test_the_table_is_the_registry() -> None:
    rows = {WHOLE.name: WHOLE, **CONTEXT}
    assert table() == {name: Line(row.what, row.legal, row.megatron) for name, row in rows.items()}
    assert len(rows) == 6


def test_the_table_of_tensor_algorithms_is_the_registry() -> None:
    rows = [
        f"| `tensor_parallel_algo: {row.name}`, beside any | {row.what} | {row.legal} "
        f"| {row.megatron} |"
        for row in TENSOR.values()
    ]
    assert rows and all(f"\n{row}\n" in README for row in rows)
    assert README.count("| `tensor_parallel_algo: ") == len(rows)


def test_what_auto_and_verify_may_take_is_what_pages_say() -> None:
    (likely,) = (r.name for r in CONTEXT.values() if r.automatic and r.splits is Splits.BOTH)
    assert "| `auto` | as the first of these in `plan`'s order" in README
    assert (
        f"Where the model is not known it is `{likely}`."
        in (ROOT / "docs/algorithms.md").read_text()
    )
    assert f"(at most {MAX_LAYOUTS}; `--all` for all)" in README
    assert f"[at most {MAX_LAYOUTS} of them]" in (ROOT / "docs/verify.md").read_text()


# What of a shown line is this machine's.
HERE = (r"hardware: .*", r"(?<=; )[\d.]+ \w+ free")


def masked(text: str) -> list[str]:
    for pattern in HERE:
        text = re.sub(pattern, "…", text)
    return text.splitlines()


def test_what_readme_shows_of_check_is_what_check_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```\n(\$ \./launch\.sh check .*?)```", README, re.S)
    shown = re.findall(r"^\$ \./launch\.sh (.*)\n((?:[^$\n].*\n)+)", block, re.M)
    assert len(shown) == 2
    for words, lines in shown:
        main(words.split())
        done = capsys.readouterr()
        assert masked(done.out + done.err) == masked(lines)
    assert masked("disk: writes 1 MiB; 2 GiB free in x") == ["disk: writes 1 MiB; … in x"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_split_shows_in_what_is_sent(name: str) -> None:
    degrees = {"ulysses_cp": (4, 1), "ring_cp": (1, 4), "allgather_cp": (1, 4), "whole": (1, 1)}
    algorithm = named(name, *degrees.get(name, (2, 2)))
    cost = algorithm.cost(Segments.single(64), Heads(8, 4, 16), 2)
    split = table()[name].split
    assert split.startswith("heads") == (cost.all_to_all.bytes > 0)
    assert ("tokens" in split) == (cost.ring.bytes + cost.gather.bytes > 0)
    assert ("keys and values travel" in split) == (name in ("ring_cp", "planned_cp"))
    assert split.startswith("nothing") == (name == "whole")


# What each phrase of the column means, for a row at Ulysses × ring degrees.
LEGAL: dict[str, Callable[[int, int, int], bool]] = {
    "`context_parallel` divides the row": lambda row, u, r: row % (u * r) == 0,
    "2 · `context_parallel` divides the row": lambda row, u, r: row % (2 * u * r) == 0,
    "`context_parallel` divides the row, twice where tokens are split": lambda row, u, r: (
        row % (u * r * (2 if r > 1 else 1)) == 0
    ),
    "always": lambda row, u, r: True,
}
SAME = {"as `ring_cp`": "ring_cp", "as `hybrid_cp`": "hybrid_cp"}
DEGREES = {
    "whole": [(1, 1)],
    "ulysses_cp": [(2, 1), (3, 1), (5, 1), (8, 1)],
    "ring_cp": [(1, 2), (1, 3), (1, 4)],
    "allgather_cp": [(1, 2), (1, 3), (1, 4)],
    "hybrid_cp": [(2, 2), (3, 2), (2, 3), (4, 4), (16, 1)],
    "planned_cp": [(2, 2), (3, 2), (2, 3), (4, 4), (16, 1)],
}
ROWS = (48, 64, 72, 96, 240)
HEADS = (Heads(8, 2, 16), Heads(8, 8, 16), Heads(6, 3, 16), Heads(16, 4, 16))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_is_legal_where_the_table_says(name: str) -> None:
    lines = table()
    phrase = lines[name].legal
    allowed = LEGAL[lines[SAME[phrase]].legal if phrase in SAME else phrase]
    seen = set()
    for row, heads, (ulysses, ring) in product(ROWS, HEADS, DEGREES[name]):
        legal = not named(name, ulysses, ring).problems(row, heads)
        assert legal == allowed(row, ulysses, ring), (row, heads, ulysses, ring)
        seen.add(legal)
    assert seen == ({True} if name == "whole" else {True, False}), "both must have come up"


def tree() -> set[str]:
    """The files and folders of the commented tree, those of uspft/ with their folder."""
    block = README.partition("## The code")[2].split("```")[1]
    found = set()
    for line in block.strip("\n").splitlines():
        above = "uspft/" if line.startswith(" ") else ""
        found |= {f"{above}{name}" for name in re.findall(r"[\w.]+", line[:24])}
    return found


def holds_python(folder: Path) -> bool:
    return folder.is_dir() and any(folder.rglob("*.py"))


def test_the_tree_names_every_room() -> None:
    named = tree()
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    rooms = {f"uspft/{path.name}" for path in (ROOT / "uspft").iterdir() if holds_python(path)}
    assert rooms - named == set() and len(rooms) >= 17
    files = {"launch.sh", "install.py", "uspft/assemble.py", "uspft/comm.py"}
    assert files | {"uspft", "recipes", "configs", "data", "tests", "benchmarks"} | rooms == named


def dangling(page: Path, text: str) -> list[str]:
    """Links of a page to files that are not there, or to headings that a page has not."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        if "://" in link:
            continue
        if not target.exists():
            found.append(link)
        elif heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            if heading not in {
                re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings
            }:
                found.append(link)
    return found


def missing(text: str) -> list[str]:
    """Files of the project that a page names and that are not there."""
    named = re.findall(r"`(?:\.\./)*([\w/]+\.(?:py|sh))(?:::?\w+)?`", text)
    here = ["/" + path.relative_to(ROOT).as_posix() for path in SOURCES]
    return [
        name
        for name in named
        if name not in OTHERS_FILES and not any(path.endswith(f"/{name}") for path in here)
    ]


FOLDERS = ("benchmarks", "data", "tests", "uspft")
PAGES = ["README.md", "benchmarks/README.md", "benchmarks/results/README.md"]
PAGES += ["data/README.md", "tests/gpu/README.md", "uspft/model/README.md"]
PAGES += [f"docs/{name}" for name in DOCS]
SOURCES = [*ROOT.glob("*.*"), *chain(*((ROOT / f).rglob("*.*") for f in FOLDERS))]
OTHERS_FILES = {"preprocess_data.py"}
"""Files of other projects that pages name."""


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    assert dangling(ROOT / name, text) == [] and missing(text) == []


def test_a_dangling_link_is_seen() -> None:
    text = "[a](docs/none.md) [b](docs/hosts.md#none) [c](docs/hosts.md#devices) [d](README.md)"
    assert dangling(ROOT / "README.md", text) == ["docs/none.md", "docs/hosts.md#none"]
    text = "`model/none.py` `model/causal.py` `launch.sh` `../launch.sh` `none.sh`"
    assert missing(text) == ["model/none.py", "none.sh"]


def test_readme_is_two_pages_and_leads_to_every_other() -> None:
    assert len(README.splitlines()) <= 95 and len(README.split()) <= 1200
    assert [name for name in DOCS if f"(docs/{name})" not in README] == []
    assert len(DOCS) >= 7
