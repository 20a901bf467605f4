"""One rank on its host: python -m benchmarks.meshslice.hosts.worker FOLDER RANK."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from benchmarks.lab.processes import Tell, as_rank
from benchmarks.meshslice.hosts import baselines, block, overlap
from benchmarks.meshslice.hosts.setting import Setting

PARTS = {
    "products": overlap.products_alone,
    "overlap": overlap.measure,
    "block": block.measure,
    "tuned": block.measure_tuned,
    "baselines": baselines.measure,
}


def measured(setting: dict[str, Any], tell: Tell) -> Any:
    """It measures one part of the benchmark."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    found = Setting(**{**setting, "slices": tuple(setting["slices"])})
    return PARTS[found.part](found, tell)


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
