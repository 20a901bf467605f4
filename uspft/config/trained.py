"""Which parameters train: an adapter in place of all, or all but some."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from uspft.config.block import Block, Count
from uspft.config.checks import choice, each, real, text
from uspft.config.problems import fault

_is = PlainValidator


class AdapterBlock(Block):
    """Low-rank adapters (2106.09685) instead of training every weight; target_modules None: every
    linear projection of the layers."""

    type: Annotated[Literal["lora"], _is(choice("lora"))] = "lora"
    rank: Count = 16
    alpha: Annotated[float, _is(real(above=0))] = 32.0
    dropout: Annotated[float, _is(real(0, below=1))] = 0.0
    target_modules: Annotated[
        tuple[str, ...] | None,
        _is(each(text("a module's name"), "a list of module names", also=(None,))),
    ] = None


def pattern(value: Any) -> str:
    """A regular expression. Raises Fault."""
    words: str = text("a regular expression")(value)
    try:
        re.compile(words)
    except re.error as error:
        what = f"`{words}` is no regular expression: {error}"
        raise fault(
            what, "mend it; a dot or bracket that means itself has a \\ before it"
        ) from None
    return words
