"""The command `convert`: it converts another tool's configuration into a recipe, key by key."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uspft.config import InputError, RecipeError, load
from uspft.config.document import bare
from uspft.config.loading import assigned
from uspft.config.problems import Problem, UsageError, writing
from uspft.config.recipe import Recipe
from uspft.convert import CONVERTERS, Outcome, convert_theirs, read_theirs


def convert(
    target: Path,
    words: Sequence[str],
    program: str,
    *,
    to: Path | None = None,
    ranks: int | None = None,
    tool: str | None = None,
    force: bool = False,
) -> int:
    """Write the recipe for another tool's configuration; return the exit code.

    words: overrides as key.path=value, and accelerate's configuration files. to: the recipe file;
    None: in the working directory, named after the configuration. tool: whose configuration it is;
    None: guessed from its keys. program: how uspft was started. force: whether to replace an
    existing file. Prints a line for each key that is not taken over unchanged. Raises InputError
    where a file cannot be read or written, and where the result is not a valid recipe.
    """
    to = to or Path(f"{target.stem}-uspft.yaml")
    if to.exists() and not force:
        what = "is there already, and nothing is overwritten"
        raise UsageError(str(to), what, "name another with -o, or add --force")
    if tool is not None and tool not in CONVERTERS:
        what = f"`{tool}` is no tool whose configurations are read"
        raise UsageError("--from", what, f"write one of {', '.join(CONVERTERS)}")
    more = [Path(word) for word in words if "=" not in word]
    given: dict[str, Any] = {}
    wrong: list[Problem] = []
    for word in (word for word in words if "=" in word):
        key, tree, problems = assigned(word)
        wrong += problems
        given |= {key: bare(tree)} if tree else {}
    if wrong:
        raise RecipeError(wrong)
    for key in given:
        if key.partition(".")[0] not in Recipe.model_fields:
            raise UsageError(key, "is no key of a recipe", f"change it in {target}")
    outcome = convert_theirs(read_theirs(target, tool, *more), given, ranks)
    print("\n".join(outcome.lines()))
    if outcome.refused:
        how = f"change {target}, or write keys of a recipe behind it, such as data.train=FILE"
        print(f"not written: to settle what is refused, {how}")
        return 2
    text = outcome.recipe(target)
    _require_recipe(outcome, text, to)
    with writing(str(to), "name another with -o"):
        to.write_text(text, encoding="utf-8")
    print(f"written: {to}\nnext: {program} check {shlex.quote(str(to))}")
    return 0


def _require_recipe(outcome: Outcome, text: str, to: Path) -> None:
    """Raise RecipeError where the text is not a valid recipe, with the places in the other tool's
    files that caused the problems."""
    with tempfile.TemporaryDirectory(prefix="uspft-") as folder:
        aside = Path(folder) / "recipe.yaml"
        aside.write_text(text, encoding="utf-8")
        try:
            load(aside)
        except RecipeError as error:
            problems = [outcome.theirs(problem) for problem in error.problems]
            said = str(RecipeError(problems)).replace(str(aside), str(to))
            raise InputError(said) from error
