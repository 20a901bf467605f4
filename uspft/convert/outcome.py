"""What a conversion gives: a recipe with comments, and a line for each key not taken as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from uspft.config.problems import Problem
from uspft.config.recipe import Recipe
from uspft.config.yaml.document import parse, places

WEIGHTS = ("refused", "changed", "ignored")


@dataclass(frozen=True)
class Remark:
    """What became of one key of theirs."""

    weight: str
    """One of WEIGHTS."""
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
    """The recipe's keys so far, by their paths, and the remarks."""

    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    """What of theirs a key of ours is from."""
    sources: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Of a key of ours, the place and the key of theirs that it is from."""
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
        """Return a problem of the recipe as one of the key of theirs that the value is from."""
        key = problem.key
        while key and key not in self.sources:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        if not key:
            return problem
        where, name = self.sources[key]
        return Problem(where, name, f"as `{problem.key}`: {problem.what}", problem.remedy)

    def recipe(self, source: Path) -> str:
        """Return the recipe as YAML, with a comment behind each value that was translated."""
        tree: dict[str, Any] = {name: {} for name in Recipe.model_fields}
        for path, value in self.values.items():
            *above, key = path.split(".")
            block = tree
            for name in above:
                block = block.setdefault(name, {})
            block[key] = value
        tree = {name: value for name, value in tree.items() if value != {}}
        text = yaml.dump(
            tree, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=float("inf")
        )
        found, _ = parse(text, str)
        lines = text.splitlines()
        for key, where in places(found) if found else ():
            if key in self.comments:
                at = int(where) - 1
                comment = self.comments[key]
                said = "".join(c if c.isprintable() else repr(c)[1:-1] for c in comment)
                lines[at] = f"{lines[at]}  # {said}"
        return "\n".join([f"# Converted from {source.name}.", *lines, ""])


class _Plain(yaml.SafeDumper):
    """A dumper that writes lists of plain values, and no mappings, in one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _in_a_line(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, dict) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flat)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    """Return a text that stands in one line, so that a comment may follow it."""
    style = None if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Plain.add_representer(list, _in_a_line)
_Plain.add_representer(str, _text)
