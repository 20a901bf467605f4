"""The recipe as a value: loading it touches no device, network, folder or logger."""

from __future__ import annotations

from uspft.config.problems import Fault, Finding, InputError, Origins, Problem, RecipeError
from uspft.config.recipe import (
    CheckpointBlock,
    DataBlock,
    DeepSpeedBlock,
    ExportBlock,
    LaunchBlock,
    LoggingBlock,
    MemoryBlock,
    ModelBlock,
    OptimizerBlock,
    ParallelBlock,
    Recipe,
    ScheduleBlock,
    Source,
    TrainingBlock,
)
from uspft.config.types import as_tree
from uspft.config.yaml.loading import Loaded, Read, dump, load, read

__all__ = [
    "CheckpointBlock",
    "DataBlock",
    "DeepSpeedBlock",
    "ExportBlock",
    "Fault",
    "Finding",
    "InputError",
    "LaunchBlock",
    "Loaded",
    "LoggingBlock",
    "MemoryBlock",
    "ModelBlock",
    "OptimizerBlock",
    "Origins",
    "ParallelBlock",
    "Problem",
    "Read",
    "Recipe",
    "RecipeError",
    "ScheduleBlock",
    "Source",
    "TrainingBlock",
    "as_tree",
    "dump",
    "load",
    "read",
]
