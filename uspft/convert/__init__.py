"""Configurations of other tools become recipes: key by key, and none is left out unsaid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from uspft.convert.axolotl import convert_axolotl
from uspft.convert.mindspore import convert_mindspore
from uspft.convert.outcome import Outcome, Remark
from uspft.convert.theirs import Theirs, read_theirs

__all__ = ["CONVERTERS", "Outcome", "Remark", "Theirs", "convert_theirs", "read_theirs"]

CONVERTERS: Mapping[str, Callable[[Theirs, Mapping[str, Any], int | None], Outcome]] = {
    "mindspore": convert_mindspore,
    "axolotl": convert_axolotl,
}
"""What makes a recipe of a configuration, by the tool's name."""


def convert_theirs(theirs: Theirs, given: Mapping[str, Any], ranks: int | None) -> Outcome:
    """Return the recipe that a configuration becomes, and what became of each key.

    given: keys of ours that the command line writes. ranks: how many processes there are; None: as
    many as the configuration says.
    """
    return CONVERTERS[theirs.tool.name](theirs, given, ranks)
