"""The books of what this rank sends to other ranks."""

from __future__ import annotations

from collections import Counter

KINDS = ("all_to_all", "ring", "gather", "tensor", "pipeline", "switch", "router", "objective")


class Books:
    """Bytes and messages sent by this rank to other ranks, by kind, since the last `close`."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def add(self, kind: str, sent_bytes: int, messages: int = 1) -> None:
        """Enter bytes that went out, to as many ranks as there are messages."""
        self.bytes[kind] += sent_bytes
        self.messages[kind] += messages

    def close(self) -> dict[str, int]:
        """Return the bytes sent by kind, and start a fresh page."""
        page = {kind: self.bytes[kind] for kind in KINDS if self.bytes[kind]}
        self.bytes.clear()
        self.messages.clear()
        return page
