"""Messages about values that a type refuses, built from its JSON Schema; and how values and tables
are printed."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from uspft.config.document import SUFFIXED, meant, plain
from uspft.config.problems import Fault, Finding, join

Node = dict[str, Any]  # a part of a JSON Schema
LARGEST = 2**63 - 1

_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
_INSTEAD = {
    "parallel_config": "write auto, or its keys below it",
    "model": "write the folder or hub id as `model.name_or_path`",
    "data": "write the file or folder as `data.train`",
    "deepspeed": "write `deepspeed.zero_optimization.stage` and the like below it; "
    "no file of DeepSpeed's settings is read",
    "optimizer": "leave it out, or write its keys below it; `optimizer.type` is adamw alone",
    "lr_schedule": "write it as `lr_schedule.type`",
}
"""Blocks for which other tools have a single value: what to write instead."""


def shown(value: object) -> str:
    """Return a value as a message shows it."""
    if isinstance(value, str):
        return f'the string "{value if len(value) <= 60 else value[:57] + "..."}"'
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else repr(value)


def as_written(value: Any) -> str:
    """Return a value as a recipe writes it."""
    if isinstance(value, bool | None):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {as_written(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_written, value))}]"
    return str(value).replace("e-0", "e-") if isinstance(value, float) else str(value)


def refused(
    block: Any, key: str, off: Collection[Any], why: str, remedy: str, at: str = ""
) -> Iterator[Finding]:
    """Yield a finding if a key has a value outside `off`, the values that ask for nothing. at: the
    path of the block."""
    value = reduce(getattr, key.split("."), block)
    if value not in off:
        yield join(at, key), f"is {as_written(value)}, {why}", remedy


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def closest(text: str, names: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the name that a misspelt one most likely means, or None where none is near."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(text.lower(), list(by_lower), 1, cutoff)
    return by_lower[near[0]] if near else None


def misspelt(key: str, known: Iterable[str]) -> str | None:
    """Return the key that a misspelt one most likely is: at most two edits away, or one where it
    has no more than four letters."""
    most = 2 if len(key) > 4 else 1
    far = {name: _edits(key.lower(), name.lower()) for name in known}
    near = min(far, key=lambda name: far[name], default=None)
    return near if near is not None and far[near] <= most else None


def _edits(one: str, other: str) -> int:
    """Return how many letters at least are added, left out, replaced or swapped with the next."""
    before, above = [0] * len(other), list(range(len(other) + 1))
    for i, here in enumerate(one):
        row = [i + 1]
        for j, there in enumerate(other):
            least = min(above[j + 1] + 1, row[j] + 1, above[j] + (here != there))
            if i and j and here == other[j - 1] and one[i - 1] == there:
                least = min(least, before[j - 1] + 1)
            row.append(least)
        before, above = above, row
    return above[-1]


class _Untitled(GenerateJsonSchema):
    """A schema generator without the titles that pydantic derives from field names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def schema_of(kind: Any) -> Node:
    """Return the JSON Schema of a type, with all its words merged into one `enum`.

    A `title` in it is what messages call the value. The result is cached: copy it before changing
    it.
    """
    made = TypeAdapter(kind).json_schema(schema_generator=_Untitled)
    simple: Node = _simple(made)
    return simple


def _simple(node: Any) -> Any:
    if isinstance(node, list):
        return [_simple(part) for part in node]
    if not isinstance(node, dict):
        return node
    found: Node = {
        key: {name: _simple(below) for name, below in part.items()}
        if key in ("properties", "$defs")
        else part
        if key in ("default", "enum", "const")
        else _simple(part)
        for key, part in node.items()
        if key not in ("format", "discriminator") and (key, part) != ("additionalProperties", True)
    }
    if found.get("type") == "null":
        return {"enum": [None]}
    if "const" in found or "enum" in found:
        found["enum"] = found.get("enum") or [found.pop("const")]
        found.pop("type", None)
    if found.get("additionalProperties") is False:
        found.pop("title", None)
    if each := found.pop("prefixItems", None):
        found["items"] = each[0]
    for bound in ("maximum", "minimum"):
        if abs(found.get(bound, 0)) == LARGEST:
            del found[bound]
    if parts := found.pop("oneOf", None) or found.pop("anyOf", None):
        every = [p["anyOf"] if list(p) == ["anyOf"] else [p] for p in parts]
        flat = [one for part in every for one in part]
        kinds = [one for one in flat if "enum" not in one]
        named = [word for one in flat for word in one.get("enum", ())]
        words_alone = [{"enum": named}] if named else []
        found |= {"anyOf": [*kinds, *words_alone]} if kinds else {"enum": named}
    return found


def choices(node: Node) -> list[Any]:
    """Return the `enum` values of a schema, null included."""
    return [word for part in node.get("anyOf", [node]) for word in part.get("enum", ())]


