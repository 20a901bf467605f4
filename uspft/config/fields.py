"""The base class of the recipe's blocks, and the types of values that many of their keys share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from uspft.config.allowed import lets_pass, shown
from uspft.config.checks import Check, flag, path, text, whole, whole_or_open
from uspft.config.problems import Fault, Finding, join

_NONE = (None,)

Count = Annotated[int, PlainValidator(whole(1))]
CountOrNone = Annotated[int | None, PlainValidator(whole(1, also=_NONE))]
CountAutoOrNone = Annotated[
    int | Literal["auto"] | None, PlainValidator(whole(1, also=("auto", None)))
]
CountOrAuto = Annotated[int | Literal["auto"], PlainValidator(whole(1, also=("auto",)))]
CountOrOpen = Annotated[int, PlainValidator(whole_or_open())]
CountOpenOrNone = Annotated[int | None, PlainValidator(whole_or_open(also=_NONE))]
Flag = Annotated[bool, PlainValidator(flag())]
TextOrNone = Annotated[str | None, PlainValidator(text(also=_NONE))]
PathOrNone = Annotated[Path | None, PlainValidator(path(also=_NONE))]


class RecipeBlock(BaseModel):
    """A mapping of the recipe, which refuses unknown keys and whose values never change.

    The line below a field says what its key means.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True
    )


_INSTEAD = {
    "parallel_config": "write auto, or its keys below it",
    "model": "write the folder or hub id as `model.name_or_path`",
    "data": "write the file or folder as `data.train`",
    "deepspeed": "write `deepspeed.zero_optimization.stage` and the like below it; "
    "no file of DeepSpeed's settings is read",
    "optimizer": "leave it out, or write its keys below it; `optimizer.type` is adamw alone",
    "lr_schedule": "write it as `lr_schedule.type`",
}
"""A block for which other tools have one value → what to write instead."""


def findings_of(error: ValidationError) -> list[Finding]:
    """Return pydantic's errors as findings."""
    findings: list[Finding] = []
    for one in error.errors(include_url=False):
        at = ".".join(map(str, one["loc"]))
        cause = one.get("ctx", {}).get("error")
        if isinstance(cause, Fault):
            findings += [(join(at, key), what, remedy) for key, what, remedy in cause.findings]
        elif one["type"] == "missing":
            findings.append((at, "is missing and has no default", f"write `{at.split('.')[-1]}`"))
        elif one["type"] == "extra_forbidden":
            findings.append((at, f"unknown key `{one['loc'][-1]}`", "leave it out"))
        else:
            what = f"expected a mapping of keys, got {shown(one['input'])}"
            other = "indent its keys below it, or leave it out"
            findings.append((at, what, _INSTEAD.get(at, other)))
    return findings


def block(kind: type[RecipeBlock], *, also: tuple[object, ...] = ()) -> Check:
    """Return a check that reads a nested block, and whose findings carry the keys inside it.

    also: (None,) where null may stand in place of the block.
    """

    @lets_pass("a mapping", {"$ref": f"#/$defs/{kind.__name__}"}, also)
    def check(value: Any) -> Any:
        if value is None and None in also:
            return None
        try:
            return kind.model_validate(value)
        except ValidationError as error:
            raise Fault(findings_of(error)) from error

    return check
