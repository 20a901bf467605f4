"""The file metrics.jsonl, to which each logged step is appended as one object; the best evaluation
in it, and measures of peak memory."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.durable import sync, write_text

if TYPE_CHECKING:
    import torch


class Journal:
    """A file of appended records that is complete up to its last line after any crash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.also: Callable[[dict[str, Any]], None] = lambda record: None
        """Also called with each record, once it is written."""

    def cut_back(self, step: int) -> None:
        """Drop the records after a checkpoint's step, and add one on the resumption."""
        kept = [
            line + "\n"
            for line, record in self._lines()
            if record.get("step", record.get("resumed_from_step", 0)) <= step
        ]
        write_text(self._path, "".join(kept))
        self.write({"resumed_from_step": step})

    def records(self) -> list[dict[str, Any]]:
        """Return all whole records of the file, the oldest first."""
        return [record for _, record in self._lines()]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the records of the evaluations in the file, the oldest first."""
        return [record for record in self.records() if "eval_loss" in record]

    def last_step(self) -> int:
        """Return the last training step in the file; 0 where there is none."""
        steps = [record["step"] for record in self.records() if "learning_rate" in record]
        return max(steps, default=0)

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each whole line of the file, with its record."""
        lines = self._path.read_text(errors="replace").splitlines() if self._path.exists() else []
        for line in lines:
            with suppress(json.JSONDecodeError):  # a killed run may leave an incomplete last line
                yield line, json.loads(line)

    def sync(self) -> None:
        """Flush the file to disk, so that no checkpoint outlives its records.

        Raises OSError.
        """
        if self._path.exists():
            sync(self._path)

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.also(record)


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss, the earliest among equals."""

    step: int | None = None
    """The step before it; None if no loss was finite yet."""
    loss: float = math.inf
    since: int = 0
    """How many evaluations followed without a lower loss."""

    @classmethod
    def of(cls, evaluations: Iterable[dict[str, Any]]) -> Best:
        """Return the best evaluation of records of metrics.jsonl, in order."""
        best = cls()
        for record in evaluations:
            best = best.after(record)
        return best

    def after(self, record: dict[str, Any]) -> Best:
        """Return the best after one more evaluation; one whose loss is not finite never is."""
        loss = record["eval_loss"]
        if loss is not None and loss < self.loss:
            return Best(record["step"], loss)
        return Best(self.step, self.loss, self.since + 1)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak allocated device memory, or on CPU the largest resident set so far."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def finite(value: float) -> float | None:
    """Return a number for JSON: None for NaN and infinity."""
    return value if math.isfinite(value) else None


def as_size(byte_count: float) -> str:
    """Return a byte count as four digits and a binary unit, such as `1.234 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if byte_count < 1024:
            return f"{byte_count:.4g} {unit}"
        byte_count /= 1024
    return f"{byte_count:.4g} GiB"
