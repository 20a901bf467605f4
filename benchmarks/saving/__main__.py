"""What the checksums of a checkpoint add to the time of a save, and what steps lose to saves.

    python -m benchmarks.saving [--gb 1,4] [--rounds 3] [--parts checksums,overlap] [--folder DIR]
        [--out DIR]

The files are written to the disk of --folder and synced, as a run does. The exit code is 1 where
checksums add more than a twentieth to a save; a disk's own spread is larger, so that is measured in
a folder in memory. The file keeps the parts and sizes that are not run
again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lab.machine import circumstances
from benchmarks.lab.results import RESULTS, read, write
from benchmarks.saving import checksums, overlap
from benchmarks.saving.figures import checksum_table, overlap_table


def main() -> int:
    """Time each size, write it, print the tables; 1 where checksums cost too much."""
    asked = _words()
    sizes = [float(word) for word in asked.gb.split(",")]
    result = read(asked.out, "saving")
    with tempfile.TemporaryDirectory(prefix="saving-", dir=asked.folder) as name:
        folder = Path(name)
        if "checksums" in asked.parts:
            result["checksums_on"] = circumstances()
            for size in sizes:
                one = checksums.measured(size, asked.rounds, folder)
                result["checksums"] = _with(result.get("checksums", []), size, one)
            print(checksum_table(result["checksums"]), flush=True)
        if "overlap" in asked.parts:
            result["overlap_on"] = circumstances()
            for size in sizes:
                one = overlap.measured(size, asked.rounds, folder)
                result["overlap"] = _with(result.get("overlap", []), size, one)
            print(overlap_table(result["overlap"]), flush=True)
    print(write(asked.out, "saving", result))
    return int(any(case["cost"] > checksums.MOST_COST for case in result["checksums"]))


def _with(cases: list[dict[str, Any]], size: float, one: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cases of a part with one in the place of that of the same size."""
    others = [case for case in cases if case["gb"] != size]
    return sorted([*others, {"gb": size, **one}], key=lambda case: case["gb"])


def _words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving")
    parser.add_argument("--gb", default="1,4", help="sizes of a checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="checksums,overlap")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
