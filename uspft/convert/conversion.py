"""The state of one conversion: the other tool's values, the recipe that is written, and the
remarks; and its outcome, a recipe with comments and a line for each key that was not copied
unchanged. "Theirs" are the other tool's keys, "ours" the recipe's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from uspft.config.document import parse, places, written
from uspft.config.messages import as_written
from uspft.config.other_tools import table_of
from uspft.config.problems import Problem
from uspft.config.recipe import Recipe
from uspft.convert.theirs import Theirs

HUGE = 1e100
"""An upper bound on valid numbers, which infinity and NaN do not satisfy."""
NOTHING = "asks for nothing at this value"
NULL = "is null: asks for nothing"
ACCELERATE = "accelerate"
"""The internal block for the keys of accelerate's file; messages omit it."""


class Conversion:
    """The other tool's values, each read once, and the outcome so far.

    given: our keys that the command line sets, so that their keys for the same need not be
    converted. names: the tool's names for the Trainer's arguments, where they differ. defaults: the
    values of omitted Trainer arguments.
    """

    def __init__(
        self,
        theirs: Theirs,
        given: Mapping[str, Any],
        names: Mapping[str, str],
        defaults: Mapping[str, Any],
    ) -> None:
        self.theirs, self.given, self._names = theirs, given, names
        self.defaults = {self.key(name): value for name, value in defaults.items()}
        self.table = table_of(theirs.tool.name)
        self.outcome = Outcome()
        self._spoken: set[str] = set()

    def key(self, name: str) -> str:
        """Return the tool's name of a Trainer argument."""
        return self._names.get(name, name)

    def written(self, *keys: str | None) -> str | None:
        """Return the first of their keys that is set to a value other than null, or None."""
        return next((key for key in keys if key and self.value(key) is not None), None)

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of their key, or the default where it is absent or null."""
        found = self.theirs.values.get(key)
        return default if found is None or found.value is None else found.value

    def whole(self, *keys: str, default: int | None = None, least: int | None = None) -> int:
        """Return the value of the first of these keys that is set; anything but a whole number is
        refused.

        default: for omitted keys; None: the argument's default, else 1. least: the lower bound;
        None: none.
        """
        key, default = (
            self.written(*keys),
            self.defaults.get(keys[0], 1) if default is None else default,
        )
        found = default if key is None else self.value(key)
        if key is not None and not is_whole(found):
            self.wrong(key, "write a whole number", ", no whole number")
            return default
        if key is not None and least is not None and found < least:
            self.wrong(key, f"write at least {least}")
            return default
        return int(found)

    def number(self, *keys: str, default: float | None = None) -> float:
        """Return the value of the first of these keys that is set; anything but a number is
        refused.

        default: for omitted keys; None: the argument's default.
        """
        key, default = self.written(*keys), self.defaults[keys[0]] if default is None else default
        found = default if key is None else self.value(key)
        if isinstance(found, int | float) and not isinstance(found, bool) and abs(found) < HUGE:
            return float(found)
        self.wrong(str(key), "write a number", ", no number")
        return float(default)

    def choice(
        self,
        key: str,
        known: Collection[str],
        default: str = "",
        *,
        why: str = "",
        remedy: str = "",
    ) -> str:
        """Return the word of a key if it is in `known`; otherwise refuse it and return "".

        default: for an omitted key. why: text after the refused word. remedy: what to do; empty:
        write one of `known`.
        """
        found = self.value(key, default)
        if str(found) in known:
            return str(found)
        *some, last = known
        listed = f"{', '.join(some)} or {last}" if len(known) < 4 else f"one of {', '.join(known)}"
        self.refuse(key, f"is {short(found)}{why}", remedy or f"write {listed if some else last}")
        return ""

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Return whether the first of these keys that is set is true."""
        key = self.written(*keys)
        found = default if key is None else self.value(key)
        if isinstance(found, bool):
            return found
        self.wrong(str(key), "write true or false")
        return default

    def put(self, ours: str, value: Any, *keys: str | None, say: str = "", why: str = "") -> None:
        """Write our key. keys: their keys that the value comes from. say: how it differs from
        theirs. why: the comment, by default these keys with their values."""
        self.outcome.values[ours] = value
        there = [key for key in keys if key and key in self.theirs.values]
        if there:
            self.outcome.sources[ours] = self.theirs.values[there[0]].where, shown(there[0])
        texts = (f"{shown(key)}: {short(self.theirs.values[key].value)}" for key in there)
        if comment := why or ", ".join(texts):
            self.outcome.comments[ours] = comment
        for key in there:
            if ours in self.given:
                self.changed(key, in_place(ours))
                continue
            row, same = self.table.of(key), self.theirs.values[key].value == value
            if row is not None and row.becomes == "same" and row.to == ours and same and not say:
                self.taken(key)
                continue
            name = f"here `{ours}: {short(value)}`"
            self.changed(key, f"{name}; {say}" if say else name)

    def changed(self, key: str, what: str) -> None:
        self._say("changed", key, what)

    def ignored(self, key: str, what: str) -> None:
        self._say("ignored", key, what)

    def told(self, what: str, *keys: str | None) -> None:
        """Report what becomes of those of these keys that are set."""
        for key in filter(self.written, keys):
            self.changed(str(key), what)

    def settled(self, ours: str, *keys: str | None) -> bool:
        """Return whether the command line sets our key; if so, report that for these keys."""
        if ours in self.given:
            self.told(in_place(ours), *keys)
        return ours in self.given

    def idle(self, why: str, *keys: str | None) -> None:
        """Report why those of these keys that are set change nothing here."""
        for key in filter(self.written, keys):
            self.ignored(str(key), why)

    def dropped(self, why: str, *keys: str) -> None:
        """Report why those of these keys that are present, even as null, change nothing here."""
        for key in filter(self.theirs.values.__contains__, keys):
            self.ignored(key, why)

    def switch(self, key: str, ours: str, value: Any) -> None:
        """Write our key if theirs is true; otherwise theirs has no effect."""
        if self.value(key) is True:
            self.put(ours, value, key)
        else:
            self.idle(NOTHING, key)

    def refuse(self, key: str, what: str, remedy: str) -> None:
        self._say("refused", key, what, remedy)

    def wrong(self, key: str, remedy: str, more: str = "") -> None:
        """Refuse the value of a key. more: text after the value."""
        self.refuse(key, f"is {short(self.value(key))}{more}", remedy)

    def _say(self, weight: str, key: str, what: str, remedy: str = "") -> None:
        found = self.theirs.values.get(key)
        where = found.where if found else f"{self.theirs.file}:1"
        self._spoken.add(key)
        remark = Remark(weight, where, shown(key), what, remedy)
        if remark not in self.outcome.remarks:
            self.outcome.remarks.append(remark)

    def taken(self, key: str) -> None:
        """Mark their key as copied unchanged, so that it needs no line."""
        self._spoken.add(key)

    def spoken(self, key: str) -> bool:
        """Tell whether their key is reported already, or needs no report."""
        return key in self._spoken

    def ended(self, batch: int) -> Outcome:
        """Return the outcome, with the command line's keys set and every remaining key reported.

        batch: the rows per optimizer step by the tool's formula, with which the recipe must agree.
        """
        outcome = self.outcome
        for path, found in self.theirs.values.items():
            if path not in self._spoken:
                self._by_its_row(path, found.value)
        if not outcome.refused:
            assert outcome.values["training.global_batch_size"] == batch, "the batch has changed"
        for key, value in self.given.items():
            near = [one for one in outcome.values if f"{one}.".startswith(f"{key}.")]
            near += [one for one in outcome.values if key.startswith(f"{one}.")]
            for one in near:
                del outcome.values[one]
            outcome.comments.pop(key, None)
            outcome.sources.pop(key, None)
            outcome.values[key] = value
        return outcome

    def _by_its_row(self, path: str, value: Any) -> None:
        """Copy a key that is the same here, or report what the table says of it."""
        row = self.table.of(path.partition("#")[0])
        if row is None:
            self._unknown(path)
        elif row.becomes == "same":
            self._take(path, row.to, value)
        elif value is None and not self.theirs.tool.strict:
            self.ignored(path, NULL)
        elif row.becomes == "translate":
            self.changed(path, f"left out: {row.say}" if row.say else "left out")
        elif row.becomes == "ignore":
            self.ignored(path, row.say)
        elif any(type(one) is type(value) and one == value for one in row.but):
            self.ignored(path, NOTHING)
        elif row.unless and row.unless in self.given:
            self.changed(path, in_place(row.unless))
        else:
            self.wrong(path, row.say)

    def _unknown(self, path: str) -> None:
        """Report a key that the tool's table lacks."""
        key, above = path.partition("#")[0], path
        while above := above.rpartition(".")[0]:
            holds = any(row.startswith(f"{above}.") for row in self.table.rows)
            if above in self.table.rows and not holds:
                what = f"is in a block, and `{above}` takes one value"
                self.refuse(path, what, f"write {above}: VALUE")
                return
        if not self.theirs.tool.strict:
            if self.theirs.values[path].value is None:
                self.ignored(path, NULL)
            else:
                self.changed(path, "not taken: nothing here is known to mean the same")
            return
        block = key.rpartition(".")[0]
        inside = f"the block `{block}`" if block else "the top"
        what = f"is no key of {inside} that {self.theirs.tool.title} documents"
        self.refuse(path, what, "leave it out")

    def _take(self, path: str, ours: str, value: Any) -> None:
        if value is None:
            self.ignored(path, "is null: the default stands")
        elif ours in self.outcome.values:
            if self.outcome.values.get(ours) != value:
                self.changed(path, f"here `{ours}: {short(self.outcome.values.get(ours))}`")
        else:
            self.outcome.values[ours] = value
            self.outcome.sources[ours] = self.theirs.values[path].where, shown(path)


