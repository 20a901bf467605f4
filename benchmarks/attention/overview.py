"""The figures across all cases of attention.json, as pages show them.

python -m benchmarks.attention.overview
"""

from __future__ import annotations

from typing import Any

from benchmarks.attention.documents import MIXES
from benchmarks.attention.report import MIB, summary
from benchmarks.lab.machine import measured_on
from benchmarks.lab.results import RESULTS, read
from benchmarks.lab.tables import listed, markdown, span

NONE = "–"
OURS = "planned_cp"
BYTES_CASE = "8192-8x2-{mix}-4p"
BYTES_ENGINES = (OURS, "allgather_cp", "torch-alltoall", "yunchang-u2", "deepspeed-ulysses")
SIZES = ((8192, 8, 2), (8192, 32, 8), (32768, 8, 2), (32768, 32, 8))
HOST_CASES = {
    "one document, 25 Mbit/s": "8192-8x2-one-2hosts-25mbit",
    "one document, 100 Mbit/s": "8192-8x2-one-2hosts-100mbit",
    "`halves`, 100 Mbit/s": "8192-8x2-halves-2hosts-100mbit",
}
Cases = dict[str, Any]


def figures(cases: Cases) -> dict[str, str]:
    """Return them by name, as Markdown."""
    rounds = span([case["setting"]["rounds"] for case in cases.values()], 0)
    return {
        "bytes": bytes_table(cases),
        "times": time_table(cases),
        "walls": walls(cases),
        "hosts": hosts_table(cases),
        "measured": f"{measured_on(cases.values())} Medians of {rounds} rounds.",
    }


def bytes_table(cases: Cases) -> str:
    """This tells the MiB that the busiest of 4 ranks sends, by engine and mix of documents."""
    lines = [
        [f"`{name}`", *(_sent(cases[BYTES_CASE.format(mix=mix)], name) for mix in MIXES)]
        for name in BYTES_ENGINES
    ]
    return markdown(["MiB sent by the busiest of 4", *(f"`{mix}`" for mix in MIXES)], lines)


def _sent(case: Cases, name: str) -> str:
    record = _record(case, name)
    return f"{max(record['sent_bytes_by_rank']) / MIB:.1f}" if record["rounds"] else "cannot"


def time_table(cases: Cases) -> str:
    """This tells planned_cp's CPU seconds a rank beside those of the peer with the fewest."""
    lines = []
    for tokens, query_heads, kv_heads in SIZES:
        for ranks in (2, 4):
            names = [f"{tokens}-{query_heads}x{kv_heads}-{mix}-{ranks}p" for mix in MIXES]
            cells = [_beside_best_peer(cases[name]) for name in names]
            lines.append([str(tokens), f"{query_heads}/{kv_heads}", str(ranks), *cells])
    return markdown(["tokens", "heads", "processes", *(f"`{mix}`" for mix in MIXES)], lines)


def walls(cases: Cases) -> str:
    """This tells planned_cp's wall seconds beside those of the fastest peer, two processes each
    with a core of its own."""
    said = []
    for mix in MIXES:
        every = cases[f"8192-8x2-{mix}-2p"]["records"]
        seconds = {each["name"]: summary(each)["wall_seconds"] for each in every if each["rounds"]}
        peers = [each["name"] for each in every if each["kind"] == "peer"]
        best = min(seconds[name] for name in peers if name in seconds)
        said.append(f"{seconds[OURS] / best:.2f} (`{mix}`)")
    return (
        "Two processes have a core each: with 8,192 tokens and 8/2 heads the wall time of "
        f"`{OURS}` is {listed(said)} of the fastest other's."
    )


def _beside_best_peer(case: Cases) -> str:
    peers = [each for each in case["records"] if each["kind"] == "peer" and each["rounds"]]
    best = min(summary(each)["cpu_seconds_mean"] for each in peers)
    ours = summary(_record(case, OURS))["cpu_seconds_mean"]
    return f"{ours:.2f} / {best:.2f}: **{ours / best:.2f}**"


def hosts_table(cases: Cases) -> str:
    """This tells wall seconds between two hosts, and what one document sends between them."""
    found = [cases[name] for name in HOST_CASES.values()]
    lines = []
    for record in found[0]["records"]:
        name = record["name"]
        bytes_between = sum(record["between_hosts_bytes_by_host"])
        lines.append([f"`{name}`", *(_wall(case, name) for case in found)])
        lines[-1].append(f"{bytes_between / MIB:.1f}")
    return markdown(["wall seconds", *HOST_CASES, "MiB between hosts, one document"], lines)


def _wall(case: Cases, name: str) -> str:
    timed = [each["name"] for each in case["records"] if each["rounds"]]
    return f"{summary(_record(case, name))['wall_seconds']:.2f}" if name in timed else NONE


def _record(case: Cases, name: str) -> dict[str, Any]:
    (found,) = [each for each in case["records"] if each["name"] == name]
    return dict(found)


if __name__ == "__main__":
    print("\n\n".join(figures(read(RESULTS, "attention")).values()))
