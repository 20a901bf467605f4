"""Configurations of other tools become recipes: key by key, and none is left out unsaid."""

from __future__ import annotations

from uspft.convert.mindspore import convert_mindspore
from uspft.convert.outcome import Outcome, Remark
from uspft.convert.table import KeyRow, mindspore_table
from uspft.convert.theirs import Theirs, read_theirs

__all__ = [
    "KeyRow",
    "Outcome",
    "Remark",
    "Theirs",
    "convert_mindspore",
    "mindspore_table",
    "read_theirs",
]