def words(node: Node, *, items: bool = False) -> str:
    """Return what messages call the values that a schema accepts.

    items: whether to describe the items of a list of fixed size too.
    """
    every = [said for part in _kinds(node) if (said := _kind(part, items))]
    named = [one if isinstance(one, str) else shown(one) for one in choices(node)]
    if not every and named[:-1] and None in choices(node):
        named = [" | ".join(one for one in named if one != "null"), "null"]
    elif not every:
        named = [" | ".join(named)]
    return " or ".join([*every, *named])


def _kinds(node: Node) -> list[Node]:
    """Return the alternatives of a schema other than `enum`."""
    parts = node.get("anyOf", [node]) if "title" not in node else [node]
    return [part for part in parts if "enum" not in part]


def _kind(node: Node, items: bool) -> str:
    kind, title = node.get("type"), node.get("title")
    if kind in ("integer", "number"):
        low, high = node.get("minimum"), node.get("maximum")
        said = title or ("a whole number" if kind == "integer" else "a number")
        if kind == "integer" and None not in (low, high):
            return f"{said} from {low} to {high}"
        limits = [("above", node.get("exclusiveMinimum")), ("of at least", low)]
        limits += [("of at most", high), ("below", node.get("exclusiveMaximum"))]
        return (
            f"{said} {' and '.join(f'{by} {at:g}' for by, at in limits if at is not None)}".rstrip()
        )
    if kind == "boolean":
        return "true or false"
    if kind == "string":
        return "" if node.get("pattern") == SUFFIXED else title or "a string"
    if kind == "object" or "$ref" in node or (title is None and kind is None):
        return title or "a mapping"
    if items and title and title.startswith("["):
        one = node
        while "items" in one or "anyOf" in one:
            one = one["items"] if "items" in one else one["anyOf"][0]
        return f"{title} (each {_kind(one, items)})"
    return title or "a list"


