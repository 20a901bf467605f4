"""The command line of the attention benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.attention.documents import MIXES
from benchmarks.attention.engines import ENGINES
from benchmarks.attention.setting import Setting
from benchmarks.lab.results import RESULTS


def options_of(words: list[str]) -> argparse.Namespace:
    """This reads the command line; argparse leaves the program where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description="One attention layer, forward and backward, beside other engines.",
        epilog="Engines: " + ", ".join(ENGINES),
    )
    add = parser.add_argument
    add("--processes", type=int, choices=(2, 4), help="default: 2, with --hosts 4")
    add("--hosts", type=int, metavar="MBIT", help="2 hosts × 2 processes, links of MBIT/s; root")
    add("--tokens", type=int, default=8192, help="in the row; default: 8192")
    add("--heads", type=_heads, default=(8, 2), metavar="Q/KV", help="default: 8/2")
    mixes = f"{', '.join(MIXES)}; several with commas; default: one"
    add("--documents", type=_mixes, default=("one",), metavar="MIX", help=mixes)
    add("--rounds", type=int, default=5, help="after a counted one; default: 5")
    add("--engines", type=_engines, default=tuple(ENGINES), metavar="A,B", help="default: all")
    add("--out", type=Path, default=RESULTS, help="folder of results; default: benchmarks/results")
    add("--show", action="store_true", help="measure nothing: print what --out has of these cases")
    add("--picture", type=Path, metavar="PNG", help="draw the case, the last of several, there")
    options = parser.parse_args(words)
    if options.hosts is not None and options.processes == 2:
        parser.error("--hosts has 2 processes on each of 2 hosts: --processes 4, or none")
    if options.rounds < 1 or (options.hosts is not None and options.hosts < 1):
        parser.error("--rounds and --hosts are at least 1")
    if options.tokens < 256 or options.tokens % 128:
        parser.error("--tokens is a multiple of 128, at least 256")
    options.processes = options.processes or (2 if options.hosts is None else 4)
    return options


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """This returns the cases that a command line asks for, one for each mix."""
    return [
        Setting(
            processes=options.processes,
            host_mbit=options.hosts,
            tokens=options.tokens,
            query_heads=options.heads[0],
            kv_heads=options.heads[1],
            documents=mix,
            rounds=options.rounds,
            engines=options.engines,
        )
        for mix in options.documents
    ]


def _heads(word: str) -> tuple[int, int]:
    query, _, kv = word.partition("/")
    found = int(query), int(kv or query)
    if min(found) < 1 or found[0] % found[1]:
        raise argparse.ArgumentTypeError(f"{word}: query heads are a multiple of KV heads")
    return found


def _mixes(words: str) -> tuple[str, ...]:
    return _known(words, tuple(MIXES))


def _engines(words: str) -> tuple[str, ...]:
    return _known(words, tuple(ENGINES))


def _known(words: str, known: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(words.split(","))
    for word in found:
        if word not in known:
            raise argparse.ArgumentTypeError(f"{word} is none of {', '.join(known)}")
    return found
