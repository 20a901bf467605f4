"""docs/coming-from-mindspore.md says of each key what the converter does with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from uspft.convert import mindspore_table, reference


def test_the_page_is_what_the_table_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert reference.main(["--check"]) == 0
    text = reference.PAGE.read_text()
    for row in mindspore_table().rows.values():
        assert row.say.replace("|", "∣") in text, row.key
    copy = tmp_path / "page.md"
    copy.write_text(text.replace("`seed`", "`sead`"))
    monkeypatch.setattr(reference, "PAGE", copy)
    assert reference.main(["--check"]) == 1
    assert "run this without --check" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert copy.read_text() == text
