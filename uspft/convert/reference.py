"""Make the table of docs/coming-from-mindspore.md that says what becomes of each key.

    .venv/bin/python -m uspft.convert.reference [--check]

With --check it writes nothing, and ends with 1 where the page has another table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from uspft.config.reference import remake
from uspft.convert.table import KeyRow, mindspore_table

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-mindspore.md"
HEAD = "| there | here |\n| --- | --- |\n"


def table() -> str:
    """Return a heading and a table for each block of theirs, in the table's order."""
    blocks: dict[str, list[KeyRow]] = {}
    for row in mindspore_table().rows.values():
        blocks.setdefault(row.key.rpartition(".")[0], []).append(row)
    return "\n".join(
        f"### {f'`{block}`' if block else 'At the top'}\n\n{HEAD}{''.join(map(_line, rows))}"
        for block, rows in blocks.items()
    )


def _line(row: KeyRow) -> str:
    here = {
        "same": f"`{row.to}`",
        "translate": f"`{row.to}`: {row.say}",
        "ignore": f"ignored: {row.say}",
        "refuse": f"refused: {row.say}",
    }[row.becomes]
    if row.but:
        words = {True: "true", False: "false", None: "null"}
        fine = " or ".join(
            words[one] if one is None or isinstance(one, bool) else str(one) for one in row.but
        )
        here += f" ({fine} asks for nothing)"
    name = row.key.rpartition(".")[2]
    key = "every other key" if name == "*" else f"`{name}`"
    return f"| {key} | {here.replace('|', '∣')} |\n"


def main(words: Sequence[str]) -> int:
    """Make the table, or compare it; return 1 where the page has another."""
    return remake(PAGE, "mindspore", table(), words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