def resolved(node: Node, top: Node) -> Node:
    """Return the schema with its `$ref` followed, if it has one."""
    return top["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def inside(node: Node, top: Node, value: Any = None) -> list[Node]:
    """Return the list and mapping schemas among a schema's alternatives, resolved.

    value: alternatives that match its words and its nesting are preferred.
    """
    node = resolved(node, top)
    if "anyOf" in node:
        every = [one for part in node["anyOf"] for one in inside(part, top, value)]
    else:
        every = [node] if "items" in node or "properties" in node else []
    given = value if isinstance(value, dict) else {}
    lists = isinstance(value, list | tuple) and any(isinstance(one, list) for one in value)

    def fits(one: Node) -> bool:
        worded = {k: n["enum"] for k, n in one.get("properties", {}).items() if "enum" in n}
        words_fit = all(given[key] in worded[key] for key in given.keys() & worded.keys())
        return words_fit and lists == ("items" in one.get("items", {}))

    return [one for one in every if fits(one)] or every


def findings_of(error: ValidationError, given: Any, kind: Any) -> list[Finding]:
    """Return the pydantic errors of a value as findings, one for each key.

    Each alternative of a union reports its own errors; only those at the deepest key count, since
    they come from the alternative closest to the value.
    """
    top = schema_of(kind)
    by_key: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for one in error.errors(include_url=False):
        by_key.setdefault(place_of(one, given), []).append(one)
    findings: list[Finding] = []
    for key, errors in by_key.items():
        if not any(len(other) > len(key) and other[: len(key)] == key for other in by_key):
            findings += _said(key, errors, given, top)
    return findings


def below(at: str, token: str | int) -> str:
    """Return the key path of the key or list index `token` inside `at`."""
    return join(at, f"[{token}]" if isinstance(token, int) else token)


def place_of(error: ErrorDetails, given: Any) -> tuple[str | int, ...]:
    """Return the key path of an error, without the names that pydantic adds for alternatives."""
    at: list[str | int] = []
    for token in error["loc"]:
        held = isinstance(given, dict) and token in given
        if held or (isinstance(given, list | tuple) and token in range(len(given))):
            at.append(token)
            given = given[token]
    *_, last = error["loc"] or ("",)
    return (*at, last) if error["type"] == "missing" and isinstance(last, str) else tuple(at)


def _said(
    key: Sequence[str | int], errors: Sequence[ErrorDetails], given: Any, top: Node
) -> Iterator[Finding]:
    at, node, value, above = "", top, given, top
    for token in key:
        above, around = node, value
        at = below(at, token)
        of = (
            part.get("items") if isinstance(token, int) else part["properties"].get(token)
            for part in inside(above, top, around)
        )
        node = next((one for one in of if one is not None), {})
        held = (isinstance(around, dict) and token in around) or isinstance(around, list | tuple)
        value = around[token] if held else None
    causes = [one.get("ctx", {}).get("error") for one in errors]
    kinds = {one["type"] for one in errors}
    if faults := [cause for cause in causes if isinstance(cause, Fault)]:
        yield from ((join(at, key), *said) for key, *said in faults[0].findings)  # type: ignore[misc]
    elif "missing" in kinds and not isinstance(value, list | tuple):
        yield at, "is missing and has no default", f"write `{key[-1]}`"
    elif "extra_forbidden" in kinds:
        known = [name for part in inside(above, top, around) for name in part["properties"]]
        yield at, f"unknown key `{key[-1]}`", meant_key(str(key[-1]), known)
    elif "model_type" in kinds and len(kinds) == 1:
        what = f"expected a mapping of keys, got {shown(value)}"
        yield at, what, _INSTEAD.get(at, "indent its keys below it, or leave it out")
    else:
        what, remedy = _sentence(value, node, kinds, [one.get("ctx", {}) for one in errors])
        if remedy.startswith("write a mapping"):
            known = [name for part in inside(node, top) for name in part.get("properties", ())]
            remedy = f"write {key[-1]}: {{{[*known, 'name'][0]}: …}}"
        yield at, what, remedy


def meant_key(key: str, known: Sequence[str]) -> str:
    """Return the remedy for an unknown key: the known one it resembles, or a list of them."""
    near = misspelt(key, known)
    return f"did you mean `{near}`?" if near else f"known here: {', '.join(dict.fromkeys(known))}"


def unknown_value(value: object, node: Node) -> tuple[str, str]:
    """Return what is wrong with a value that is not in a schema's `enum`, and the remedy."""
    listed, named = words(node), choices(node)
    if not isinstance(value, str):
        one_of = "one of " if named[1:] else ""
        return f"expected {one_of}{listed}, got {shown(value)}", f"write {listed}"
    remedy = f"write {'null' if value == 'None' and None in named else listed}"
    if near := closest(value, [word for word in named if isinstance(word, str)]):
        remedy = f"did you mean `{near}`? Allowed: {listed}"
    return f"unknown value `{value}`", remedy


def _sentence(
    value: Any, node: Node, kinds: set[str], context: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Return what is wrong with a value, and what to write instead."""
    wanted, parts = words(node), _kinds(node)
    types = {part.get("type"): part for part in parts}
    if known := next((one["elsewhere"] for one in context if "elsewhere" in one), None):
        return f"unknown value `{value}`", f"{known}: write {wanted}"
    if not parts:
        return unknown_value(value, node)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value in (0, 1) and number and "boolean" in types:
        return f"expected true or false, got {value}", f"write {'true' if value else 'false'}"
    whole = isinstance(value, float) and value.is_integer() and "integer" in types
    if number and kinds & _BOUNDS and not (whole and value >= 1):
        said = f"{value:g}" if "number" in types else value
        return f"is {said}, out of range", f"write {wanted}"
    if whole:
        said = types["integer"].get("title", "a whole number")
        return f"expected {said}, got {value!r}", f"write {int(value)}"
    if isinstance(value, list | tuple):
        if not value and "too_short" in kinds:
            return "is an empty list", f"write {wanted}"
        lists = [part["title"] for part in parts if "title" in part and "type" in part]
        if kinds & {"too_short", "too_long", "missing"} and lists:
            return f"expected {lists[-1]}, got {len(value)} items", f"write {lists[-1]}"
    every = [*parts, *(one for part in parts if "title" in part for one in part.get("anyOf", ()))]
    text = any(one.get("type") == "string" and one.get("pattern") != SUFFIXED for one in every)
    if text and (isinstance(value, str) or number or len(parts) == 1):
        return _no_text(value, node, wanted)
    remedy = f"write {wanted}"
    if value == "None" and None in choices(node):
        remedy = "write null"
    elif isinstance(value, str) and types.keys() & {"integer", "number", "boolean"}:
        remedy = _meant_value(value, choices(node)) or remedy
    return f"expected {wanted}, got {shown(value)}", remedy


def _no_text(value: Any, node: Node, wanted: str) -> tuple[str, str]:
    """Return what is wrong with a value where text is wanted."""
    text = next(said for part in _kinds(node) if (said := _kind(part, False)))
    if isinstance(value, str) and value != "None":
        return "holds a zero byte" if "\0" in value else "is empty", f"write {text}"
    remedy = f"write {text}"
    if isinstance(value, str) and None in choices(node):
        remedy = "write null"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        remedy = f'write "{value}" in quotes'
    return f"expected {wanted}, got {shown(value)}", remedy


def _meant_value(value: str, named: Sequence[object]) -> str | None:
    """Return the value that a string most likely stands for, where it is not an allowed word."""
    likely = meant(value)
    if likely == "write null" and None not in named:
        likely = "write none" if "none" in named else None
    if near := closest(value, [word for word in named if isinstance(word, str)], 0.7):
        return f"did you mean `{near}`?"
    if likely is None and isinstance(plain(value), int | float):
        return f"write {value} without quotes"
    return likely
