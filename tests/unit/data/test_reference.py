"""docs/coming-from.md says of each known field what the code does with it."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from uspft.config.inputs import FIELDS_LEFT_ALONE, RECORD_FIELDS
from uspft.config.reference import put
from uspft.data import reference
from uspft.data.records.known_fields import (
    FIELDS,
    FORMATS,
    NAMES,
    REFUSED,
    REFUSED_KEYS,
    SHAPES,
    TURN_KEYS,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_page_is_what_the_code_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["reference", "--check"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("uspft.data.reference", run_name="__main__")
    assert capsys.readouterr() == ("", "")
    assert "`.venv/bin/python -m uspft.data.reference`" in reference.PAGE.read_text()


def test_a_changed_table_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = tmp_path / "coming-from.md"
    copy.write_text(reference.PAGE.read_text())
    monkeypatch.setattr(reference, "PAGE", copy)
    assert reference.main(["--check"]) == 0
    changed = (replace(FIELDS[0], becomes="something else"), *FIELDS[1:])
    monkeypatch.setattr(reference, "FIELDS", changed)
    assert reference.main(["--check"]) == 1 and str(copy) in capsys.readouterr().err
    assert reference.main([]) == 0 and "something else" in copy.read_text()
    with pytest.raises(ValueError, match="has no lines <!-- made: data -->"):
        put("# A page\n", "data", reference.table())


def test_every_name_has_its_place_in_the_table() -> None:
    table = reference.table()
    every = [*FIELDS, *REFUSED, *TURN_KEYS, *REFUSED_KEYS]
    assert all(f"`{name}`" in table for one in every for name in (one.name, *one.also))
    assert len(every) >= 38
    assert {name for shape in SHAPES for name in shape.required + shape.optional} == set(NAMES)
    assert {name for form in FORMATS.values() for names in form for name in names} < set(NAMES)


def test_the_recipe_may_map_or_leave_alone_the_same_names() -> None:
    assert set(RECORD_FIELDS) == set(NAMES)
    assert set(FIELDS_LEFT_ALONE) == {one.name for one in REFUSED} - set(NAMES)
