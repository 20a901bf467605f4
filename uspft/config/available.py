"""Features of the contract that come later; asking for one is one problem, which names it.

A feature is available when its row is gone. Until then the keys that ask for it are dropped before
anything else is checked, so that the feature's own rules wait for it, and a default that asks for
it is switched off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from uspft.config.problems import Finding, join
from uspft.config.recipe import Recipe
from uspft.config.scalars import plain

Asks = Callable[[Any], bool]


@dataclass(frozen=True)
class Later:
    """A feature that is not available yet, and the keys with which a recipe asks for it."""

    feature: str
    keys: Mapping[str, tuple[Asks, str]]
    """For each key, which values ask for the feature, and what to write until it is available.

    The latter is YAML; an empty string means that the key is left out.
    """


def _is(*words: object) -> Asks:
    return lambda value: any(type(value) is type(word) and value == word for word in words)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _above_one(value: Any) -> bool:
    return _whole(value) and value > 1


_LAYOUTS = ("parallel_config", "parallel_config.strategies[]")

LATER = (
    Later(
        "interleaving a layer's work",
        {f"{at}.fine_grain_interleave": (_above_one, "1") for at in _LAYOUTS},
    ),
    Later("code from the hub", {"model.trust_remote_code": (_is(True), "false")}),
    Later("the report", {"logging.report": (_is(True), "false")}),
)


def refused(raw: dict[str, Any]) -> tuple[list[Finding], set[str]]:
    """Return one finding for each feature that the recipe asks for, and every key that asks."""
    findings: list[Finding] = []
    asking: set[str] = set()
    values = list(_values(raw, ""))
    for later in LATER:
        found = [
            (key, later.keys[pattern][1])
            for pattern, key, value in values
            if pattern in later.keys and later.keys[pattern][0](value)
        ]
        if found:
            what = f"{later.feature} is not available yet"
            findings.append((found[0][0], what, " and ".join(_instead(*one) for one in found)))
            asking |= {key for key, _ in found}
    return findings, asking


def settled(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the tree, with every default that asks for a later feature written out as off."""
    result = dict(raw)
    for later in LATER:
        for pattern, (asks, off) in later.keys.items():
            block, _, key = pattern.partition(".")
            kind: Any = Recipe.model_fields[block].annotation
            field = kind.model_fields.get(key)
            own = result.get(block, {})
            absent = isinstance(own, dict) and key not in own
            if field is not None and absent and not field.is_required() and asks(field.default):
                result[block] = {**own, key: plain(off)}
    return result


def without_later(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree without the keys of features that are not available yet: all are off."""
    later = {key for one in LATER for key in one.keys}

    def kept(value: Any, at: str) -> Any:
        if isinstance(value, dict):
            places = {name: join(at, name) for name in value}
            return {n: kept(v, places[n]) for n, v in value.items() if places[n] not in later}
        if isinstance(value, list):
            return [kept(item, f"{at}[]") for item in value]
        return value

    found: dict[str, Any] = kept(tree, "")
    return found


def _instead(key: str, off: str) -> str:
    name = key.rpartition(".")[2]
    return f"write `{name}: {off}`" if off else f"leave `{name}` out"


def _values(raw: Any, at: str) -> list[tuple[str, str, Any]]:
    """Return (pattern, key, value) of everything in the tree, in file order.

    A pattern is the key with `[]` in place of each index.
    """
    found = [(re.sub(r"\[\d+\]", "[]", at), at, raw)] if at else []
    if isinstance(raw, dict):
        for key, value in raw.items():
            found += _values(value, join(at, key))
    elif isinstance(raw, list):
        for index, value in enumerate(raw):
            found += _values(value, f"{at}[{index}]")
    return found
