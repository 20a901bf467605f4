"""The recipe as a value: loading it touches no device, network, folder or logger."""

from __future__ import annotations

from uspft.config.inputs import DataBlock, ModelBlock, Source
from uspft.config.loading import Loaded, Read, dump, load, read
from uspft.config.problems import Fault, Finding, InputError, Origins, Problem, RecipeError
from uspft.config.recipe import (
    CheckpointBlock,
    DeepSpeedBlock,
    ExportBlock,
    LaunchBlock,
    LoggingBlock,
    MemoryBlock,
    OptimizerBlock,
    ParallelBlock,
    Recipe,
    ScheduleBlock,
    TrainingBlock,
)
from uspft.config.types import as_tree

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
