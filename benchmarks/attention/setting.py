"""What one run of the attention benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.attention.documents import documents_of
from benchmarks.attention.layer import Layer

HOSTS = 2
CHECK_TOKENS = 1024
"""At this length every engine is compared with dense attention before it is timed."""


@dataclass(frozen=True)
class Setting:
    """A setting is one case and the engines to run it.

    host_mbit: the rate of two hosts' links; None: one host.
    """

    processes: int
    host_mbit: int | None
    tokens: int
    query_heads: int
    kv_heads: int
    documents: str
    rounds: int
    engines: tuple[str, ...]

    @property
    def name(self) -> str:
        """It is the case's key in attention.json: tokens, heads, documents, where."""
        where = f"{self.processes}p" if self.host_mbit is None else f"2hosts-{self.host_mbit}mbit"
        return f"{self.tokens}-{self.query_heads}x{self.kv_heads}-{self.documents}-{where}"

    @property
    def sentence(self) -> str:
        """It tells the case to a person."""
        documents = len(self.layer().lengths)
        row = "one document" if documents == 1 else f"{documents} documents ({self.documents})"
        where = f"{self.processes} processes of one thread"
        if self.host_mbit is not None:
            where = f"2 hosts × {self.processes // 2} processes, {self.host_mbit} Mbit/s links"
        heads = f"{self.query_heads} query and {self.kv_heads} KV heads of 64"
        return f"{self.tokens} tokens, {row}, {heads}, float32, {where}"

    @property
    def title(self) -> str:
        """It stands above the case's table and picture."""
        return f"Attention, forward + backward: {self.sentence}"

    def layer(self, tokens: int | None = None) -> Layer:
        """It returns the layer, or the same mix of documents in a row of another length."""
        row = documents_of(self.documents, tokens or self.tokens)
        hosts = 1 if self.host_mbit is None else HOSTS
        return Layer(row, self.query_heads, self.kv_heads, hosts=hosts)
