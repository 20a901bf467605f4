"""Generate the table in docs/coming-from.md on the fields of other tools' data.

.venv/bin/python -m uspft.data.reference [--check]

With --check nothing is written, and the exit status is 1 where the page is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from uspft.config.reference import remake
from uspft.data.records.known_fields import (
    ANSWERS,
    FIELDS,
    MASKS,
    PROTOCOL,
    REFUSED,
    REFUSED_KEYS,
    TURN,
    TURN_KEYS,
    KnownField,
    Refused,
)

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
_HEAD = "| field | of | data of | what becomes of it |\n| --- | --- | --- | --- |\n"
_HELD = KnownField("", "passed to the chat template; many need none of them", TURN, also=PROTOCOL)
_REST = (
    KnownField("any other", "reported as not used (`data.unused_fields`)"),
    KnownField(
        "any other", "passed to the chat template; where it reads none, reported as not used", TURN
    ),
)


def table() -> str:
    """Return the table: a line for each field; fields with the same text share one."""
    every = (*FIELDS, *MASKS, ANSWERS, *REFUSED, *TURN_KEYS, *REFUSED_KEYS, _HELD, *_REST)
    lines: dict[tuple[str, str, str], list[str]] = {}
    tools: dict[tuple[str, str, str], list[str]] = {}
    for one in every:
        remedy = one.remedy.format(name="…") if isinstance(one, Refused) else ""
        key = one.of, one.becomes, re.sub(r"\{.*?\}", r"`\g<0>`", remedy)
        names = (name if " " in name else f"`{name}`" for name in (one.name, *one.also) if name)
        lines.setdefault(key, []).extend(names)
        tools.setdefault(key, []).extend(t for some in one.tools for t in some.split(", "))
    return _HEAD + "".join(
        f"| {', '.join(names)} | {of} | {', '.join(dict.fromkeys(tools[key]))} "
        f"| {'; '.join(filter(None, (becomes, remedy)))} |\n"
        for key, names in lines.items()
        for of, becomes, remedy in [key]
    )


def main(words: Sequence[str]) -> int:
    """Write or compare the table; return 1 where the page is out of date."""
    return remake(PAGE, "data", table(), words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
