"""Parsing of argv into one command; nothing below this module reads argv or the environment.
Library versions are checked before a command is imported: an unsupported transformers would fail
with errors that do not name the cause."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from uspft.called import to_type
from uspft.config import InputError
from uspft.config.loading import SHIPPED
from uspft.config.messages import closest
from uspft.config.problems import UsageError

if TYPE_CHECKING:
    from uspft.launcher.meeting import Meeting
    from uspft.launcher.supervise import Loss

VERBS = (
    "train",
    "check",
    "plan",
    "preprocess",
    "inspect",
    "verify",
    "export",
    "chat",
    "report",
    "calibrate",
    "recipes",
    "convert",
)
OF_OUTPUT = ("export", "chat", "report")
"""The verbs whose target is a run's output folder or checkpoint, not a recipe."""
USAGE = """usage: {0} [train] RECIPE.yaml [key.path=value ...]
       {0} check RECIPE.yaml [--ranks N] [key.path=value ...]
       {0} check OUTPUT_OR_CHECKPOINT
       {0} plan RECIPE.yaml [--ranks N] [--hardware NAME_OR_FILE] [--json] [--top N]
            [--only WAYS] [--take N] [-o FILE] [--timeline FILE] [key.path=value ...]
       {0} preprocess RECIPE.yaml [--ranks N] [--clean] [key.path=value ...]
       {0} inspect RECIPE.yaml [--ranks N] [--rows N] [--html FILE] [key.path=value ...]
       {0} verify RECIPE.yaml [--steps N] [--inject FAULT] [--all] [key.path=value ...]
       {0} export OUTPUT_OR_CHECKPOINT [to=FOLDER] [base=PLACE]
       {0} chat OUTPUT [system=TEXT] [max_new_tokens=N] [base=PLACE]
       {0} report OUTPUT [OUTPUT ...] [-o FILE] [--live [--port N]]
       {0} calibrate RECIPE.yaml [to=FILE] [key.path=value ...]
       {0} recipes [NAME [FILE]]
       {0} convert THEIRS.yaml [ACCELERATE.yaml] [-o FILE] [--force] [--ranks N] [--from TOOL]
            [key.path=value ...]
train, verify and calibrate run on the hosts of --hostfile FILE"""
"""The usage message, with a placeholder for how uspft is started."""


def usage(words: Sequence[str], program: str) -> str:
    """Return the usage message; of a verb's words, what the verb takes, with its options."""
    lines = USAGE.format(program).splitlines()
    if not words or words[0] not in VERBS:
        return "\n".join(lines)
    verb = words[0]
    start, own, inside = " " * len("usage: "), list[str](), False
    for line in lines[:-1]:
        if not line.startswith(start + " "):  # it does not continue the line before
            inside = f" {verb} " in f"{line} " or f" [{verb}] " in line
        if inside:
            own.append(line)
    own[0] = own[0].replace(start, "usage: ", 1)
    names = [*options_of(verb), *re.findall(r"\[(\w+=)[A-Z]", " ".join(own))]
    width = max(map(len, names), default=0) + 1
    told = [f"  {name:<{width}} {MEANING.get(f'{verb} {name}') or MEANING[name]}" for name in names]
    if any("key.path=value" in line for line in own):
        told.append("key.path=value sets a key of the recipe; docs/keys.md has all of them")
    return "\n".join([*own, *told])


def starts_ranks(given: Sequence[str]) -> bool:
    """Tell whether the command starts ranks on every host."""
    return given[0] not in VERBS or given[0] in ("train", "verify", "calibrate")


def options_of(verb: str) -> list[str]:
    """Return the options that a verb takes."""
    return [*OPTIONS.get(verb, ()), *([HOSTFILE] if starts_ranks([verb]) else [])]


