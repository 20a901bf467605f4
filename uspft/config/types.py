"""The types of a recipe's values, and the base class of its blocks.

They are pydantic's strict types, with three exceptions: a whole number may stand for a float,
`128k` for a number of tokens, and 5e8 for a whole number in DeepSpeed's keys. A type's title is
what messages and docs/keys.md call the value (messages.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction as Ratio
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import typing_extensions
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    Tag,
    ValidationError,
    WrapValidator,
    with_config,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from uspft.config.algorithms import AUTO
from uspft.config.document import SUFFIXED, meant, token_count
from uspft.config.messages import LARGEST, findings_of, shown
from uspft.config.problems import Fault, Finding, fault, join

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class RecipeBlock(BaseModel):
    """A frozen block of the recipe, which refuses unknown keys.

    The string below a field says what its key means.
    """

    model_config = STRICT | ConfigDict(
        frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values for some keys; a mapping for a nested block changes that
        block's keys. Values are not validated.
        """
        for key, value in values.items():
            if isinstance(block := getattr(self, key), RecipeBlock) and isinstance(value, dict):
                values[key] = block.changed(**value)
        return self.model_copy(update=values)


def without_default(given: Any, key: str, instead: str) -> Any:
    """Return the keys of a block, in which `instead` turns off the default of `key`."""
    if isinstance(given, dict) and given.get(instead) is not None and key not in given:
        return {**given, key: None}
    return given


OneBlock = TypeVar("OneBlock", bound=RecipeBlock)


def validated(kind: type[OneBlock], given: Any) -> OneBlock:
    """Return a block with these values. Raises Fault, whose findings have the key paths inside the
    block."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise Fault(findings_of(error, given, kind)) from error


@dataclass(frozen=True)
class As:
    """An annotation for which pydantic validates as `kind`, while mypy sees the annotated type."""

    kind: Any

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return handler.generate_schema(self.kind)


# Numbers.


class Open(int):
    """A number left to the planner, which a recipe writes as `auto`.

    Until it is chosen it is an int of value 1, as if nothing were split.
    """

    def __str__(self) -> str:
        return AUTO

    __repr__ = __str__


OPEN = Open(1)


def or_open(written: Any) -> WrapValidator:
    """Return a validator that turns `auto` into an Open number. written: whether a number may be
    written instead."""

    def read(value: Any, number: Callable[[Any], Any]) -> Any:
        return OPEN if isinstance(value, Open) or value == AUTO else number(value)

    return WrapValidator(read, json_schema_input_type=written | Literal["auto"])


def tokens(least: int) -> As:
    """Return the type of token counts from `least` on, in which the suffixes k and m are binary."""

    def binary(value: Any) -> Any:
        count = token_count(value) if isinstance(value, str) else None
        return value if count is None else count

    number = Annotated[int, Field(ge=least, le=LARGEST)]
    said = Annotated[number, Field(title="a whole number of tokens (such as 4096 or 128k)")]
    suffixed = Annotated[str, Field(pattern=SUFFIXED)]
    return As(Annotated[number, BeforeValidator(binary, json_schema_input_type=said | suffixed)])


Integer = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrOpen = Annotated[Count, or_open(Count)]
CountOpenOrNone = Annotated[Count | None, or_open(Count | None)]
EXPONENT = BeforeValidator(  # DeepSpeed's examples write 5e8
    lambda value: int(value) if isinstance(value, float) and value.is_integer() else value
)
Tokens = Annotated[int, tokens(1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PARTS = 10**6
"""Into how many parts an epoch, or all steps of a run, are divided at most."""
CountOrShare = Count | Annotated[float, Field(gt=0, lt=1)]
Epochs = Annotated[float, Field(ge=1 / PARTS)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


def exactly(share: float | Ratio) -> Ratio:
    """Return the fraction that a decimal stands for, such as 1/3 for 0.3333333333333333."""
    return Ratio(share).limit_denominator(PARTS)


# Words, text and paths.


def _said(value: str) -> str:
    if "\0" in value or value == "None":  # YAML's null was meant
        raise PydanticCustomError("no_text", "no text")
    return value


Text = Annotated[str, Field(pattern=r"\S"), AfterValidator(_said)]


def _path(value: Any, handler: Callable[[Any], Any]) -> Any:
    if isinstance(value, str) and value.strip():
        return Path(_said(value))
    return handler(value)


FilePath = Annotated[
    Path, WrapValidator(_path, json_schema_input_type=Annotated[Text, Field(title="a path")])
]


def elsewhere(known: Mapping[str, str]) -> BeforeValidator:
    """Return a validator that refuses words of other tools. known: each word with the reason, a
    sentence without its full stop."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and (said := known.get(value.lower())):
            raise PydanticCustomError("elsewhere", "not here", {"elsewhere": said})
        return value

    return BeforeValidator(check)


