"""Checks of single values: each returns the value as the recipe holds it, or raises Fault.

They are strict on purpose: a whole number may stand for a real one, `128k` for a number of tokens,
and 5e8 for a whole number where `exponent` is set, but no other type for another.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from uspft.config.algorithms import AUTO
from uspft.config.allowed import among, described, either, lets_pass, shown
from uspft.config.problems import Fault, Finding, fault, join
from uspft.config.scalars import meant, plain, token_count

Check = Callable[[Any], Any]

LARGEST = 2**63 - 1
SUFFIXED = "^[0-9]+[kKmM]$"
"""The pattern of a number of tokens that `token_count` reads, such as 128k."""


def closest(text: str, names: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the name that a misspelt one most likely means, or None where none is near."""
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(text.lower(), list(by_lower), 1, cutoff)
    return by_lower[near[0]] if near else None


def misspelt(key: str, known: Iterable[str]) -> str | None:
    """Return the key that a misspelt one most likely is: within two edits, of a short one one."""
    most = 2 if len(key) > 4 else 1
    far = {name: _edits(key.lower(), name.lower()) for name in known}
    near = min(far, key=lambda name: far[name], default=None)
    return near if near is not None and far[near] <= most else None


def _edits(one: str, other: str) -> int:
    """Return how many letters are added, left out, replaced or exchanged with their neighbours."""
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


def _stray(value: object, wanted: str, words: Sequence[object]) -> Fault:
    """Return the Fault of a value of the wrong type: what it is, and what was most likely meant."""
    what = f"expected {either(wanted, words)}, got {shown(value)}"
    remedy = f"write {either(wanted, words)}"
    if isinstance(value, str):
        near = closest(value, [word for word in words if isinstance(word, str)], 0.7)
        likely = meant(value)
        if likely == "write null" and None not in words:
            likely = "write none" if "none" in words else None
        if near is not None:
            remedy = f"did you mean `{near}`?"
        elif likely is not None:
            remedy = likely
        elif isinstance(plain(value), int | float):
            remedy = f"write {value} without quotes"
    return fault(what, remedy)


def whole(
    minimum: int = 0,
    maximum: int = LARGEST,
    *,
    also: Sequence[object] = (),
    unit: str = "",
    exponent: bool = False,
) -> Check:
    """Return a check of whole numbers within bounds; with `exponent`, 5e8 is one too."""
    wanted = f"a whole number{unit} of at least {minimum}"
    schema: dict[str, Any] = {"type": "integer", "minimum": minimum}
    if minimum == -LARGEST:
        wanted = f"a whole number{unit}"
        del schema["minimum"]
    if maximum != LARGEST:
        wanted = f"a whole number{unit} from {minimum} to {maximum}"
        schema["maximum"] = maximum

    @lets_pass(wanted, schema, also)
    def check(value: Any) -> Any:
        if among(value, also):
            return value
        if isinstance(value, float) and value.is_integer():
            if not exponent:
                what = f"expected a whole number{unit}, got {value!r}"
                raise fault(what, f"write {int(value)}")
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _stray(value, wanted, also)
        if not minimum <= value <= maximum:
            raise fault(f"is {value}, out of range", f"write {either(wanted, also)}")
        return value

    return check


class Open(int):
    """A number that the planner chooses, which a recipe writes as `auto`.

    Until it is chosen it counts as 1, so that what reads a recipe sees one that splits nothing.
    """

    def __str__(self) -> str:
        return AUTO

    __repr__ = __str__


OPEN = Open(1)


def whole_or_open(
    minimum: int = 1, maximum: int = LARGEST, *, also: Sequence[object] = ()
) -> Check:
    """Return a check of whole numbers within bounds, for which `auto` is one that stays open."""
    written = described(whole(minimum, maximum, also=(AUTO, *also)))

    @lets_pass(written.wanted, written.schema)
    def check(value: Any) -> Any:
        return OPEN if isinstance(value, Open) or value == AUTO else written(value)

    return check


def tokens(minimum: int, *, also: Sequence[object] = ()) -> Check:
    """Return a check of numbers of tokens, where k and m are binary."""
    number = described(whole(minimum, unit=" of tokens (such as 4096 or 128k)", also=also))
    suffixed = {"type": "string", "pattern": SUFFIXED}

    @lets_pass(number.wanted, {"anyOf": [number.schema, suffixed]})
    def check(value: Any) -> Any:
        count = token_count(value) if isinstance(value, str) else None
        return number(value if count is None else count)

    return check


