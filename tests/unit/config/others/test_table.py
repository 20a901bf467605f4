"""The tables of other tools' keys: every row leads somewhere, and none is written twice."""

from __future__ import annotations

import pytest

from uspft.config.others import TOOLS, table_of
from uspft.config.others.table import FOLDER
from uspft.config.yaml.document import parse
from uspft.config.yaml.unknown import mappings

TABLES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def test_each_tool_has_a_table_and_each_table_a_tool() -> None:
    below = {name for tool in TOOLS.values() for name in tool.below}
    assert set(TABLES) == set(TOOLS) | below
    assert len(TABLES) == 10
    assert sum(len(table_of(name).rows) for name in ("trainer", "deepspeed", "axolotl")) > 600


@pytest.mark.parametrize("name", TABLES)
def test_a_row_leads_to_a_key_that_exists_or_says_why(name: str) -> None:
    known = {f"{at}.{key}" if at else key for at, keys in mappings().items() for key in keys} | {
        "base"
    }
    rows = table_of(name).rows.values()
    leads = [row.to for row in rows if row.becomes in ("same", "translate")]
    assert [to for to in leads if to not in known] == []
    assert [row.key for row in rows if row.becomes == "same" and not row.to] == []
    assert [row.key for row in rows if not row.here or row.here.endswith(".")] == []
    assert [row.key for row in rows if row.becomes != "refuse" and (row.but or row.unless)] == []
    assert [row.key for row in rows if row.unless and row.unless not in known] == []


@pytest.mark.parametrize("name", TABLES)
def test_no_key_has_two_rows(name: str) -> None:
    """A YAML reader would take the last without a word."""
    text = (FOLDER / f"{name}.yaml").read_text()
    _, problems = parse(text, str)
    assert [str(problem) for problem in problems if "duplicate" in problem.what] == []


def test_a_row_that_says_more_than_a_row_does_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from uspft.config.others import table

    for said in ('{same: seed, ignore: "no"}', "{same: seed, when: 1}", "{ignore: 3}", "{}"):
        monkeypatch.setattr(table, "text_of_table", lambda tool, said=said: f'"":\n  key: {said}\n')
        table.table_of.cache_clear()
        with pytest.raises((ValueError, TypeError)):
            table.table_of("people")
    table.table_of.cache_clear()
