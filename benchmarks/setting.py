"""What one run of the attention benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cluster import HOSTS
from benchmarks.documents import documents_of
from benchmarks.layer import Layer

CHECK_TOKENS = 1024
"""Length at which every engine is compared with dense attention before it is timed."""


@dataclass(frozen=True)
class Setting:
    """One case and the engines to run it; host_mbit: rate of two hosts' links, None: one host."""

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
        """For file names: tokens, heads, documents, where."""
        where = f"{self.processes}p" if self.host_mbit is None else f"2hosts-{self.host_mbit}mbit"
        return f"{self.tokens}-{self.query_heads}x{self.kv_heads}-{self.documents}-{where}"

    @property
    def sentence(self) -> str:
        """For people."""
        documents = len(self.layer().lengths)
        row = "one document" if documents == 1 else f"{documents} documents ({self.documents})"
        where = f"{self.processes} processes of one thread"
        if self.host_mbit is not None:
            where = f"2 hosts × {self.processes // 2} processes, {self.host_mbit} Mbit/s links"
        heads = f"{self.query_heads} query and {self.kv_heads} KV heads of 64"
        return f"{self.tokens} tokens, {row}, {heads}, float32, {where}"

    def layer(self, tokens: int | None = None) -> Layer:
        """The layer, or the same mix of documents in a row of another length."""
        row = documents_of(self.documents, tokens or self.tokens)
        hosts = 1 if self.host_mbit is None else HOSTS
        return Layer(row, self.query_heads, self.kv_heads, hosts=hosts)
