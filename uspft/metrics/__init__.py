"""A run's reports on itself: its progress on the screen, metrics.jsonl, peak memory and sizes."""

from uspft.metrics.console import RunDisplay
from uspft.metrics.journal import Journal
from uspft.metrics.peak_memory import peak_memory_bytes
from uspft.metrics.size import as_size

__all__ = ["Journal", "RunDisplay", "as_size", "peak_memory_bytes"]
