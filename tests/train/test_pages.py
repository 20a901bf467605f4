"""What the first pages tell a user to type is typed here, on the files that they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT

PAGES = ("first-run", "choosing", "data", "resume", "serving")
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)
NOT_RUN = re.compile(r"  +# (needs a GPU|of llama\.cpp)$")
ELSEWHERE = {"./launch.sh recipes/quickstart.yaml": "tests/train/test_quickstart.py"}
SHOWN = {
    "chats.jsonl": "data: chats.jsonl: chat: messages",
    "share.jsonl": "data: share.jsonl: ShareGPT: conversations with from/value",
    "alpaca.jsonl": "data: alpaca.jsonl: Alpaca",
    "pairs.jsonl": "data: pairs.jsonl: prompt and completion",
    "texts.jsonl": "data: texts.jsonl: text",
    "ids.jsonl": "data: ids.jsonl: tokenized",
    "marked.jsonl": "data: marked.jsonl: not used: score",
    "forum.jsonl": "data: forum.jsonl: chat: thread",
}
"""What `check` says of each file that a page shows."""


class Page(NamedTuple):
    """The files that a page shows, and the commands that it says to type."""

    files: dict[str, str]
    commands: list[str]


def page(name: str) -> Page:
    found = Page({}, [])
    for kind, file, body in BLOCK.findall((ROOT / f"docs/{name}.md").read_text()):
        assert (kind, bool(file)) in (("json", True), ("sh", False)), (kind, file)
        if file:
            found.files[file] = body
        else:
            found.commands.extend(body.replace("\\\n", " ").splitlines())
    return found


def test_every_file_has_three_lines_and_every_command_is_told_apart() -> None:
    pages = {name: page(name) for name in PAGES}
    assert all(len(body.splitlines()) == 3 for one in pages.values() for body in one.files.values())
    assert pages["data"].files.keys() == SHOWN.keys()
    counts = {name: len(one.commands) for name, one in pages.items()}
    assert counts == {"first-run": 3, "choosing": 5, "data": 13, "resume": 2, "serving": 4}
    skipped = [line for one in pages.values() for line in one.commands if NOT_RUN.search(line)]
    assert [line.split()[0] for line in skipped] == ["vllm", "vllm", "python"]
    for command, where in ELSEWHERE.items():
        assert command.partition(" ")[2] in (ROOT / where).read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what lies in that of the project, where all pages are read in their order."""
    folder = tmp_path_factory.mktemp("pages") / "here"
    folder.mkdir()
    for name in ("recipes", "configs", "data", "launch.sh"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("names", [*((name,) for name in PAGES[:3]), PAGES[3:]], ids="-".join)
def test_what_a_page_says_to_type_works(place: Path, names: tuple[str, ...]) -> None:
    """The page on serving takes what the one on resuming has trained."""
    (place / "my.yaml").unlink(missing_ok=True)  # a page begins with a recipe of its own
    for name in names:
        types_page(place, name)
    if "serving" in names:
        assert (place / "outputs/served/config.json").exists()


def types_page(place: Path, name: str) -> None:
    files, commands = page(name)
    for file, body in files.items():
        (place / file).write_text(body)
    for line in commands:
        if NOT_RUN.search(line) or line in ELSEWHERE:
            continue
        program, *words = shlex.split(line, comments=True)
        assert program == "./launch.sh", line
        offline = {"CUDA_VISIBLE_DEVICES": ""}
        command = Forked(words, place.parent, place=place, **offline)
        said, err = command.communicate(timeout=HANG_SECONDS)
        assert (command.wait(0), err) == (0, ""), (line, said)
        if words[0] == "check":
            assert "no problem found" in said
        if shown := [text for file, text in SHOWN.items() if f"data.train={file}" in words]:
            assert words[0] != "check" or shown[0] in said, (line, said)
        if words[-1] == "training.steps=4":
            assert "going on from " in said and "learning rate: " in said, said
