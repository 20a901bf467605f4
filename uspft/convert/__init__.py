"""Configurations of other tools become recipes: key by key, and none is left out unsaid."""

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
"""What makes a recipe of a configuration, by the tool's name."""
_DEFAULTS = {"axolotl": axolotl.DEFAULTS, "swift": swift.DEFAULTS}
"""What holds in a tool where an argument is left out, beside the Trainer's own defaults."""


def convert_theirs(theirs: Theirs, given: Mapping[str, Any], ranks: int | None) -> Outcome:
    """Return the recipe that a configuration becomes, and what became of each key.

    given: keys of ours that the command line writes. ranks: how many processes there are; None: as
    many as the configuration says.
    """
    tool = theirs.tool.name
    names = axolotl.NAMES if tool == "axolotl" else {}
    run = Conversion(theirs, given, names, {**trainer.DEFAULTS, **_DEFAULTS.get(tool, {})})
    return run.ended(CONVERTERS[tool](run, ranks))
