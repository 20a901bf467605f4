"""The conversations that both sides tokenise, the template, and what a side measured."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from benchmarks.lab.results import ROOT
from uspft.data.chat.template import without_marks

TOKENIZER = ROOT / "data" / "tokenizer"
TEMPLATES = ("marked", "unmarked")
"""ChatML as it is shipped, and the same without marks, as most tokenizers' own templates are."""
KINDS = ("jsonl", "json", "parquet")
LONGEST = 1500
"""Characters of a paragraph of Python's standard library, of which turns are made."""


@dataclass(frozen=True)
class Case:
    """So many conversations in a file of a kind, under a template."""

    conversations: int
    turns: int
    """The most questions that a conversation has; each is as likely as any fewer."""
    kind: str
    template: str
    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / f"chats.{self.kind}"

    @property
    def jinja(self) -> Path:
        return self.folder / f"{self.template}.jinja"

    def make(self) -> None:
        """This writes the conversations and the template."""
        source = (ROOT / "data" / "templates" / "chatml.jinja").read_text()
        self.jinja.write_text(source if self.template == "marked" else without_marks(source))
        found = list(self._conversations())
        if self.kind == "parquet":
            import pyarrow as pa  # type: ignore[import-untyped]
            import pyarrow.parquet as pq  # type: ignore[import-untyped]

            pq.write_table(pa.Table.from_pylist(found), self.data)
        elif self.kind == "json":
            self.data.write_text(json.dumps(found))
        else:
            self.data.write_text("".join(json.dumps(each) + "\n" for each in found))

    def _conversations(self) -> Iterator[dict[str, list[dict[str, str]]]]:
        library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "\n\n".join(path.read_text("utf-8", "ignore") for path in library)
        pieces = [piece.strip() for piece in text.split("\n\n") if 40 < len(piece) < LONGEST]
        draw = random.Random(1)
        for _ in range(self.conversations):
            messages = []
            for _ in range(draw.randint(1, self.turns)):
                question = "What does this do?\n" + draw.choice(pieces)
                answer = draw.choice(pieces) + "\n" + draw.choice(pieces)
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
            yield {"messages": messages}


@dataclass(frozen=True)
class Measured:
    """One run of one side."""

    side: str
    seconds: float
    """Reading and tokenising, without the start of programs and their imports."""
    command_seconds: float
    """The whole command, with all that it starts."""
    tokens: int
    digest: str
    """Of all token ids in their order."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def digest_of(parts: Iterator[np.ndarray]) -> str:
    """This hashes token ids, whatever pieces they come in."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(np.ascontiguousarray(part, dtype=np.int32).tobytes())
    return found.hexdigest()
