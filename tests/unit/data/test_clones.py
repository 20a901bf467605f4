"""A folder that is a clone of a hub data set: its card is no data, its splits are told apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.data_cases import TOKENIZER, block, source, write_lines
from uspft.config.recipe import DataBlock
from uspft.data import Corpus, first_look, prepare, read_report, source_problems
from uspft.data.clones import two_splits
from uspft.data.sources import left_out, list_files

TEXT = {"text": "a"}


def names(folder: Path, declared: str = "auto") -> list[str]:
    files = list_files(str(folder), declared)
    return [file.path.relative_to(folder).as_posix() for file in files]


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(folder / name, [TEXT])


def test_what_describes_a_data_set_is_not_read(tmp_path: Path) -> None:
    described = ("LICENSE", "README.md", "README_zh.md", "dataset_infos.json", "data/readme.txt")
    read = ("data/a.jsonl", "data/readme-a.jsonl", "data/readmes.txt", "notes.txt")
    write(tmp_path, *described, *read)
    assert names(tmp_path) == list(read) == names(tmp_path, "text")
    told = f"{tmp_path}: not read, as what describes it: LICENSE, README.md, README_zh.md, …"
    data = block(tmp_path)
    assert left_out(data) == [told]
    recipe = DataBlock(train=str(tmp_path), sequence_length=64)
    assert told in first_look(recipe, str(TOKENIZER), 8192).shapes
    folder = prepare(data, str(TOKENIZER), 8192, tmp_path / "data/.cache")
    assert told in read_report(folder)["shapes"] and len(Corpus.open(folder)) == 4
    assert not left_out(block(tmp_path / "data/a.jsonl", source("org/name")))


def test_beside_texts_they_are_texts(tmp_path: Path) -> None:
    write(tmp_path, "README.md", "a/LICENSE", "a/x.txt", "b/README.md", "b/c/x.jsonl", "c.py")
    assert names(tmp_path / "a") == ["LICENSE", "x.txt"] and not left_out(block(tmp_path / "a"))
    assert names(tmp_path) == ["a/LICENSE", "a/x.txt", "b/c/x.jsonl", "c.py"]


def test_two_splits_in_one_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "README.md", "data/train-00000.jsonl", "data/test.jsonl")
    ((key, what, remedy),) = source_problems(block(tmp_path))
    assert key == "data.train.path" and what.startswith(f"{tmp_path} holds data/train-00000.jsonl")
    assert "and data/test.jsonl, which are two splits by their names" in what
    assert remedy == "name the files that are meant, by their paths or by globs"
    both = block(tmp_path / "data/train-00000.jsonl", tmp_path / "data/test.jsonl")
    assert not source_problems(both) and not source_problems(block(tmp_path / "**/*.jsonl"))
    assert not source_problems(block(tmp_path / "data" / "train*"))


@pytest.mark.parametrize(
    ("names", "both"),
    [
        (["train/0.parquet", "validation/0.parquet"], (0, 1)),
        (["en/dev_1.csv", "en/Training1.csv"], (1, 0)),
        (["train.jsonl", "training2.jsonl"], None),
        (["latest.jsonl", "train.jsonl", "device.jsonl"], None),
        (["test.jsonl", "valid.jsonl"], None),
        (["tests/train.jsonl", "test/train.jsonl"], None),
    ],
)
def test_which_names_are_splits(names: list[str], both: tuple[int, int] | None) -> None:
    assert two_splits(names) == (both and (names[both[0]], names[both[1]]))


def test_files_that_are_alike_are_told_once(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", *(f"{number:02}.png" for number in range(60)), "x.xlsx")
    for number in range(25):
        os.mkfifo(tmp_path / f"{number:02}.fifo")
    fifos, pictures, sheet = source_problems(block(tmp_path))
    shown = ", ".join(f"{tmp_path}/{number:02}.png" for number in range(3))
    told = f"{tmp_path}/00.png is a .png file, which is not read (60 such: {shown}, …)"
    assert pictures[1] == told and pictures[2].endswith(
        "or leave it out: name a glob of what is meant"
    )
    assert "00.fifo is a FIFO, a socket or a device, and no file (25 such: " in fifos[1]
    assert sheet[1] == f"{tmp_path}/x.xlsx is a .xlsx file, which is not read"
    ((_, _, alone),) = source_problems(block(tmp_path / "x.xlsx"))
    assert "leave it out" not in alone
    # Of a glob that finds nothing else, the FIFO is what is told.
    ((_, what, _),) = source_problems(block(tmp_path / "*3.fifo"))
    assert "03.fifo is a FIFO" in what and "matches no file" not in what
