"""docs/coming-from-TOOL.md say of each key what the converter does with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from uspft.config.other_tools import TOOLS, table_of
from uspft.config.reference import put
from uspft.convert import reference


def test_the_pages_are_what_the_tables_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert reference.main(["--check"]) == 0
    converts = [name for name, tool in TOOLS.items() if tool.converts]
    assert set(converts) <= set(reference.parts())
    for file in {file for file, _ in reference.parts().values()}:
        shutil.copy(file, tmp_path)
    for name in converts:
        page = reference.page_of(name).read_text()
        for path in table_of(name).own:
            assert table_of(name).rows[path].say.replace("|", "∣") in page, path
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    assert reference.main(["--check"]) == 0
    copy = reference.page_of("mindspore")
    copy.write_text(copy.read_text().replace("`seed`", "`sead`"))
    assert reference.main(["--check"]) == 1
    assert "run this without --check" in capsys.readouterr().err


def test_a_table_is_put_between_its_marks_alone() -> None:
    text = "a\n<!-- made: keys -->\nold\n<!-- end of keys -->\n## Data\n<!-- made: data -->\nx\n"
    text += "<!-- end of data -->\n"
    new = put(text, "keys", "new\n")
    assert new == text.replace("old", "new")
    assert put(new, "data", "y\n") == new.replace("x\n", "y\n")
    with pytest.raises(ValueError, match="made: none"):
        put(text, "none", "new\n")
