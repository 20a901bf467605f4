"""How unquoted YAML scalars are read: by YAML 1.2's core schema, plus 1_000, less octal and hex."""

from __future__ import annotations

import math
import re

Scalar = str | int | float | bool | None

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_REAL = re.compile(
    r"[-+]?((0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?",
)
_SUFFIXED = re.compile(r"([0-9]+)([kKmM])")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)
_LONGEST = 40  # characters of a number: int() of thousands of digits is refused by Python itself


def plain(text: str) -> Scalar:
    """Return the value of an unquoted scalar: a finite number, true, false, null, or a string."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST:
        return text
    if _WHOLE.fullmatch(text):
        return int(text)
    if _REAL.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def token_count(text: str) -> int | None:
    """Return the number of tokens in `128k` (131072) or `1m` (2^20); None without such a suffix."""
    match = _SUFFIXED.fullmatch(text)
    if match is None or len(text) > _LONGEST:
        return None
    return int(match[1]) << {"k": 10, "m": 20}[match[2].lower()]


def meant(text: str) -> str | None:
    """Return what to write instead of a string that was surely meant as another value, or None.

    Both readings of a suffix are shown, because k is 1000 in some tools and 1024 in others.
    """
    lower = text.lower()
    if text == "None":
        return "write null"
    if lower in ("yes", "on", "no", "off"):
        return f"write {'true' if lower in ('yes', 'on') else 'false'}"
    binary = token_count(text)
    if binary is not None:
        decimal = int(text[:-1]) * {"k": 1000, "m": 1000**2}[lower[-1]]
        return f"write {decimal} or {binary}"
    if _LEADING_ZERO.fullmatch(text) and len(text) <= _LONGEST:
        return f"write {int(text)}"
    if _NOT_FINITE.fullmatch(text):
        return "write a finite number"
    return None
