"""What the checksums of a checkpoint add to the time of a save, and what steps lose to saves.

    python -m benchmarks.saving [--gb 1,4] [--rounds 3] [--parts checksums,overlap] [--folder DIR]
        [--out DIR]

The files are written to the disk of --folder and synced, as a run does. The exit code is 1 where
checksums take more than a twentieth of a save. The file keeps the part that is not run again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

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
            result["checksums"] = [checksums.measured(size, asked.rounds, folder) for size in sizes]
            print(checksum_table(result["checksums"]), flush=True)
        if "overlap" in asked.parts:
            result["overlap_on"] = circumstances()
            result["overlap"] = [overlap.measured(size, asked.rounds, folder) for size in sizes]
            print(overlap_table(result["overlap"]), flush=True)
    print(write(asked.out, "saving", result))
    return int(any(case["cost"] > checksums.MOST_COST for case in result["checksums"]))


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
