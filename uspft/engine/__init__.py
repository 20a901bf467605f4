"""The seam to DeepSpeed: recipe and layout → its configuration; ZeRO 0 to 3 behind one step."""

from uspft.engine.deepspeed_config import deepspeed_config
from uspft.engine.quarantine import prepare_deepspeed
from uspft.engine.zero import NotFinite, StepResult, ZeroEngine, partitioner

__all__ = [
    "NotFinite",
    "StepResult",
    "ZeroEngine",
    "deepspeed_config",
    "partitioner",
    "prepare_deepspeed",
]
