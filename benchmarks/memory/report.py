"""The figures of what was counted, and of the longest rows that follow."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import as_tokens, markdown, span

CASES = ["131072-1", "524288-1", "1048576-8", "4194304-8"]
CASES += ["1048576-32", "4194304-32", "16777216-32"]
"""Tokens of a row, and the ranks that share it. The peaks of the second case of each number of
ranks are compared; between the last two the longest row grows as a line."""
RANKS = (1, 8, 32)
PLAIN, ALST, ALST_OFFLOADED = "transformers", "ALST", "ALST, offloaded"
OURS, OURS_OFFLOADED = "uspft, attention, tiles", "uspft, attention, tiles, offloaded"
GROUPS = f"{OURS_OFFLOADED}, `attention_heads: 1`"
GROUPS_RING, GROUPS_EXCHANGE = (
    f"{OURS_OFFLOADED}, `attention_heads: 4`, `{name}` alone" for name in ("ring_cp", "planned_cp")
)
OFFLOADED = (ALST_OFFLOADED, OURS_OFFLOADED, GROUPS, GROUPS_RING, GROUPS_EXCHANGE)
PUBLISHED = {
    "ALST ([arXiv 2506.13996](https://arxiv.org/abs/2506.13996))": (
        "500K",
        "3.7M",
        "15M",
    ),
    "UPipe ([arXiv 2602.21196](https://arxiv.org/abs/2602.21196))": ("–", "5M", "–"),
}
"""The longest rows of Llama 3 8B that authors report for 1, 8 and 32 H100, in millions of tokens
where they write M."""
CARD_BYTES = 0.92 * 80e9
"""What tensors can fill of a card of 80 GB, as `check` takes it."""
TIMED, REAL = "timed", "real"
"""Where the JSON keeps the steps that were timed, and what real runs have alive."""
GROUPS_UNDER, ALL_HEADS = "groups under ", "all heads"
"""Before an algorithm, where it keeps the steps that were timed with groups of heads, and who took
turns with them."""
SAID = "real", "fake", "predicted"

Case = Mapping[str, Mapping[str, Any]]


def figures(found: Mapping[str, Case]) -> dict[str, str]:
    """Return what pages show of what there is, by name, as Markdown: what a rank needs, and what
    of it layers keep; the longest rows beside ALST's; what real runs have, and their seconds."""
    made: dict[str, str] = {}
    if set(CASES) <= set(found):
        made = {"peaks": peaks(found), "longest": longest(found), "beside": beside(found)}
        made |= {"layer": layer(found), "predicted": predicted(found)}
        made |= {"published": published(found)}
    if REAL in found:
        made["real"] = real_table(found[REAL])
    if TIMED in found:
        made["timed"] = timed_table(found[TIMED])
    grouped = [part for part in found if part.startswith(GROUPS_UNDER)]
    for part in grouped:
        made[part] = timed_table(found[part])
    measured = [found[part] for part in (REAL, TIMED, *grouped) if part in found]
    return {**made, "measured": measured_on(measured)} if measured else made


def peaks(found: Mapping[str, Case]) -> str:
    """This tells the GiB of a rank, activations and state, by contender and case."""
    names = [PLAIN, *found[CASES[2]]]
    rows = [
        [name, *(_of_a_rank(found[case][name]) if name in found[case] else "–" for case in CASES)]
        for name in names
    ]
    heads = [f"{as_tokens(tokens)} on {ranks}" for tokens, ranks in map(_parts, CASES)]
    return markdown(["GiB: activations + state", *heads], rows)


def _of_a_rank(one: Mapping[str, Any]) -> str:
    return f"{one['peak_bytes'] / 2**30:.1f} + {one['state_bytes'] / 2**30:.1f}"


def layer(found: Mapping[str, Case]) -> str:
    """This tells what a layer keeps and what is at work beside that, in a layer's inputs, of the
    longest row on the devices of a host."""
    case = _cases(8)[-1]
    rows = []
    for name, one in found[case].items():
        unit = one["layer_input_bytes"]
        cells = one["kept_bytes"] / unit, one["host_bytes"] / unit
        rows.append([name, *(f"{cell:.2f} u" for cell in cells), f"{at_work(one):.1f} u"])
    title = f"{as_tokens(_parts(case)[0])} on {_parts(case)[1]} ranks"
    return markdown([title, "a layer keeps", "on the host", "at work"], rows)


def at_work(one: Mapping[str, Any]) -> float:
    """Return the most beside what layers keep, in a layer's inputs."""
    beside = one["peak_bytes"] - one["layers"] * one["kept_bytes"]
    return float(beside / one["layer_input_bytes"])


def predicted(found: Mapping[str, Case]) -> str:
    """This tells how far the formula of `check` is from what was counted."""
    errors = [
        abs(one["predicted_bytes"] / one["peak_bytes"] - 1)
        for case in CASES
        for one in found[case].values()
        if "predicted_bytes" in one
    ]
    return (
        "The formula by which `check` predicts activations is at most "
        f"{100 * max(errors):.2g} % from the count, in {len(errors)} cases."
    )


