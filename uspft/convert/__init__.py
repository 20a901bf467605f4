"""Conversion of other tools' configurations to recipes, key by key; each key is converted or
reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from uspft.convert import axolotl, swift, trainer
from uspft.convert.accelerate import convert_accelerate
from uspft.convert.conversion import Conversion, Outcome, Remark
from uspft.convert.llamafactory import convert_llamafactory
from uspft.convert.mindspore import convert_mindspore
from uspft.convert.theirs import Theirs, read_theirs
from uspft.convert.trl import convert_trl

__all__ = ["CONVERTERS", "Outcome", "Remark", "Theirs", "convert_theirs", "read_theirs"]

CONVERTERS: Mapping[str, Callable[[Conversion, int | None], int]] = {
    "mindspore": convert_mindspore,
    "axolotl": axolotl.convert_axolotl,
    "llamafactory": convert_llamafactory,
    "swift": swift.convert_swift,
    "trl": convert_trl,
    "accelerate": convert_accelerate,
}
"""The converter for each tool, by name."""
_DEFAULTS = {"axolotl": axolotl.DEFAULTS, "swift": swift.DEFAULTS}
"""A tool's own defaults where they differ from the Trainer's."""


def convert_theirs(theirs: Theirs, given: Mapping[str, Any], ranks: int | None) -> Outcome:
    """Return the recipe for a configuration, and what became of each of its keys.

    given: our keys that the command line sets. ranks: the number of processes; None: as in the
    configuration.
    """
    tool = theirs.tool.name
    names = axolotl.NAMES if tool == "axolotl" else {}
    run = Conversion(theirs, given, names, {**trainer.DEFAULTS, **_DEFAULTS.get(tool, {})})
    return run.ended(CONVERTERS[tool](run, ranks))
