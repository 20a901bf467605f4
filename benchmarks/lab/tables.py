"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table whose first columns are set to the left, the others to the right.

    left: how many stand to the left.
    """
    ruler = ["---" if place < left else "---:" for place in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ruler, *rows))


def listed(words: Sequence[str]) -> str:
    """Return words as a sentence lists them: `a, b and c`."""
    *rest, last = words
    return f"{', '.join(rest)} and {last}" if rest else last


def span(values: Sequence[float], places: int = 2) -> str:
    """Return the least and the most of values: `1.20 to 1.35`, `1.20` where they round alike, and a
    dash where there are none."""
    if not values:
        return "–"
    least, most = (f"{value:.{places}f}" for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def as_tokens(count: int) -> str:
    """Return a number of tokens with a recipe's suffix: `760k`, `1.41m`."""
    return f"{count / 2**20:.3g}m" if count >= 1 << 20 else f"{count >> 10}k"
