"""A run's reports: its progress on the screen, metrics.jsonl, peak memory, and external
trackers."""

from uspft.metrics.console import RunDisplay
from uspft.metrics.journal import Best, Journal, as_size, finite, peak_memory_bytes
from uspft.metrics.trackers import tracking

__all__ = ["Best", "Journal", "RunDisplay", "as_size", "finite", "peak_memory_bytes", "tracking"]
