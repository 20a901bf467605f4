"""Reading one YAML document as a tree in which every key knows its line, and writing one. Unquoted
scalars follow YAML 1.2's core schema, except that 1_000 is a number and octal and hexadecimal
numbers are strings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from uspft.config.problems import Problem, join

Scalar = str | int | float | bool | None

_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_REAL = re.compile(r"[-+]?((0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
SUFFIXED = "^[0-9]+[kKmM]$"
"""The pattern of a token count with a suffix that `token_count` reads, such as 128k."""
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)
_LONGEST = 40  # in characters: Python's int() refuses thousands of digits


def plain(text: str) -> Scalar:
    """Return the value of an unquoted scalar: a finite number, true, false, null, or a string."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST:
        return text
    if _WHOLE.fullmatch(text):
        return int(text)
    if _REAL.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def token_count(text: str) -> int | None:
    """Return the number of tokens in `128k` (131072) or `1m` (2^20); None without such a suffix."""
    if len(text) > _LONGEST or not re.fullmatch(SUFFIXED, text):
        return None
    return int(text[:-1]) << {"k": 10, "m": 20}[text[-1].lower()]


def meant(text: str) -> str | None:
    """Return what to write instead of a string that was surely meant as another value, or None.

    For a suffix both readings are shown, because k is 1000 in some tools and 1024 in others.
    """
    lower = text.lower()
    if text == "None":
        return "write null"
    if lower in ("yes", "on", "no", "off"):
        return f"write {'true' if lower in ('yes', 'on') else 'false'}"
    binary = token_count(text)
    if binary is not None:
        decimal = int(text[:-1]) * {"k": 1000, "m": 1000**2}[lower[-1]]
        return f"write {decimal} or {binary}"
    if _LEADING_ZERO.fullmatch(text) and len(text) <= _LONGEST:
        return f"write {int(text)}"
    if _NOT_FINITE.fullmatch(text):
        return "write a finite number"
    return None


MAX_NODES = 100_000  # after alias expansion; a real recipe has some hundred
MAX_DEPTH = 60

Where = Callable[[int], str]  # a function from a line number, counted from 1, to its `FILE:LINE`


@dataclass(frozen=True)
class Tree:
    """A YAML value with the place (`FILE:LINE`) of the key or list item that it belongs to."""

    value: Scalar | dict[str, Tree] | list[Tree]
    where: str


def bare(tree: Tree) -> Any:
    """Return the tree as dicts, lists and scalars."""
    if isinstance(tree.value, dict):
        return {key: bare(child) for key, child in tree.value.items()}
    if isinstance(tree.value, list):
        return [bare(child) for child in tree.value]
    return tree.value


def places(tree: Tree, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key path of the tree with its place."""
    yield at, tree.where
    if isinstance(tree.value, dict):
        for key, child in tree.value.items():
            yield from places(child, join(at, key))
    elif isinstance(tree.value, list):
        for index, child in enumerate(tree.value):
            yield from places(child, f"{at}[{index}]")


class Unreadable(Exception):
    """The error that a file cannot be read: what is wrong, the remedy, and the line and key if
    known."""

    def __init__(self, what: str, remedy: str, line: int | None = None, key: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy, self.line, self.key = what, remedy, line, key


def parse(text: str, place: Where, at: str = "") -> tuple[Tree | None, list[Problem]]:
    """Return the document in `text` and its problems; the tree is None if nothing can be read.

    place: maps a line number to its place. at: the key path of this document in the recipe. No
    object is ever constructed from a YAML tag.
    """
    reader = _Reader(place)
    try:
        node = _Loader(text).get_single_node()
        if node is None:
            raise Unreadable("is empty", "write a value" if at else "write a recipe")
        return reader.tree(node, at, place(node.start_mark.line + 1)), reader.problems
    except yaml.YAMLError as error:
        return None, [_broken(error, text, place, at)]
    except Unreadable as error:
        return None, [Problem(place(error.line or 1), error.key or at, error.what, error.remedy)]


def written(data: Any, width: float) -> str:
    """Return dicts, lists and scalars as YAML that `parse` reads back to equal ones.

    A list without mappings is written in flow style, [a, b], and text that spans lines as a quoted
    string with escapes. width: the characters after which a line is folded.
    """
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes each string that `plain` reads as another value; writes no alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def string(self, value: str) -> yaml.Node:
        style = None if value.isprintable() and isinstance(plain(value), str) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    def items(self, value: list[Any]) -> yaml.Node:
        flow = not any(isinstance(item, dict) for item in value)
        return self.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flow)


_Dumper.add_representer(str, _Dumper.string)
_Dumper.add_representer(list, _Dumper.items)


def _broken(error: yaml.YAMLError, text: str, place: Where, at: str) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line, what = error.problem_mark.line + 1, f"is not YAML: {error.problem}"
        if error.context == "expected a single document in the stream":
            what = "a second document starts here"
            return Problem(place(line), at, what, "keep one recipe a file")
    elif isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        what = f"is not YAML: {error.reason}"
    else:
        line, what = 1, f"is not YAML: {error}"
    return Problem(place(line), at, what, "check indentation; quote text that holds : # * & [ or {")


class _Loader(yaml.SafeLoader):
    """A YAML loader that keeps line numbers and leaves scalars as text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own class attribute)
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = super().peek_event()  # type: ignore[no-untyped-call]
        self._depth += 1
        _require_shallow(self._depth - 1, event.start_mark.line + 1 if event.start_mark else 1)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            node.tag = getattr(event, "tag", None) or ""
        return node


