"""What is known of each model type, and which models are refused; no torch."""

from uspft.families.reach import check_length, with_factor
from uspft.families.shape import ModelShape, read_shape
from uspft.families.table import FAMILIES

__all__ = ["FAMILIES", "ModelShape", "check_length", "read_shape", "with_factor"]
