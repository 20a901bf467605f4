"""The keys that each mapping of a recipe may hold, and what an unknown one was meant to be."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from uspft.config.deepspeed_fields import REMOVED
from uspft.config.document import Tree
from uspft.config.messages import Node, choices, inside, meant_key, misspelt, schema_of, shown
from uspft.config.other_tools import hint_of, table_of
from uspft.config.problems import COMMAND_LINE, Finding, join
from uspft.config.recipe import Recipe

_BY_THEMSELVES = (".fields", ".rope_scaling")  # their types say more of an unknown key
_ADAPTER = "model.adapter"
_ZERO = "deepspeed.zero_optimization"


@cache
def mappings() -> dict[str, Node]:
    """Return the keys of each mapping of a recipe with their JSON Schemas, by its path, where ""
    is the top and [] any item of a list; what a key of the model or the data may name is not there.
    """
    top, found = schema_of(Recipe), dict[str, Node]()

    def take(node: Node, at: str) -> None:
        for part in inside(node, top):
            if "items" in part:
                take(part["items"], f"{at}[]")
            elif "additionalProperties" in part and not at.endswith(_BY_THEMSELVES):
                found.setdefault(at, part["properties"])
                for key, below in part["properties"].items():
                    take(below, join(at, key))

    take(top, "")
    return found


def without_nulls(tree: Tree, at: str = "") -> Tree:
    """Return the tree without the keys that the command line sets to null and that may not be.

    So a key of the recipe or of a fragment gives way to its default.
    """
    if not isinstance(tree.value, dict):
        return tree
    keys = mappings().get(at, {})
    kept = {
        key: without_nulls(child, join(at, key))
        for key, child in tree.value.items()
        if key not in keys
        or child.value is not None
        or child.where != COMMAND_LINE
        or None in choices(keys[key])
    }
    return Tree(kept, tree.where)


_GENERIC = ("type", "path", "name", "device", "enabled")  # say nothing about where they belong


def unknown_keys(raw: Any, at: str = "") -> tuple[Any, list[Finding], set[str]]:
    """Return the tree without unknown keys, a finding for each, and the known keys they mean."""
    pattern = re.sub(r"\[\d+\]", "[]", at)
    findings: list[Finding] = []
    meant: set[str] = set()
    if isinstance(raw, list):
        parts = [unknown_keys(item, f"{at}[{index}]") for index, item in enumerate(raw)]
        for _, more, names in parts:
            findings += more
            meant |= names
        return [item for item, _, _ in parts], findings, meant
    if not isinstance(raw, dict) or pattern not in mappings():
        return raw, findings, meant
    kept: dict[str, Any] = {}
    for key, value in raw.items():
        path = join(at, key)
        if key in mappings()[pattern]:
            kept[key], more, names = unknown_keys(value, path)
            findings += more
            meant |= names
            continue
        remedy, names = _meant(key, value, at, pattern)
        meant |= names
        ruled = table_of("deepspeed").rows.get(path) if pattern == "deepspeed" else None
        if ruled is not None and ruled.to:
            remedy = f"leave it out: `{ruled.to}` rules it"
            findings.append((path, f"uspft derives `{key}`", remedy))
        elif pattern == _ZERO and key in REMOVED:
            feature, remedy = REMOVED[key]
            what = f"is {shown(value)}, and DeepSpeed has no {feature} any more"
            findings.append((path, what, remedy))
        else:
            findings.append((path, f"unknown key `{key}`", remedy))
    return kept, findings, meant


def _meant(key: str, value: Any, at: str, pattern: str) -> tuple[str, set[str]]:
    """Return what to write instead of an unknown key, and the keys that it stands for."""
    siblings = tuple(mappings()[pattern])
    theirs = hint_of(key, pattern, value)
    if theirs is not None:
        return theirs.remedy, set(theirs.to)
    near = misspelt(key, siblings)
    homes = [] if key in _GENERIC or (near and near.lower() == key.lower()) else _homes(key)
    if homes:
        return f"it belongs to {' or '.join(f'`{home}`' for home in homes)}", set(homes)
    if near is not None:
        return f"did you mean `{near}`?", {join(at, near)}
    return meant_key(key, siblings), set()


def _homes(key: str) -> list[str]:
    """Return the paths at which a key of this name exists, except those in lists.

    Names inside what goes to DeepSpeed as it is say nothing outside it.
    """
    return [
        join(at, key)
        for at, names in mappings().items()
        if key in names and "[]" not in at and (at in (*Recipe.model_fields, "", _ZERO, _ADAPTER))
    ]
