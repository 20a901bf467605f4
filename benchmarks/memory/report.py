"""The tables of what was counted, and of the longest rows that follow."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

CASES = ["131072-1", "524288-1", "1048576-8", "4194304-8"]
CASES += ["1048576-32", "4194304-32", "16777216-32"]
"""Tokens of a row, and the ranks that share it. The peaks of the second case of each number of
ranks are compared; between the last two the longest row grows as a line."""
ALST, ALST_OFFLOADED = "ALST", "ALST, offloaded"
OURS, OURS_OFFLOADED = "uspft, attention, tiles", "uspft, attention, tiles, offloaded"
CARD_BYTES = 0.92 * 80e9
"""What tensors can fill of a card of 80 GB, as `check` takes it."""
HEAD = (
    "| {} | a layer keeps | on the host | at work | activations | predicted | state | a rank |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
)
BESIDE = (
    "| | ranks | ALST | uspft | times | peak at 512k and 4m, of ALST's |",
    "| --- | ---: | ---: | ---: | ---: | ---: |",
)

TIMED, REAL = "timed", "real"
"""Where the JSON keeps the steps that were timed, and what real runs have alive."""
SAID = "real", "fake", "predicted"

Case = Mapping[str, Mapping[str, Any]]


def tables(found: Mapping[str, Case]) -> list[str]:
    """Return a table for each case, and one of the longest rows beside ALST's."""
    made = [_table(case, found[case]) for case in CASES if case in found]
    if set(CASES) <= set(found):
        made.append(_longest(found))
    if REAL in found:
        made.append(real_table(found[REAL]))
    return [*made, timed_table(found[TIMED])] if TIMED in found else made


def real_table(found: Mapping[str, Any]) -> str:
    """Return the table of what real runs have alive beside fake ones and the formula."""
    heads = ["2 ranks, hidden {}".format(found["sizes"]["hidden_size"])]
    heads += [f"{_tokens(int(tokens))} {what}" for tokens in found["counted"] for what in SAID]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    every = list(found["counted"].values())
    for name in every[0]:
        cells = [_mib(one[name].get(f"{what}_bytes")) for one in every for what in SAID]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mib(count: float | None) -> str:
    return f"{count / 2**20:.3f}" if count else "–"


def timed_table(found: Mapping[str, Any]) -> str:
    """Return the table of the steps that were timed, and how far ours is from itself."""
    setting, measured = found["setting"], found["measured"]
    seconds = {name: median(each) for name, each in measured.items()}
    title = f"{_tokens(setting['tokens'])}, 2 ranks, hidden {setting['hidden']}"
    lines = [
        f"| {title} | s a step | of ALST's | least and most s |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, each in measured.items():
        cells = [f"{seconds[name]:.2f}", f"{seconds[name] / seconds[ALST]:.3f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {min(each):.2f} to {max(each):.2f} |")
    return "\n".join(lines)


def _table(name: str, case: Case) -> str:
    tokens, ranks = map(int, name.split("-"))
    title = f"{_tokens(tokens)}, {ranks} rank{'s' if ranks > 1 else ''}"
    lines = [HEAD[0].format(title), HEAD[1]]
    for contender, one in case.items():
        unit, peak, kept = one["layer_input_bytes"], one["peak_bytes"], one["kept_bytes"]
        predicted = one.get("predicted_bytes")
        cells = [
            f"{kept / unit:.2f} u",
            f"{one['host_bytes'] / unit:.2f} u",
            f"{(peak - one['layers'] * kept) / unit:.1f} u",
            _gib(peak),
            f"{100 * (predicted / peak - 1):+.2f} %" if predicted else "–",
            _gib(one["state_bytes"]),
            _gib(one["state_bytes"] + peak),
        ]
        lines.append(f"| {contender} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _longest(found: Mapping[str, Case]) -> str:
    lines = list(BESIDE)
    for ranks in sorted({int(case.split("-")[1]) for case in CASES}):
        for title, theirs, mine in (
            ("on the devices", ALST, OURS),
            ("offloaded", ALST_OFFLOADED, OURS_OFFLOADED),
        ):
            rows = [longest_row(found, name, ranks) for name in (theirs, mine)]
            both = found[_cases(ranks)[1]]
            peaks = [
                both[name]["peak_bytes"] + both[name]["state_bytes"] for name in (theirs, mine)
            ]
            cells = [str(ranks), *map(_tokens, rows)]
            cells += [f"{rows[1] / rows[0]:.2f}", f"{peaks[1] / peaks[0]:.2f}"]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def longest_row(found: Mapping[str, Case], contender: str, ranks: int) -> int:
    """Return the longest row in tokens that fits a card, on the line through its last
    two cases."""
    (short, low), (long, high) = (
        (int(case.split("-")[0]), found[case][contender]) for case in _cases(ranks)[-2:]
    )
    slope = (high["peak_bytes"] - low["peak_bytes"]) / (long - short)
    return int(long + (CARD_BYTES - high["state_bytes"] - high["peak_bytes"]) / slope)


def _cases(ranks: int) -> list[str]:
    return [case for case in CASES if case.endswith(f"-{ranks}")]


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def _tokens(count: int) -> str:
    return f"{count / 2**20:.3g}m" if count >= 1 << 20 else f"{count >> 10}k"