def _require_shallow(depth: int, line: int, key: str = "") -> None:
    """Raise Unreadable if a tree is nested so deep that recursion would overflow the stack."""
    if depth > MAX_DEPTH:
        raise Unreadable(f"is nested more than {MAX_DEPTH} levels deep", "flatten it", line, key)


class _Reader:
    """A converter from YAML nodes to a Tree that counts expanded aliases and collects problems."""

    def __init__(self, place: Where) -> None:
        self.problems: list[Problem] = []
        self._place = place
        self._count = 0
        self._open: list[int] = []

    def tree(self, node: yaml.Node, key: str, where: str) -> Tree:
        line = node.start_mark.line + 1
        self._count += 1
        if self._count > MAX_NODES:  # expanding them would take minutes
            what = f"aliases expand to more than {MAX_NODES} values"
            raise Unreadable(what, "write the values out, or use `base:`", line, key)
        if id(node) in self._open:
            raise Unreadable("an alias contains itself", "write the value out", line, key)
        _require_shallow(len(self._open), line, key)
        if node.tag:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._problem(node, key, f"has the tag `{tag}`, and tags are not read", "leave it out")
        if isinstance(node, yaml.ScalarNode):
            return Tree(plain(node.value) if node.style is None else node.value, where)
        self._open.append(id(node))
        value: Any
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node, key)
        else:
            value = [
                self.tree(item, f"{key}[{index}]", self._place(item.start_mark.line + 1))
                for index, item in enumerate(node.value)
            ]
        self._open.pop()
        return Tree(value, where)

    def _mapping(self, node: yaml.MappingNode, at: str) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        for key_node, value_node in node.value:
            if (name := self._key(key_node, at)) is None:
                continue
            key = join(at, name)
            if name in found:
                what = f"duplicate key, first at {found[name].where}"
                self._problem(key_node, key, what, "keep one of them")
            else:
                where = self._place(key_node.start_mark.line + 1)
                found[name] = self.tree(value_node, key, where)
        return found

    def _key(self, node: yaml.Node, at: str) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._problem(node, at, "a key here is a list or a mapping", "write a name as key")
            return None
        what = ""
        if node.style is None and not isinstance(plain(node.value), str):
            what, remedy = "the key is not a string", f'write "{node.value}": in quotes, or a name'
        elif node.style is None and node.value == "<<":
            what, remedy = "merge keys are not read", "write the values out, or use `base:`"
        if what:
            self._problem(node, join(at, node.value), what, remedy)
        return None if what else str(node.value)

    def _problem(self, node: yaml.Node, key: str, what: str, remedy: str) -> None:
        self.problems.append(Problem(self._place(node.start_mark.line + 1), key, what, remedy))
