"""Megatron's indexed data: documents as in the index, ends, sizes, and files that are damaged."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.data_cases import CHAT, TOKENIZER, block, faults_of, source, write_lines
from tests.support.megatron_index import CODES, written
from uspft.config.inputs import DataBlock
from uspft.data.corpus.corpus import Corpus, read_report
from uspft.data.corpus.prepare import first_look, prepare
from uspft.data.faults import BadRecord, DataError
from uspft.data.files.readers import objects
from uspft.data.files.sources import SourceFile, list_files, source_problems

DOCUMENTS = [[[5, 6, 7, 0]], [[8, 0]], [[9, 10], [11, 0]], [[12, 13, 14, 15, 0]]]
WHOLE = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 0], [12, 13, 14, 15, 0]]
SINGLE = [[[5, 6, 7, 0]], [[8, 0]], [[9, 10, 11, 0]], [[12, 13, 0]]]
SIZE = 64


def corpus(tmp_path: Path, data: Any, size: int = SIZE) -> Corpus:
    return Corpus.open(prepare(data, None, size, tmp_path / "cache"))


def of(index: Path) -> DataBlock:
    return DataBlock.model_validate({"train": str(index), "sequence_length": 8})


def tokens_of(found: Corpus) -> list[list[int]]:
    return [found.sample(i).ids.tolist() for i in range(len(found))]


@pytest.mark.parametrize("letter", ["B", "b", "h", "i", "q", "H"])
def test_documents_are_those_of_the_index(letter: str, tmp_path: Path) -> None:
    """Whatever the dtype, with sequences joined; all train but each document's first token."""
    index = written(tmp_path / "a.b_text_document", DOCUMENTS, letter)
    found = corpus(tmp_path, block(index))
    assert tokens_of(found) == WHOLE
    labels = [found.sample(i).labels.tolist() for i in range(len(found))]
    assert labels == [[-100, *ids[1:]] for ids in WHOLE]
    assert found.origin(2) == f"{index}:3"


def test_an_index_is_named_in_four_ways(tmp_path: Path) -> None:
    index = written(tmp_path / "some.text_document", DOCUMENTS)
    (tmp_path / "README.md").write_text("what it is")
    names = (index, index.with_suffix(".bin"), index.with_suffix(""), tmp_path, f"{tmp_path}/*")
    for name in names[:4]:
        assert not source_problems(block(source(name, format="megatron")))
    for name in names:
        files = [file for file in list_files(str(name), "auto") if file.kind == "megatron"]
        assert [(file.path, len(file.paths)) for file in files] == [(index, 2)]


def test_a_document_ends_behind_eod_too(tmp_path: Path) -> None:
    """What one sequence joins, as converters write it, is parted again where the recipe says."""
    index = written(tmp_path / "joined", [[[5, 6, 0, 7, 0]], [[8, 9]], [[0]]], "i")
    assert tokens_of(corpus(tmp_path, block(index))) == [[5, 6, 0, 7, 0], [8, 9], [0]]
    found = corpus(tmp_path, block(source(index, eod=0)))
    assert tokens_of(found) == [[5, 6, 0], [7, 0], [8, 9], [0]]
    assert found.origin(1) == f"{index}:1 (record 2)" and found.origin(2) == f"{index}:2"
    assert tokens_of(corpus(tmp_path, block(source(index, eod=6)))) == [
        [5, 6],
        [0, 7, 0],
        [8, 9],
        [0],
    ]


