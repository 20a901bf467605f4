"""Configurations of other tools become recipes: key by key, and none is left out unsaid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from uspft.convert.accelerate import convert_accelerate
from uspft.convert.axolotl import convert_axolotl
from uspft.convert.conversion import Outcome, Remark
from uspft.convert.llamafactory import convert_llamafactory
from uspft.convert.mindspore import convert_mindspore
from uspft.convert.swift import convert_swift
from uspft.convert.theirs import Theirs, read_theirs
from uspft.convert.trl import convert_trl

__all__ = ["CONVERTERS", "Outcome", "Remark", "Theirs", "convert_theirs", "read_theirs"]

CONVERTERS: Mapping[str, Callable[[Theirs, Mapping[str, Any], int | None], Outcome]] = {
    "mindspore": convert_mindspore,
    "axolotl": convert_axolotl,
    "llamafactory": convert_llamafactory,
    "swift": convert_swift,
    "trl": convert_trl,
    "accelerate": convert_accelerate,
}
"""What makes a recipe of a configuration, by the tool's name."""


def convert_theirs(theirs: Theirs, given: Mapping[str, Any], ranks: int | None) -> Outcome:
    """Return the recipe that a configuration becomes, and what became of each key.

    given: keys of ours that the command line writes. ranks: how many processes there are; None: as
    many as the configuration says.
    """
    return CONVERTERS[theirs.tool.name](theirs, given, ranks)
