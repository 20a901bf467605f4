"""The recipe as a value: loading it touches no device, network, folder or logger."""

from __future__ import annotations

from uspft.config.blocks import Recipe
from uspft.config.loading import Loaded, dump, load
from uspft.config.model_shape import ModelShape, check_length, read_shape
from uspft.config.problems import Finding, Origins, Problem, RecipeError

__all__ = [
    "Finding",
    "Loaded",
    "ModelShape",
    "Origins",
    "Problem",
    "Recipe",
    "RecipeError",
    "check_length",
    "dump",
    "load",
    "read_shape",
]