def without_hostfile(given: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return the file of `--hostfile FILE` and the other words. Raises UsageError."""
    words = list(given)
    at = next((n for n, word in enumerate(words) if word.split("=")[0] == HOSTFILE), None)
    if at is None:
        return None, words
    name = words.pop(at).partition("=")[2]
    if not name and at < len(words):
        name = words.pop(at)
    if not name:
        raise UsageError(HOSTFILE, "names no file", f"write {HOSTFILE} FILE")
    if not words or not starts_ranks(words):
        what = f"{words[0] if words else 'the command'} starts nothing on hosts"
        raise UsageError(HOSTFILE, what, "leave it out")
    return Path(name), words


def command_of(
    given: Sequence[str], meeting: Meeting, losses: Sequence[Loss] = ()
) -> Callable[[], int]:
    """Return the command that the words ask for, ready to run: the function named after the verb,
    in the file of that name.

    losses: how earlier starts of the run were lost. Raises InputError.
    """
    words = list(given)
    verb = words.pop(0) if words[0] in VERBS else "train"
    if verb == "recipes":
        from uspft.commands.recipes import recipes

        return lambda: recipes(words, os.environ)
    target, overrides, options = _arguments(verb, words)
    if verb == "convert":
        from uspft.commands.convert import convert

        return partial(convert, target, overrides, to_type(os.environ), **options)
    from uspft.prepare.host import Invocation

    require_versions()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uspft"
    command, ranks = to_type(os.environ, verb, *words), options.pop("ranks", None)
    place = Invocation(command, dict(os.environ), cache, ranks, meeting, tuple(losses))
    if verb in ("check", "plan", "report"):
        # importing torch._dynamo creates its cache folder, also in commands that compile nothing
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    if verb == "plan":
        from uspft.commands.plan import PlanAsked

        options = {"asked": PlanAsked(**options)}
    run = getattr(import_module(f"uspft.commands.{verb}"), verb)
    return partial(run, target, overrides, place, **options)


OPTIONS: Mapping[str, Mapping[str, str]] = {
    "check": {"--ranks": "ranks"},
    "plan": {
        **{"--ranks": "ranks", "--hardware": "hardware", "--json": "as_json", "--top": "top"},
        **{"--only": "only", "--take": "take", "-o": "file", "--timeline": "picture"},
    },
    "preprocess": {"--ranks": "ranks", "--clean": "clean"},
    "inspect": {"--ranks": "ranks", "--rows": "rows", "--html": "page"},
    "report": {"-o": "file", "--live": "live", "--port": "port"},
    "verify": {"--steps": "steps", "--inject": "inject", "--all": "every"},
    "convert": {"-o": "to", "--force": "force", "--ranks": "ranks", "--from": "tool"},
}
"""The options of each verb, each with the parameter of the verb's function that it sets."""
MEANING: Mapping[str, str] = {
    "--ranks": "for N processes in place of those of this machine",
    "--hardware": "times of a cluster: a name in configs/hardware, or a file that calibrate wrote",
    "--json": "as data",
    "--top": "the first N layouts",
    "--only": "layouts that split a step in these ways alone, such as tensor,ring",
    "--take": "write the Nth layout as a recipe, with -o FILE, or draw it, with --timeline FILE",
    "plan -o": "where --take writes the recipe",
    "--timeline": "draw the steps of a pipeline, as SVG",
    "--clean": "delete the cache of prepared data",
    "--rows": "the first N rows",
    "--html": "write a page in place of text",
    "report -o": "the page; with one folder its report.html if left out",
    "--live": "serve the page, made anew for each request, until Ctrl-C",
    "--port": "where --live serves it",
    "--steps": "compare N steps",
    "--inject": "break order, mask, scale or label, which every layout must show",
    "--all": "all legal layouts, and not the first of them",
    "convert -o": "the recipe to write, THEIRS-uspft.yaml if left out",
    "--force": "write over a file",
    "convert --ranks": "how many devices the configuration runs on",
    "--from": "whose configuration it is, where its keys do not tell",
    "--hostfile": "start it on the hosts of a file in DeepSpeed's format, by ssh",
    "export to=": "write the model alone, to this new folder",
    "base=": "where the base model is now, a folder or hub id",
    "system=": "the system message of each conversation",
    "max_new_tokens=": "most tokens of an answer",
    "calibrate to=": "the hardware file, OUTPUT/hardware.yaml if left out",
}
"""What each option or setting does, by its name, or by verb and name where verbs differ."""
FLAGS = ("--all", "--clean", "--json", "--force", "--live")
FILES = ("-o", "--html", "--timeline")
COUNTS = ("--ranks", "--top", "--take", "--rows", "--port", "--steps")
HOSTFILE = "--hostfile"
INSTEAD = {
    "--ranks": "launch.processes=N",
    "--steps": "training.steps=N",
    "--hardware": "launch.hardware=NAME",
}
"""What to write in place of an option for a verb that does not have it."""


def _arguments(verb: str, words: list[str]) -> tuple[Path, list[str], dict[str, Any]]:
    """Split the words after the verb into target, overrides and options (keyed by the parameter of
    the verb's function). Raises UsageError."""
    rest: list[str] = []
    options: dict[str, str] = {}
    waiting = iter(words)
    for word in waiting:
        name, _, value = word.partition("=")
        if name in OPTIONS.get(verb, ()):
            options[name] = value if value or name in FLAGS else next(waiting, "")
        elif name in INSTEAD:
            raise UsageError(word, f"{verb} takes no such option", f"write {INSTEAD[name]}")
        elif word.startswith("-"):
            takes = ", ".join(options_of(verb)) or "none"
            remedy = f"{verb} takes {takes}; {to_type(os.environ, verb, '--help')} says more"
            raise UsageError(word, "unknown option", remedy)
        else:
            rest.append(word)
    wanted = "OUTPUT" if verb in OF_OUTPUT else "RECIPE.yaml"
    wanted = "THEIRS.yaml" if verb == "convert" else wanted
    if not rest:
        raise UsageError(verb, "needs a target", f"write {to_type(os.environ, verb, wanted)}")
    if "=" in rest[0] and not os.path.exists(rest[0]):
        remedy = f"write {to_type(os.environ, verb, wanted, rest[0])}"
        raise UsageError(rest[0], "comes before the target", remedy)
    named = os.path.exists(rest[0]) or (SHIPPED / f"{rest[0]}.yaml").is_file()
    if verb not in OF_OUTPUT and re.fullmatch(r"\w+", rest[0]) and not named:
        near = closest(rest[0], VERBS)
        remedy = f"did you mean `{near}`?" if near else f"verbs are {', '.join(VERBS)}"
        raise UsageError(rest[0], "is neither a verb nor a recipe", remedy)
    read = {OPTIONS[verb][name]: _value(name, value) for name, value in options.items()}
    return Path(rest[0]), rest[1:], read


def _value(name: str, value: str) -> Any:
    """Return an option's value, parsed. Raises UsageError where it is not valid."""
    if name in FILES:
        if not value:
            raise UsageError(name, "names no file", f"write {name} FILE")
        return Path(value)
    if name in COUNTS:
        if not (value.isascii() and value.isdigit() and int(value)):
            raise UsageError(name, f"`{value}` is no whole number above 0", f"write {name} 8")
        return int(value)
    if name == "--only":
        return tuple(word for word in value.split(",") if word)
    return True if name in FLAGS else value


PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def require_versions(
    wanted: Callable[[str], list[str] | None] = requires, installed: Callable[[str], str] = version
) -> None:
    """Check that every dependency is installed in a version that pyproject.toml allows.

    wanted: returns a package's requirements; if uspft is not installed as a package, they come from
    pyproject.toml. installed: returns a package's version. Raises InputError with a line for each
    dependency that is missing or outside its range.
    """
    problems = []
    try:
        stated = wanted("uspft") or []
    except PackageNotFoundError:
        text = PROJECT.read_text() if PROJECT.exists() else "project.dependencies = []"
        stated = tomllib.loads(text)["project"]["dependencies"]
    for requirement in map(Requirement, stated):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = installed(requirement.name)
        except PackageNotFoundError:
            what = "is not installed"
        else:
            if found in requirement.specifier:
                continue
            what = f"is {found}, and uspft is written for {requirement.specifier}"
        remedy = f"{sys.executable} -m pip install '{requirement}'"
        problems.append(f"{requirement.name}: {what}; {remedy}")
    if problems:
        raise InputError("\n".join(problems))
