"""docs/coming-from-TOOL.md say of each key what the converter does with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from uspft.config.others import TOOLS, table_of
from uspft.convert import reference


def test_the_pages_are_what_the_tables_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert reference.main(["--check"]) == 0
    converts = [name for name, tool in TOOLS.items() if tool.converts]
    assert set(converts) <= set(reference.parts())
    for name in converts:
        page = reference.page_of(name).read_text()
        (tmp_path / reference.page_of(name).name).write_text(page)
        for path in table_of(name).own:
            assert table_of(name).rows[path].say.replace("|", "∣") in page, path
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    assert reference.main(["--check"]) == 0
    copy = reference.page_of("mindspore")
    copy.write_text(copy.read_text().replace("`seed`", "`sead`"))
    assert reference.main(["--check"]) == 1
    assert "run this without --check" in capsys.readouterr().err
