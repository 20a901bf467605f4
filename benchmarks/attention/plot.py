"""One picture of an attention result: time on the left, bytes on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.attention.report import MIB, summary
from benchmarks.lab.picture import blank

COLOURS = {"ours": "#1b6ca8", "peer": "#c9803a", "bound": "#8a8a8a"}


def draw(path: Path, title: str, records: list[dict[str, Any]]) -> None:
    """This draws bars for each timed engine, as PNG, where matplotlib is installed."""
    timed = [(record, summary(record)) for record in reversed(records) if record["rounds"]]
    figure = blank(11, 1.6 + 0.32 * len(timed))
    if figure is None:
        return
    names = [record["name"] for record, _ in timed]
    colours = [COLOURS[record["kind"]] for record, _ in timed]
    time, sent = figure.subplots(1, 2, sharey=True)
    walls = [found["wall_seconds"] for _, found in timed]
    spread = [
        [found["wall_seconds"] - found["wall_seconds_least"] for _, found in timed],
        [found["wall_seconds_most"] - found["wall_seconds"] for _, found in timed],
    ]
    time.barh(names, walls, xerr=spread, color=colours, error_kw={"elinewidth": 1, "capsize": 2})
    time.set_xlabel("seconds, forward + backward (median; least and most)")
    hosts = any("between_hosts_bytes" in found for _, found in timed)
    key = "between_hosts_bytes" if hosts else "sent_bytes_busiest"
    sent.barh(names, [found[key] / MIB for _, found in timed], color=colours)
    sent.set_xlabel("MiB sent " + ("between the hosts" if hosts else "by the busiest rank"))
    for axes in (time, sent):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    bars = [time.barh([0], [0], color=colour) for colour in COLOURS.values()]
    figure.legend(bars, list(COLOURS), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)
    print(path)