def in_place(ours: str) -> str:
    """Return the remark on their key when the command line sets our key instead."""
    return f"`{ours}` of the command line is used instead"


def is_whole(value: Any) -> TypeGuard[int]:
    """Tell whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(key: str) -> str:
    """Return a key as in its file, without the internal block of accelerate's keys."""
    return key.removeprefix(f"{ACCELERATE}.")


def short(value: Any) -> str:
    """Return a value as one line of YAML, cut off where it is long."""
    if value is None or isinstance(value, bool):
        return as_written(value)
    if isinstance(value, list | dict):
        try:
            value = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
        except (yaml.YAMLError, RecursionError):
            value = type(value).__name__
    text = str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


WEIGHTS = ("refused", "changed", "ignored")


@dataclass(frozen=True)
class Remark:
    """What became of one of their keys."""

    weight: str
    """One of WEIGHTS, by which remarks are grouped."""
    where: str
    key: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        if self.remedy:
            return str(Problem(self.where, self.key, self.what, self.remedy))
        return str(Problem(self.where, self.key, self.what, "")).removesuffix("; ")


@dataclass
class Outcome:
    """The recipe's values so far, by key path, and the remarks."""

    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    """The comment on our key: the keys of theirs that it comes from."""
    sources: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The place and name of their key that our key comes from."""
    remarks: list[Remark] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Whether something was refused, so that there is no recipe."""
        return any(remark.weight == WEIGHTS[0] for remark in self.remarks)

    def lines(self) -> list[str]:
        """Return a line for each remark, under a heading for each weight, the heaviest first."""
        found = []
        for weight in WEIGHTS:
            some = [remark for remark in self.remarks if remark.weight == weight]
            if some:
                found.append(f"{weight}: {len(some)} key{'s' * (len(some) > 1)}")
                found += [f"  {remark}" for remark in some]
        return found

    def theirs(self, problem: Problem) -> Problem:
        """Return a problem of the recipe as a problem of their key that the value comes from."""
        key = problem.key
        while key and key not in self.sources:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        if not key:
            return problem
        where, name = self.sources[key]
        return Problem(where, name, f"as `{problem.key}`: {problem.what}", problem.remedy)

    def recipe(self, source: Path) -> str:
        """Return the recipe as YAML, with a comment after each translated value."""
        tree: dict[str, Any] = {name: {} for name in Recipe.model_fields}
        for path, value in self.values.items():
            *above, key = path.split(".")
            block = tree
            for name in above:
                block = block.setdefault(name, {})
            block[key] = value
        tree = {name: value for name, value in tree.items() if value != {}}
        text = written(tree, width=math.inf)
        found, _ = parse(text, str)
        lines = text.splitlines()
        for key, where in places(found) if found else ():
            if key in self.comments:
                at = int(where) - 1
                comment = self.comments[key]
                said = "".join(c if c.isprintable() else repr(c)[1:-1] for c in comment)
                lines[at] = f"{lines[at]}  # {said}"
        return "\n".join([f"# Converted from {source.name}.", *lines, ""])
