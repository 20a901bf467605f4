"""The keys of an adapter that trains in place of the weights, and the check of `model.freeze`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from uspft.config.allowed import described, lets_pass
from uspft.config.checks import choice, each, real, text
from uspft.config.fields import Count, RecipeBlock
from uspft.config.problems import fault

_is = PlainValidator


class AdapterBlock(RecipeBlock):
    """The block trains low-rank matrices beside frozen weights (LoRA, arXiv 2106.09685)."""

    type: Annotated[Literal["lora"], _is(choice("lora"))] = "lora"
    """The kind of adapter; LoRA is the only one."""
    rank: Count = 16
    """Rank of the two matrices that stand beside a weight."""
    alpha: Annotated[float, _is(real(above=0))] = 32.0
    """What the adapter adds to a projection's output is multiplied by alpha ÷ rank."""
    dropout: Annotated[float, _is(real(0, below=1))] = 0.0
    """Share of an adapter's inputs that training sets to 0, the same ones in every layout."""
    target_modules: Annotated[
        tuple[str, ...] | None,
        _is(each(text("a module's name"), "a list of module names", also=(None,))),
    ] = None
    """Names of the projections to adapt; null adapts every linear projection of the layers."""
    target_parameters: Annotated[
        tuple[str, ...],
        _is(each(text("a parameter's name"), "a list of parameter names")),
    ] = ()
    """Matrices of experts and routers to adapt, named as in peft: mlp.experts.down_proj."""


_words = described(text("a regular expression"))


@lets_pass(_words.wanted, _words.schema)
def pattern(value: Any) -> str:
    """Return the value if it is a regular expression. Raises Fault where it is none."""
    words: str = _words(value)
    try:
        re.compile(words)
    except re.error as error:
        what = f"`{words}` is no regular expression: {error}"
        raise fault(
            what, "mend it; a dot or bracket that means itself has a \\ before it"
        ) from None
    return words
