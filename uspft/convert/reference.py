"""Generate the tables of docs/coming-from-TOOL.md on what becomes of each key, and that of
Megatron's.

.venv/bin/python -m uspft.convert.reference [--check]

With --check nothing is written, and the exit status is 1 where a page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from uspft.config.other_tools import TOOLS, KeyRow, table_of
from uspft.config.reference import remake
from uspft.convert.conversion import short

DOCS = Path(__file__).parents[2] / "docs"
HEAD = "| there | here |\n| --- | --- |\n"
SHARED = ("trainer", "deepspeed")
"""Tables that several tools extend, printed on the Trainer's page."""


def page_of(tool: str) -> Path:
    """Return the page of a tool."""
    return DOCS / f"coming-from-{tool}.md"


def parts() -> dict[str, tuple[Path, str]]:
    """Return each generated table by its name, with the page where it stands."""
    found = {}
    for name, tool in TOOLS.items():
        of_tool = table_of(name)
        if tool.converts:
            own = [row for path, row in of_tool.rows.items() if path in of_tool.own]
            found[name] = page_of(name), table(own)
        if name == "trl":
            for below in SHARED:
                found[below] = page_of(name), table(table_of(below).rows.values())
    found["megatron"] = DOCS / "coming-from.md", table(table_of("megatron").rows.values())
    return found


def table(rows: Iterable[KeyRow]) -> str:
    """Return a heading and a table for each of the tool's blocks, in order."""
    blocks: dict[str, list[KeyRow]] = {}
    for row in rows:
        blocks.setdefault(row.key.rpartition(".")[0], []).append(row)
    seen: dict[str, str] = {}
    found = []
    for block, inside in blocks.items():
        text = f"{HEAD}{''.join(map(_line, inside))}"
        first = seen.setdefault(text, block)
        text = text if first == block else f"As `{first}`.\n"
        found.append(f"### {f'`{block}`' if block else 'At the top'}\n\n{text}")
    return "\n".join(found)


def _line(row: KeyRow) -> str:
    here = {
        "same": f"`{row.to}`",
        "translate": f"`{row.to}`: {row.say}",
        "ignore": f"ignored: {row.say}",
        "refuse": f"refused: {row.say}",
    }[row.becomes]
    if row.but:
        here += f" ({' or '.join(map(short, row.but))} asks for nothing)"
    name = row.key.rpartition(".")[2]
    key = "every other key" if name == "*" else f"`{name}`"
    return f"| {key} | {here.replace('|', '∣')} |\n"


def main(words: Sequence[str]) -> int:
    """Write or compare the tables; return 1 where a page is out of date."""
    return max(remake(page, name, made, words) for name, (page, made) in parts().items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
