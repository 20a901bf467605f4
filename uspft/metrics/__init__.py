"""What a run says about itself: counts, records, the screen."""

from uspft.metrics.console import RunDisplay
from uspft.metrics.flops import peak_flops, step_flops
from uspft.metrics.journal import Journal
from uspft.metrics.memory import peak_memory_bytes
from uspft.metrics.size import as_size

__all__ = ["Journal", "RunDisplay", "as_size", "peak_flops", "peak_memory_bytes", "step_flops"]
