"""Which files a recipe names, found by listings alone, and data sets of the hub."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_cases import (
    CHAT,
    ROOT,
    SAMPLES,
    TOKENIZER,
    block,
    faults_of,
    source,
    write_lines,
)
from uspft.config.inputs import DataBlock
from uspft.data.corpus.corpus import Corpus, read_report
from uspft.data.corpus.prepare import first_look, prepare
from uspft.data.files.sources import (
    STDLIB,
    describing_files,
    is_hub_id,
    list_files,
    not_checked,
    source_problems,
    two_splits,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a/z.txt", "a/y.jsonl", "c.json", ".hidden", "a/.git/x", "c.JSONL"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "m.pyc").write_text("x")
    return tmp_path


def names(path: object, root: Path, declared: str = "auto") -> list[str]:
    return [f.path.relative_to(root).as_posix() for f in list_files(str(path), declared)]


def test_a_folder_is_all_files_below_it_sorted(folder: Path) -> None:
    assert names(folder, folder) == ["a/y.jsonl", "a/z.txt", "b.jsonl", "c.JSONL", "c.json"]


def test_globs_and_files(folder: Path) -> None:
    assert names(folder / "*.json*", folder) == ["b.jsonl", "c.json"]
    assert names(folder / "**" / "*.jsonl", folder) == ["a/y.jsonl", "b.jsonl"]
    assert names(folder / "c.json", folder) == ["c.json"]
    assert names(folder / "*.csv", folder) == []


def test_what_a_file_is_by_its_ending(folder: Path) -> None:
    for name in ("d.csv", "e.tsv.gz", "f.PARQUET", "g.arrow", "h.md.zst", "i.jsonl.zst"):
        (folder / name).write_text("x")
    kinds = {f.path.name: f.kind for f in list_files(str(folder), "auto")}
    table = {"d.csv": "csv", "e.tsv.gz": "tsv", "f.PARQUET": "parquet", "g.arrow": "arrow"}
    lines = dict.fromkeys(("b.jsonl", "c.json", "c.JSONL", "i.jsonl.zst", "y.jsonl"), "json")
    assert kinds == {**table, **lines, "z.txt": "text", "h.md.zst": "text"}
    # Who names a format of records says that other files are JSON Lines.
    assert {f.kind for f in list_files(str(folder), "messages")} == {"json", *table.values()}
    assert [f.packed for f in list_files(str(folder / "*.zst"), "auto")] == [".zst", ".zst"]


def test_the_standard_library() -> None:
    files = list_files(STDLIB, "auto")
    shown = [f.shown.removeprefix(f"{STDLIB}/") for f in files]
    assert len(files) > 400 and shown == sorted(shown)
    assert {"argparse.py", "json/decoder.py"} <= set(shown)
    parts = {part for name in shown for part in name.split("/")[:-1]}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert files[0].path.is_relative_to(sysconfig.get_path("stdlib"))


@pytest.mark.parametrize(
    ("path", "is_hub"),
    [
        ("org/name", True),
        ("org/name-v1.5", True),
        ("data/x.jsonl", False),
        ("nowhere/x.jsonl", False),
        ("nowhere/corpus.txt", False),
        ("./name", False),
        ("a/b/c", False),
        ("name", False),
        ("org/*", False),
    ],
)
def test_what_reads_as_a_hub_id(path: str, is_hub: bool) -> None:
    assert is_hub_id(path) == is_hub


def test_a_path_is_no_hub_id_where_its_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert not is_hub_id("data/samples") and not is_hub_id("data/sampels")


def test_problems_name_key_what_and_remedy(folder: Path) -> None:
    (folder / "weights.bin").write_text("x")
    (folder / "empty").mkdir()
    (folder / "train.mindrecord").write_text("x")
    cases = [
        (source(folder / "nope.jsonl"), "does not exist", "a file, a folder, a glob or a hub id"),
        (source("https://a.org/b.jsonl"), "is an address", "load it to a file"),
        (source(folder / "*.csv"), "matches no file", "pattern"),
        (source(folder / "empty"), "holds no file", "name a folder"),
        (source(folder / "train.mindrecord"), ".mindrecord file", "JSON Lines"),
        (source("python:site"), "unknown source", STDLIB),
        (source(STDLIB, format="messages"), "is text, not messages", "leave the format out"),
        (source(folder / "b.jsonl", format="chat"), "unknown format 'chat'", "messages"),
        (source(folder / "b.jsonl", split="test"), "means nothing for files", "leave it out"),
    ]
    os.mkfifo(folder / "a" / "pipe")
    (folder / "b.gz").write_text("x")
    (folder / "c.parquet.gz").write_text("x")
    cases += [
        (source(folder / "a" / "pipe"), "is a FIFO, a socket or a device", "to a file"),
        (source(folder / "a"), "pipe is a FIFO", "read more than once"),
        (source(folder / "b.gz"), "does not say what is compressed in it", "call it .jsonl.gz"),
        (source(folder / "c.parquet.gz"), "is compressed as a whole", "decompress it"),
    ]
    problems = source_problems(block(*(case for case, _, _ in cases)))
    assert len(problems) == len(cases)
    for i, (key, what, remedy) in enumerate(problems):
        assert key.startswith(f"data.train[{i}]") and cases[i][1] in what and cases[i][2] in remedy
    # All of a folder's faults at once; the key of a lone source has no index.
    (key, what, _), *more = source_problems(block(folder))
    assert key == "data.train.path" and len(more) == 4
    assert names(folder / "a", folder) == ["a/y.jsonl", "a/z.txt"]
    assert source_problems(block(SAMPLES, eval=(source("nope.txt"),)))[0][0] == "data.eval.path"


def test_good_sources_have_no_problem(folder: Path) -> None:
    data = block(SAMPLES, STDLIB, folder / "b.jsonl", source("org/name", split="test"))
    assert source_problems(data) == []
    assert not_checked(data) == ["data.train[3]: hub data set org/name (needs the network)"]


def test_the_recipes_own_block(tmp_path: Path) -> None:
    train = [str(SAMPLES), {"path": STDLIB, "format": "text", "weight": 2}]
    data = DataBlock(train=train, sequence_length="128k")
    assert source_problems(data) == [] == not_checked(data)
    wrong = DataBlock(train="nope.jsonl", eval="org/name", sequence_length="128k")
    assert [key for key, _, _ in source_problems(wrong)] == ["data.train.path"]
    assert not_checked(wrong) == ["data.eval: hub data set org/name (needs the network)"]


def test_hub_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    asked: list[Any] = []
    records = [{"id": i, **CHAT} for i in range(3)]

    def load(*where: Any, split: str) -> datasets.Dataset:
        asked.append((*where, split))
        if where[0] == "no/network":
            raise ConnectionError("cannot reach the hub\nat all")
        return datasets.Dataset.from_list(records)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    folders = [
        prepare(block(source("org/name", name="en", split=s)), str(TOKENIZER), 8192, tmp_path / "c")
        for s in (None, "test", "test")
    ]
    assert asked == [("org/name", "en", "train"), *[("org/name", "en", "test")] * 2]
    assert folders[1] == folders[2] != folders[0]
    corpus = Corpus.open(folders[1])
    assert len(corpus) == 3 and corpus.origin(2) == "org/name/test:3"
    records[1] = {"id": 1, "messages": [*CHAT["messages"], *CHAT["messages"]]}
    again = prepare(block(source("org/name", name="en")), str(TOKENIZER), 8192, tmp_path / "c")
    assert again != folders[0]
    (line,) = faults_of(tmp_path, block(source("org/name", format="text")))
    told = "org/name/train: no shape of text has the fields id, messages; name them in data.fields"
    assert line.startswith(told)
    (line,) = faults_of(tmp_path, block("no/network"))
    told = "hub data set no/network (train): cannot reach the hub at all; "
    assert line.startswith(f"data.train: {told}")


TEXT = {"text": "a"}


def listed(folder: Path, declared: str = "auto") -> list[str]:
    files = list_files(str(folder), declared)
    return [file.path.relative_to(folder).as_posix() for file in files]


def write(folder: Path, *listed: str) -> None:
    for name in listed:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_lines(folder / name, [TEXT])


def test_what_describes_a_data_set_is_not_read(tmp_path: Path) -> None:
    described = ("LICENSE", "README.md", "README_zh.md", "dataset_infos.json", "data/readme.txt")
    read = ("data/a.jsonl", "data/readme-a.jsonl", "data/readmes.txt", "notes.txt")
    write(tmp_path, *described, *read)
    assert listed(tmp_path) == list(read) == listed(tmp_path, "text")
    told = f"{tmp_path}: not read, as what describes it: LICENSE, README.md, README_zh.md, …"
    data = block(tmp_path)
    assert describing_files(data) == [told]
    recipe = DataBlock(train=str(tmp_path), sequence_length=64)
    assert told in first_look(recipe, str(TOKENIZER), 8192).shapes
    folder = prepare(data, str(TOKENIZER), 8192, tmp_path / "data/.cache")
    assert told in read_report(folder)["shapes"] and len(Corpus.open(folder)) == 4
    assert not describing_files(block(tmp_path / "data/a.jsonl", source("org/name")))


def test_beside_texts_they_are_texts(tmp_path: Path) -> None:
    write(tmp_path, "README.md", "a/LICENSE", "a/x.txt", "b/README.md", "b/c/x.jsonl", "c.py")
    assert listed(tmp_path / "a") == ["LICENSE", "x.txt"] and not describing_files(
        block(tmp_path / "a")
    )
    assert listed(tmp_path) == ["a/LICENSE", "a/x.txt", "b/c/x.jsonl", "c.py"]


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
    ("listed", "both"),
    [
        (["train/0.parquet", "validation/0.parquet"], (0, 1)),
        (["en/dev_1.csv", "en/Training1.csv"], (1, 0)),
        (["train.jsonl", "training2.jsonl"], None),
        (["latest.jsonl", "train.jsonl", "device.jsonl"], None),
        (["test.jsonl", "valid.jsonl"], None),
        (["tests/train.jsonl", "test/train.jsonl"], None),
    ],
)
def test_which_names_are_splits(listed: list[str], both: tuple[int, int] | None) -> None:
    assert two_splits(listed) == (both and (listed[both[0]], listed[both[1]]))


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