def longest(found: Mapping[str, Case]) -> str:
    """This sets the longest rows that fit a card, and the peaks, beside ALST's."""
    rows = []
    grouped = ("and heads one at a time", ALST_OFFLOADED, GROUPS)
    for ranks, title, theirs, mine in _pairs(*SAME_OPTIONS, grouped):
        tokens = [longest_row(found, name, ranks) for name in (theirs, mine)]
        second = found[_cases(ranks)[1]]
        peak = [second[name]["peak_bytes"] + second[name]["state_bytes"] for name in (theirs, mine)]
        cells = [str(ranks), *map(as_tokens, tokens)]
        rows.append([title, *cells, f"{tokens[1] / tokens[0]:.2f}", f"{peak[1] / peak[0]:.2f}"])
    heads = ["", "ranks", "ALST", "uspft", "times", "peak at 512k and 4m, of ALST's"]
    return markdown(heads, rows)


def beside(found: Mapping[str, Case]) -> str:
    """This tells in a sentence how much longer rows are than ALST's."""
    times: dict[str, list[float]] = {}
    for ranks, title, theirs, mine in _pairs(*SAME_OPTIONS):
        both = longest_row(found, mine, ranks), longest_row(found, theirs, ranks)
        times.setdefault(title, []).append(both[0] / both[1])
    said = [f"{span(each)} times as long {title}" for title, each in times.items()]
    return (
        "Beside ALST's pieces with the same options, on 1, 8 and 32 cards of 80 GB, the longest "
        f"rows of Llama-3.1-8B are counted to be {' and '.join(said)}."
    )


def published(found: Mapping[str, Case]) -> str:
    """This sets the longest rows that others have published beside those that are counted here."""
    rows = [[f"{name}, measured", *lengths] for name, lengths in PUBLISHED.items()]
    for name in (ALST_OFFLOADED, OURS_OFFLOADED, GROUPS, GROUPS_RING, GROUPS_EXCHANGE):
        cells = []
        for ranks in RANKS:
            there = name in found[_cases(ranks)[-1]]
            cells.append(as_tokens(longest_row(found, name, ranks)) if there else "–")
        rows.append([f"{name}, counted", *cells])
    return markdown(["longest row", *(f"{ranks} H100" for ranks in RANKS)], rows)


SAME_OPTIONS = (
    ("with all on the devices", ALST, OURS),
    ("with layers' inputs offloaded", ALST_OFFLOADED, OURS_OFFLOADED),
)
"""ALST's and ours with the same options, each pair with its title."""


def _pairs(*ways: tuple[str, str, str]) -> list[tuple[int, str, str, str]]:
    """Return pairs of ALST's and ours by ranks."""
    return [(ranks, *way) for ranks in RANKS for way in ways]


def real_table(found: Mapping[str, Any]) -> str:
    """This sets what real runs have alive, in MiB, beside fake ones and the formula."""
    heads = ["2 ranks, hidden {}".format(found["sizes"]["hidden_size"])]
    heads += [f"{as_tokens(int(tokens))} {what}" for tokens in found["counted"] for what in SAID]
    every = list(found["counted"].values())
    return markdown(
        heads,
        [
            [name, *(_mib(one[name].get(f"{what}_bytes")) for one in every for what in SAID)]
            for name in every[0]
        ],
    )


def _mib(count: float | None) -> str:
    return f"{count / 2**20:.3f}" if count else "–"


def timed_table(found: Mapping[str, Any]) -> str:
    """This sets the steps that were timed beside ALST's, or those in groups beside all heads'."""
    setting, measured = found["setting"], found["measured"]
    seconds = {name: median(each) for name, each in measured.items()}
    first = ALST if ALST in measured else ALL_HEADS
    rows = [
        [name, f"{seconds[name]:.2f}", f"{seconds[name] / seconds[first]:.3f}", span(each)]
        for name, each in measured.items()
    ]
    whose = f"{first}'" if first.endswith("s") else f"{first}'s"
    title = f"{as_tokens(setting['tokens'])}, 2 ranks, hidden {setting['hidden']}"
    return markdown([title, "s a step", f"of {whose}", "least and most s"], rows)


def longest_row(found: Mapping[str, Case], contender: str, ranks: int) -> int:
    """Return the longest row in tokens that fits a card, on the line through its last
    two cases."""
    (short, low), (long, high) = (
        (int(case.split("-")[0]), found[case][contender]) for case in _cases(ranks)[-2:]
    )
    slope = (high["peak_bytes"] - low["peak_bytes"]) / (long - short)
    return int(long + (CARD_BYTES - high["state_bytes"] - high["peak_bytes"]) / slope)


def _parts(case: str) -> tuple[int, int]:
    """Return a case's tokens and ranks."""
    tokens, ranks = map(int, case.split("-"))
    return tokens, ranks


def _cases(ranks: int) -> list[str]:
    return [case for case in CASES if case.endswith(f"-{ranks}")]
