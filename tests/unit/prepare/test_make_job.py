"""Data made ready before ranks start: tokens in whose places a multimodal model has no text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.data_cases import block, write_lines
from tests.support.shapes import QWEN3, shape
from uspft.data.corpus.corpus import Corpus
from uspft.data.corpus.prepare import prepare
from uspft.data.faults import DataError
from uspft.prepare import make_job as made_ready
from uspft.prepare.make_job import require_text

WHOLE = {"model_type": "qwen3_vl", "text_config": {**QWEN3, "model_type": "qwen3_vl_text"}}
WHOLE |= {"vision_config": {}, "image_token_id": 7, "video_token_id": 9}


def test_a_token_that_stands_for_an_image_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever pieces that are looked at end; of a language model alone it is a token as others."""
    samples = [[1, 2, 3], [4, 7, 7, 7], [5], [6, 8], [1, 9], [2, 2]]
    path = write_lines(tmp_path / "a.jsonl", ({"input_ids": ids} for ids in samples))
    folder = prepare(block(path, format="tokenized"), None, 151936, tmp_path / "cache")
    whole, alone = shape(tmp_path, WHOLE), shape(tmp_path, QWEN3)
    assert whole.media and not alone.media
    require_text(Corpus.open(folder), alone)
    for piece in (1, 4, 1 << 24):
        monkeypatch.setattr(made_ready, "PIECE", piece)
        with pytest.raises(DataError) as raised:
            require_text(Corpus.open(folder), whole)
        found = raised.value.lines
        assert [re.search(r"a\.jsonl:(\d+): (.*?),", one).groups() for one in found] == [  # type: ignore[union-attr]
            ("2", "holds the token 7"),
            ("5", "holds the token 9"),
        ]
        assert "image_token_id of qwen3_vl, and text alone is trained: leave" in found[0]
