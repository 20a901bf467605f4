"""Records of the attention benchmark → medians and a table."""

from __future__ import annotations

from statistics import median
from typing import Any

FLOOR = "no_communication"
MIB = 2**20
LARGEST_DOUBT = 0.03
"""Headers of many small messages stay below this share of the bytes."""
COLUMNS = (
    "engine",
    "wall s",
    "from – to",
    "÷ no comm.",
    "CPU s a rank",
    "busiest",
    "sent MiB a rank",
    "busiest",
    "between hosts MiB",
    "error",
    "remark",
)


def summary(record: dict[str, Any]) -> dict[str, float]:
    """This returns an engine's medians over the rounds; nothing where it was not timed."""
    rounds = record["rounds"]
    if not rounds:
        return {}
    walls = [max(each["wall_seconds_by_rank"]) for each in rounds]
    cpus = [each["cpu_seconds_by_rank"] for each in rounds]
    sent = record["sent_bytes_by_rank"]
    found = {
        "wall_seconds": median(walls),
        "wall_seconds_least": min(walls),
        "wall_seconds_most": max(walls),
        "cpu_seconds_mean": median(sum(each) / len(each) for each in cpus),
        "cpu_seconds_busiest": median(max(each) for each in cpus),
        "sent_bytes_mean": sum(sent) / len(sent),
        "sent_bytes_busiest": max(sent),
    }
    if "between_hosts_bytes_by_host" in record:
        found["between_hosts_bytes"] = sum(record["between_hosts_bytes_by_host"])
    return found


def rows(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """This returns the lines of the table, by COLUMNS."""
    summaries = {record["name"]: summary(record) for record in records}
    floor = summaries.get(FLOOR, {}).get("wall_seconds")
    return [_row(record, summaries[record["name"]], floor) for record in records]


def _row(record: dict[str, Any], found: dict[str, float], floor: float | None) -> tuple[str, ...]:
    error = f"{max(record['errors'].values()):.0e}" if record["errors"] else "–"
    if not found:
        said = f"{record['status']}: {record['reason']}".removesuffix(": ")
        return (record["name"], *["–"] * 8, error, said)
    between = found.get("between_hosts_bytes")
    return (
        record["name"],
        f"{found['wall_seconds']:.3f}",
        f"{found['wall_seconds_least']:.3f} – {found['wall_seconds_most']:.3f}",
        f"{found['wall_seconds'] / floor:.2f}" if floor else "–",
        f"{found['cpu_seconds_mean']:.3f}",
        f"{found['cpu_seconds_busiest']:.3f}",
        f"{found['sent_bytes_mean'] / MIB:.2f}",
        f"{found['sent_bytes_busiest'] / MIB:.2f}",
        "–" if between is None else f"{between / MIB:.2f}",
        error,
        _remark(record),
    )


def _remark(record: dict[str, Any]) -> str:
    """The engine's note, and a warning where Linux saw other bytes than the dispatcher."""
    pairs = zip(record["sent_bytes_by_rank"], record["written_bytes_by_rank"], strict=True)
    off = max((abs(written / sent - 1) for sent, written in pairs if sent), default=0.0)
    doubt = f"bytes in doubt: sockets say {off:.0%} else" if off > LARGEST_DOUBT else ""
    return "; ".join(part for part in (record["note"], doubt) if part)


def shown(lines: list[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """This returns (header, lines) without the columns that no line uses."""
    used = [i for i, _ in enumerate(COLUMNS) if any(line[i] not in ("–", "") for line in lines)]
    return tuple(COLUMNS[i] for i in used), [tuple(line[i] for i in used) for line in lines]


def text(title: str, records: list[dict[str, Any]]) -> str:
    """This lays the table out for a terminal."""
    header, lines = shown(rows(records))
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    left = [name in ("engine", "remark") for name in header]

    def laid_out(line: tuple[str, ...]) -> str:
        cells = zip(line, widths, left, strict=True)
        return "  ".join(c.ljust(w) if first else c.rjust(w) for c, w, first in cells).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([title, laid_out(header), rule, *map(laid_out, lines)])


def about(result: dict[str, Any]) -> str:
    """This says when and on what a case was measured."""
    machine = result["machine"]
    return (
        f"{result['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, "
        f"torch {result['versions']['torch']}; medians of {result['setting']['rounds']} rounds"
    )
