"""What a run says about itself: counts, records, the screen."""

from uspft.metrics.console import RunDisplay
from uspft.metrics.flops import peak_flops, step_flops
from uspft.metrics.journal import Journal
from uspft.metrics.memory import peak_memory_bytes

__all__ = ["Journal", "RunDisplay", "peak_flops", "peak_memory_bytes", "step_flops"]
