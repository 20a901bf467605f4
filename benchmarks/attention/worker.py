"""One rank of the attention benchmark: python -m benchmarks.attention.worker FOLDER RANK."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.attention.rounds import measure
from benchmarks.attention.setting import Setting
from benchmarks.lab.processes import Tell, as_rank


def measured(setting: dict[str, Any], tell: Tell) -> Any:
    """It measures the engines of a setting."""
    return measure(Setting(**{**setting, "engines": tuple(setting["engines"])}), tell)


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