def real(
    minimum: float = -math.inf,
    maximum: float = math.inf,
    *,
    above: float | None = None,
    below: float | None = None,
    also: Sequence[object] = (),
) -> Check:
    """Return a check of finite numbers, `minimum` to `maximum`, above `above` and below `below`."""
    limits = [("above", "exclusiveMinimum", above), ("of at least", "minimum", minimum)]
    limits += [("of at most", "maximum", maximum), ("below", "exclusiveMaximum", below)]
    bounds = [
        (words, name, at) for words, name, at in limits if at is not None and abs(at) < math.inf
    ]
    wanted = f"a number {' and '.join(f'{words} {at:g}' for words, _, at in bounds)}".rstrip()

    @lets_pass(wanted, {"type": "number", **{name: at for _, name, at in bounds}}, also)
    def check(value: Any) -> Any:
        if among(value, also):
            return value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _stray(value, wanted, also)
        fits = minimum <= value <= maximum and math.isfinite(value)
        if (
            not fits
            or (above is not None and value <= above)
            or (below is not None and value >= below)
        ):
            raise fault(f"is {value:g}, out of range", f"write {either(wanted, also)}")
        return float(value)

    return check


def flag(*, also: Sequence[object] = ()) -> Check:
    """Return a check of true and false; it refuses YAML 1.1's yes and on, which are strings."""

    @lets_pass("true or false", {"type": "boolean"}, also)
    def check(value: Any) -> Any:
        if isinstance(value, bool) or among(value, also):
            return value
        if among(value, (0, 1)):
            raise fault(
                f"expected true or false, got {value}", f"write {'true' if value else 'false'}"
            )
        raise _stray(value, "true or false", also)

    return check


def choice(
    *allowed: str,
    also: Sequence[object] = (),
    synonyms: Mapping[str, str] | None = None,
    others: Mapping[str, str] | None = None,
) -> Check:
    """Return a check of the allowed words; a synonym is read as the word it stands for.

    others: by lower-case words that are known, and not allowed, a sentence without its end.
    """
    listed = either(" | ".join(allowed), also)

    @lets_pass(listed, {"enum": [*allowed, *(synonyms or {}), *also]})
    def check(value: Any) -> Any:
        if value in allowed or among(value, also):
            return value
        if not isinstance(value, str):
            raise fault(f"expected one of {listed}, got {shown(value)}", f"write {listed}")
        if synonyms and value in synonyms:
            return synonyms[value]
        remedy = f"write {listed}"
        near = closest(value, allowed)
        if others and (known := others.get(value.lower())):
            remedy = f"{known}: write {listed}"
        elif near is not None:
            remedy = f"did you mean `{near}`? Allowed: {listed}"
        elif value == "None" and None in also:
            remedy = "write null"
        raise fault(f"unknown value `{value}`", remedy)

    return check


def text(wanted: str = "a string", *, also: Sequence[object] = ()) -> Check:
    """Return a check of strings; empty ones, "None" and those with a zero byte are refused."""

    @lets_pass(wanted, {"type": "string", "pattern": r"\S"}, also)
    def check(value: Any) -> Any:
        if among(value, also):
            return value
        if not isinstance(value, str):
            what = f"expected {either(wanted, also)}, got {shown(value)}"
            quote = isinstance(value, int | float) and not isinstance(value, bool)
            raise fault(what, f'write "{value}" in quotes' if quote else f"write {wanted}")
        if not value.strip() or "\0" in value:
            raise fault("is empty" if "\0" not in value else "holds a zero byte", f"write {wanted}")
        if value == "None":
            remedy = "write null" if None in also else f"write {wanted}"
            raise fault(f'expected {either(wanted, also)}, got the string "None"', remedy)
        return value

    return check


def path(wanted: str = "a path", *, also: Sequence[object] = ()) -> Check:
    """Return a check of paths of the file system, which gives a Path."""
    name = described(text(wanted, also=also))

    @lets_pass(name.wanted, name.schema)
    def check(value: Any) -> Any:
        value = str(value) if isinstance(value, Path) else value
        found = name(value)
        return Path(found) if isinstance(found, str) else found

    return check


