"""A job: what a command hands to the ranks, in a folder that lives as long as the run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uspft.config import Recipe, dump, load


@dataclass(frozen=True)
class Job:
    """A resolved recipe, prepared data, where to go on from, and the command that asked for it.

    identity: what a resumed run must agree with; tokenizer: the folder that the export copies.
    """

    recipe: Recipe
    corpus: Path
    steps: int
    identity: dict[str, Any]
    resume_from: Path | None = None
    tokenizer: str | None = None
    command: str = ""

    def write(self, folder: Path) -> None:
        (folder / "recipe.yaml").write_text(dump(self.recipe))
        rest = {
            "corpus": str(self.corpus.resolve()),
            "steps": self.steps,
            "identity": self.identity,
            "resume_from": self.resume_from and str(self.resume_from.resolve()),
            "tokenizer": self.tokenizer,
            "command": self.command,
        }
        (folder / "job.json").write_text(json.dumps(rest))

    @classmethod
    def read(cls, folder: Path) -> Job:
        rest = json.loads((folder / "job.json").read_text())
        resume = rest["resume_from"]
        return cls(
            load(folder / "recipe.yaml").recipe,
            Path(rest["corpus"]),
            rest["steps"],
            rest["identity"],
            Path(resume) if resume else None,
            rest["tokenizer"],
            rest["command"],
        )
