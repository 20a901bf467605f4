"""The recipe as a value: loading it touches no device, network, folder or logger."""

from __future__ import annotations

from uspft.config.blocks import (
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
from uspft.config.loading import Loaded, as_tree, dump, load
from uspft.config.model_shape import ModelShape, read_shape
from uspft.config.positions import check_length, with_factor
from uspft.config.problems import Fault, Finding, InputError, Origins, Problem, RecipeError

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
    "ModelShape",
    "OptimizerBlock",
    "Origins",
    "ParallelBlock",
    "Problem",
    "Recipe",
    "RecipeError",
    "ScheduleBlock",
    "Source",
    "TrainingBlock",
    "as_tree",
    "check_length",
    "dump",
    "load",
    "read_shape",
    "with_factor",
]
