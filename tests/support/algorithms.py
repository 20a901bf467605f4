"""Algorithms by name, as the table has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from uspft.config.algorithms import CONTEXT, WHOLE
from uspft.sequence import Algorithm, make_algorithm

ALGORITHMS = (WHOLE.name, *CONTEXT)
"""Every way to split a row, one process's own among them."""


def named(name: str, ulysses: int, ring: int, **options: Any) -> Algorithm:
    """`make_algorithm` of a name; piece_tokens, which no recipe says, may stand in options too."""
    row = WHOLE if name == WHOLE.name else CONTEXT[name]
    pieces = {k: options.pop(k) for k in ("piece_tokens",) if k in options}
    made: Any = make_algorithm(row, ulysses, ring, **options)
    found: Algorithm = replace(made, **pieces)
    return found
