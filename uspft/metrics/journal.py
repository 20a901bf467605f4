"""The file metrics.jsonl: each logged step is one object in it, once, appended as it happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from uspft.durable import write_text


class Journal:
    """A file of appended records that is complete up to its last line after any crash."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def cut_back(self, step: int) -> None:
        """Drop the records that came after a checkpoint's step, and note the resumption."""
        kept = []
        if self._path.exists():
            for line in self._path.read_text(errors="replace").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the torn last line of a killed run
                if record.get("step", record.get("resumed_from_step", 0)) <= step:
                    kept.append(line + "\n")
        write_text(self._path, "".join(kept))
        self.write({"resumed_from_step": step})

    def has_evaluation(self, step: int) -> bool:
        """Tell whether the file holds the record of an evaluation after this step."""
        return any(record["step"] == step for record in self.evaluations())

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the records of the evaluations in the file."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return [record for record in map(json.loads, lines) if "eval_loss" in record]

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
