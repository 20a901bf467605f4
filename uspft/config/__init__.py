"""The recipe as a value: loading it touches no device, network, folder or logger."""

from __future__ import annotations

from uspft.config.inputs import ModelBlock
from uspft.config.loading import Loaded, dump, load, read
from uspft.config.problems import Fault, Finding, InputError, RecipeError
from uspft.config.recipe import LaunchBlock, MemoryBlock, ParallelBlock, Recipe
from uspft.config.types import as_tree

__all__ = [
    "Fault",
    "Finding",
    "InputError",
    "LaunchBlock",
    "Loaded",
    "MemoryBlock",
    "ModelBlock",
    "ParallelBlock",
    "Recipe",
    "RecipeError",
    "as_tree",
    "dump",
    "load",
    "read",
]
