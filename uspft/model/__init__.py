"""A Hugging Face model, loaded once and taught to attend across ranks."""

from uspft.model.build import build_model, parameter_count
from uspft.model.causal import CausalLoss
from uspft.model.weights import FolderWeights, RandomWeights, WeightsError

__all__ = [
    "CausalLoss",
    "FolderWeights",
    "RandomWeights",
    "WeightsError",
    "build_model",
    "parameter_count",
]