def each(
    item: Check, wanted: str, *, size: int | None = None, also: Sequence[object] = ()
) -> Check:
    """Return a check of each item of a list, of `size` items if that is given; it gives a tuple."""
    one = described(item)
    schema: dict[str, Any] = {"type": "array", "items": one.schema}
    schema |= {} if size is None else {"minItems": size, "maxItems": size}

    @lets_pass(wanted if size is None else f"{wanted} (each {one.wanted})", schema, also)
    def check(value: Any) -> Any:
        if among(value, also):
            return value
        if not isinstance(value, list | tuple):
            raise fault(f"expected {either(wanted, also)}, got {shown(value)}", f"write {wanted}")
        if size is not None and len(value) != size:
            raise fault(f"expected {wanted}, got {len(value)} items", f"write {wanted}")
        results, findings = collect((f"[{i}]", item, entry) for i, entry in enumerate(value))
        if findings:
            raise Fault(findings)
        return tuple(results.values())

    return check


def of_stages(item: Check, *, also: Sequence[object] = ()) -> Check:
    """Return a check of an item for each stage of a pipeline: a list, or a list for each virtual
    stage; it gives tuples."""
    one, words = described(item), "[one a stage] or [[one a stage], one list a virtual stage]"
    flat, nested = described(each(item, words)), described(each(each(item, words), words))

    schema = {"anyOf": [{**some.schema, "minItems": 1} for some in (flat, nested)]}

    @lets_pass(f"{words} (each {one.wanted})", schema, also)
    def check(value: Any) -> Any:
        if among(value, also):
            return value
        if value in ([], ()):
            raise fault("is an empty list", f"write {either(words, also)}")
        lists = isinstance(value, list | tuple) and isinstance(value[0], list | tuple)
        return (nested if lists else flat)(value)

    return check


def collect(work: Iterable[tuple[str, Check, Any]]) -> tuple[dict[str, Any], list[Finding]]:
    """Check each (key, check, value), and return the results by key and every finding."""
    results: dict[str, Any] = {}
    findings: list[Finding] = []
    for key, check, value in work:
        try:
            results[key] = check(value)
        except Fault as error:
            findings += [(join(key, below), what, remedy) for below, what, remedy in error.findings]
    return results, findings


def table(
    fields: Mapping[str, Check], *, required: Sequence[str] = (), also: Sequence[object] = ()
) -> Check:
    """Return a check of mappings of these fields, each checked; it gives a dict."""
    keys = {key: described(one).noted() for key, one in fields.items()}
    schema: dict[str, Any] = {"type": "object", "properties": keys, "additionalProperties": False}
    schema |= {"required": list(required)} if required else {}

    @lets_pass("a mapping", schema, also)
    def check(value: Any) -> Any:
        if among(value, also):
            return value
        if not isinstance(value, dict):
            raise fault(
                f"expected {either('a mapping', also)}, got {shown(value)}", "write {key: value}"
            )
        known = ((key, fields[key], item) for key, item in value.items() if key in fields)
        results, findings = collect(known)
        for key in value:
            if key not in fields:
                near = misspelt(key, fields)
                remedy = f"did you mean `{near}`?" if near else f"known here: {', '.join(fields)}"
                findings.append((key, f"unknown key `{key}`", remedy))
        for key in required:
            if key not in value:
                findings.append((key, "is missing and has no default", f"write `{key}`"))
        if findings:
            raise Fault(findings)
        return results

    return check


def free(*, also: Sequence[object] = ()) -> Check:
    """Return a check of mappings of any keys, where strings surely meant otherwise are refused."""

    def misread(value: object, at: str) -> list[Finding]:
        if isinstance(value, dict):
            return [found for key, item in value.items() for found in misread(item, join(at, key))]
        if isinstance(value, list):
            return [found for i, item in enumerate(value) for found in misread(item, f"{at}[{i}]")]
        remedy = meant(value) if isinstance(value, str) else None
        return [(at, f"{shown(value)} is no value here", remedy)] if remedy else []

    @lets_pass("a mapping", {"type": "object"}, also)
    def check(value: Any) -> Any:
        if among(value, also):
            return value
        if not isinstance(value, dict):
            raise fault(
                f"expected {either('a mapping', also)}, got {shown(value)}", "write {key: value}"
            )
        findings = misread(value, "")
        if findings:
            raise Fault(findings)
        return value

    return check