@dataclass(frozen=True)
class OneOf:
    """A word from a table that is looked up at each validation, so that rows added later count.

    names: returns the words, each with the word that it is a synonym of, or itself.
    """

    names: Callable[[], Mapping[str, str]]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def check(value: Any) -> Any:
            if isinstance(value, str) and value in self.names():
                return self.names()[value]
            raise PydanticCustomError("literal_error", "none of the names")

        return core_schema.no_info_plain_validator_function(check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self.names())}


# Lists (tuples in the recipe, hence Strict(False)) and mappings.


EachStage = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""A number for each pipeline stage: [p], or [v][p] with virtual stages."""
_BY_STAGE = "[one a stage] or [[one a stage], one list a virtual stage]"


def of_stages(number: Any) -> As:
    """Return the type of one number per pipeline stage, or of one such list per virtual stage."""

    def kind(value: Any) -> str:
        lists = isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple)
        return "nested" if lists else "flat"

    flat = Annotated[tuple[number, ...], Strict(False), Field(min_length=1), Tag("flat")]
    row = Annotated[tuple[number, ...], Strict(False)]
    nested = Annotated[tuple[row, ...], Strict(False), Field(min_length=1), Tag("nested")]
    return As(Annotated[flat | nested, Discriminator(kind), Field(title=_BY_STAGE)])


def _misread(value: object, at: str = "") -> list[Finding]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in _misread(item, join(at, key))]
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in _misread(item, f"{at}[{i}]")]
    remedy = meant(value) if isinstance(value, str) else None
    return [(at, f"{shown(value)} is no value here", remedy)] if remedy else []


def _free(value: dict[str, Any]) -> dict[str, Any]:
    if findings := _misread(value):
        raise Fault(findings)
    return value


def only(off: object, what: str, remedy: str) -> Callable[[Any], Any]:
    """Return a check that refuses every value but `off`, which asks for nothing. what: the message,
    in which `{}` is the refused value."""

    def check(value: Any) -> Any:
        if value != off:
            raise fault(what.format(shown(value)), remedy)
        return value

    return check


def mapping_of(name: str, keys: Mapping[str, Any]) -> Any:
    """Return the type of mappings with only these keys, each with a value of its type."""
    made: Any = typing_extensions.TypedDict
    return with_config(STRICT)(made(name, dict(keys), total=False))


Free = Annotated[dict[str, Any], AfterValidator(_free)]
"""A mapping of any keys; strings that were surely meant as another type are refused."""


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        what = f"`{value}` is no regular expression: {error}"
        raise fault(
            what, "mend it; a dot or bracket that means itself has a \\ before it"
        ) from None
    return value


Pattern = Annotated[Text, AfterValidator(_pattern), Field(title="a regular expression")]


def as_tree(value: Any, *, all_keys: bool = True) -> Any:
    """Return a recipe, or a part of one, as plain dicts, lists and scalars.

    all_keys: whether to include the keys of features that do not exist yet.
    """
    if isinstance(value, BaseModel):
        value = {
            name: getattr(value, name)
            for name, field in type(value).model_fields.items()
            if all_keys or not field.exclude
        }
    if isinstance(value, dict):
        return {key: as_tree(item, all_keys=all_keys) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_tree(item, all_keys=all_keys) for item in value]
    return str(value) if isinstance(value, Path | Open) else value
