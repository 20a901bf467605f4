"""argv and environment → one command. Nothing below reads either."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

VERBS = ("train", "check", "export")
LATER = ("plan", "inspect", "verify", "convert", "calibrate", "report")
USAGE = """usage: uspft [train] RECIPE.yaml [key.path=value ...]
       uspft check RECIPE.yaml [--ranks N] [key.path=value ...]
       uspft export OUTPUT_OR_CHECKPOINT [to=FOLDER]"""


class UsageError(ValueError):
    """The command line is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 failed, 2 wrong input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] == "rank":
        return _rank(words[1:])
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("stopped before the run had begun", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    from uspft.checkpoint.folder import CheckpointError
    from uspft.config import RecipeError
    from uspft.data import DataError

    def interrupted(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        return _command(words)
    except RecipeError as error:
        print(error, file=sys.stderr)
    except DataError as error:
        print("\n".join(error.lines), file=sys.stderr)
    except (UsageError, CheckpointError, ValueError) as error:
        print(error, file=sys.stderr)
    return 2


def _command(words: list[str]) -> int:
    verb = words.pop(0) if words[0] in VERBS + LATER else "train"
    if verb in LATER:
        raise UsageError(f"{verb} is not available yet")
    target, overrides, ranks = _arguments(verb, words)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uspft"
    from uspft.commands import Place

    command = shlex.join(["uspft", verb, *words])
    place = Place(command, dict(os.environ), cache, ranks)
    if verb == "check":
        from uspft.commands.check import check as run
    elif verb == "export":
        from uspft.commands.export import export as run
    else:
        from uspft.commands.train import train as run
    return run(target, overrides, place)


def _arguments(verb: str, words: list[str]) -> tuple[Path, list[str], int | None]:
    """(target, overrides, --ranks). Raises UsageError."""
    rest, ranks = [], None
    waiting = iter(words)
    for word in waiting:
        if word == "--ranks" or word.startswith("--ranks="):
            if verb != "check":
                raise UsageError(f"{verb} takes no --ranks; write launch.processes=N")
            value = word.partition("=")[2] or next(waiting, "")
            if not (value.isdigit() and int(value)):
                raise UsageError(f"--ranks {value}: must be a whole number from 1 on")
            ranks = int(value)
        elif word.startswith("-"):
            raise UsageError(f"{word}: unknown option\n{USAGE}")
        else:
            rest.append(word)
    if not rest or "=" in rest[0]:
        raise UsageError(f"{verb} needs a target before overrides\n{USAGE}")
    return Path(rest[0]), rest[1:], ranks


def _rank(words: Sequence[str]) -> int:
    """Be one rank; what goes wrong is left for the supervisor to print once."""
    from uspft.commands import Place
    from uspft.launcher import ERROR_FILE, report_exception

    try:
        from uspft.commands.rank import rank

        code = rank(Path(words[0]), Place("rank", dict(os.environ)))
    except BaseException as error:
        report_exception(os.environ[ERROR_FILE], int(os.environ["RANK"]), error)
        code = 1
        sys.stdout.flush()
        os._exit(code)  # other ranks may wait in a collective that this one will never join
    return code


if __name__ == "__main__":
    sys.exit(main())
