"""Faults that differ in words of their own are one line, and those with other remedies are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.data_cases import write_lines
from uspft.config.inputs import DataBlock
from uspft.data.corpus.prepare import first_look
from uspft.data.faults import DataError


def test_records_of_no_shape_are_one_line_whatever_their_fields(tmp_path: Path) -> None:
    records = [{f"a{chr(97 + n)}": 1, "y": 2} for n in range(20)]
    turns = [{"messages": [{word: "a"}]} for word in ("mood", "tone")]
    path = write_lines(tmp_path / "a.jsonl", [*records, {"body": "a"}, *turns])
    with pytest.raises(DataError) as caught:
        first_look(DataBlock(train=[str(path)], sequence_length=64), None, None)
    fields, body, turn = caught.value.lines
    assert fields.startswith(f"{path}:1: no shape has the fields aa, y (20 such: lines 1, 2, 3, …)")
    assert body.startswith(f"{path}:21: no shape has the fields body; if they mean text")
    assert "messages[0] has no role, but mood (2 such: lines 22, 23)" in turn