def test_sizes_and_weights_of_a_blend(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one", SINGLE), written(tmp_path / "two", DOCUMENTS, "q")
    data = block(
        source(one, format="megatron", weight=3.0, max_samples=2),
        source(two, format="megatron", weight=1.0, max_tokens=10),
    )
    found = corpus(tmp_path, data)
    assert tokens_of(found) == [*WHOLE[:2], *WHOLE[:3]]
    taken = [
        (span.first, span.stop, span.weight * tokens)
        for span, tokens in zip(found.sources, (6, 10), strict=True)
    ]
    assert [(first, stop) for first, stop, _ in taken] == [(0, 2), (2, 5)]
    assert taken[0][2] == pytest.approx(3 * taken[1][2])


def test_other_tokens_have_another_name(tmp_path: Path) -> None:
    """Both files and the ends count, so that a changed one is read again."""
    index = written(tmp_path / "a", SINGLE)
    names = {prepare(block(index), None, SIZE, tmp_path / "cache")}
    names.add(prepare(block(source(index, eod=8)), None, SIZE, tmp_path / "cache"))
    data = index.with_suffix(".bin")
    data.write_bytes(bytes([9]) + data.read_bytes()[1:])
    names.add(prepare(block(index), None, SIZE, tmp_path / "cache"))
    assert len(names) == 3


def told(tmp_path: Path, data: Any) -> str:
    (line,) = faults_of(tmp_path, data, None, SIZE)
    return line


def faults(index: Path) -> list[BadRecord]:
    file = SourceFile(index, str(index), "megatron")
    return [one for one in objects(file, list) if isinstance(one, BadRecord)]


def test_every_flipped_bit_of_an_index_is_told(tmp_path: Path) -> None:
    """Where each document is one sequence, no bit can be another without a line that names it."""
    index = written(tmp_path / "a", SINGLE[:2])
    content = index.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        index.write_bytes(flipped)
        found = faults(index)
        assert found and found[0].where.startswith(str(index)), bit
    index.write_bytes(content)
    assert not faults(index), "unharmed, it is read"


def test_cut_files_are_told(tmp_path: Path) -> None:
    index = written(tmp_path / "a", SINGLE)
    data = index.with_suffix(".bin")
    for file in (index, data):
        content = file.read_bytes()
        for length in range(len(content)):
            file.write_bytes(content[:length])
            assert faults(index)[0].where == str(index), (file.name, length)
        file.write_bytes(content + b"\0\0")
        assert faults(index)[0].where == str(index), file.name
        file.write_bytes(content)
    assert not faults(index)


def test_a_token_that_the_model_has_not_is_told(tmp_path: Path) -> None:
    index = written(tmp_path / "a", [[[5, 6]], [[7, SIZE]]])
    line = told(tmp_path, block(index))
    assert line.startswith(f"{index}:2: input_ids holds {SIZE}, the vocabulary is 0 … {SIZE - 1}")
    with pytest.raises(DataError, match="input_ids holds"):
        first_look(of(index), None, SIZE)
    data = block(index, on_bad_sample="skip")
    assert tokens_of(corpus(tmp_path, data)) == [[5, 6]]
    assert "7" not in read_report(prepare(data, None, SIZE, tmp_path / "cache"))["skipped"][0][:9]


@pytest.mark.parametrize(
    ("letter", "head", "more", "what"),
    [
        ("d", None, b"", "floating-point"),
        ("f", None, b"", "floating-point"),
        ("H", b"TNTIDX\0\0", b"", "--dataset-impl mmap"),
        ("H", b"IDX3-ubyte", b"", "no index of Megatron's"),
        ("H", b"MMIDIDX\0\0" + struct.pack("<Q", 2), b"", "version 2"),
        ("H", None, bytes(4), "multimodal"),
    ],
)
def test_other_indices_are_refused_by_name(
    letter: str, head: bytes | None, more: bytes, what: str, tmp_path: Path
) -> None:
    index = written(tmp_path / "a", SINGLE, letter)
    content = index.read_bytes() + more
    index.write_bytes((head or b"") + content[len(head or b"") :])
    assert what in told(tmp_path, block(index))
    assert len(CODES) == 8


def test_an_empty_document_is_told(tmp_path: Path) -> None:
    index = written(tmp_path / "a", [[[5, 6]], [], [[7]]])
    assert told(tmp_path, block(index)).startswith(f"{index}:2: a document without tokens")


def test_what_listings_show_is_told_before(tmp_path: Path) -> None:
    index, lines = written(tmp_path / "a", SINGLE), write_lines(tmp_path / "b.jsonl", [CHAT])
    alone = tmp_path / "alone.idx"
    alone.write_bytes(index.read_bytes())
    cases = [
        (source(lines, format="megatron"), "is no index of Megatron's", "name the .idx"),
        (source(index, format="text"), "is an index of token ids, not text", "leave the format"),
        (source(alone), "has no alone.bin next to it", "put it there"),
        (source(lines, eod=0), "ends documents of Megatron's index", "leave it out"),
        (source(index, fields={"text": "body"}), "and no fields", "leave it out"),
        (source("org/name", format="megatron"), "is no index of Megatron's", "name the .idx"),
    ]
    problems = source_problems(block(*(case for case, _, _ in cases)))
    assert len(problems) == len(cases)
    for (_, what, remedy), (_, wanted, way) in zip(problems, cases, strict=True):
        assert wanted in what and way in remedy


def test_an_index_stands_beside_other_data(tmp_path: Path) -> None:
    """An index needs no tokenizer, and stands beside data that does."""
    index = written(tmp_path / "a", SINGLE)
    data = block(index, write_lines(tmp_path / "b.jsonl", [CHAT]))
    found = Corpus.open(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))
    assert tokens_of(found)[:2] == WHOLE[:2] and len(found) == 5
    look = first_look(of(index), None, SIZE)
    assert look.shapes == [f"{index}: Megatron's index"] and look.lengths == [4, 2, 4, 3]
    assert np.array_equal(found.lengths[:4], look.lengths)
