"""How a matrix is split: one algorithm, one file; config/algorithms.py lists them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from uspft.config.algorithms import TENSOR
from uspft.tensor.tensor_algorithm import MeshAlgorithm, TensorAlgorithm

if TYPE_CHECKING:
    from uspft.config import ParallelBlock
    from uspft.layout import Layout

__all__ = ["MeshAlgorithm", "TensorAlgorithm", "tensor_algorithm"]


def tensor_algorithm(parallel: ParallelBlock, layout: Layout) -> TensorAlgorithm:
    """Return the algorithm of a recipe's `parallel_config` under a layout, with its options."""
    row = TENSOR[parallel.tensor_parallel_algo]
    options = {name: getattr(parallel, key) for key, name in row.options.items()}
    module, _, name = row.code.partition(":")
    algorithm: TensorAlgorithm = getattr(import_module(module), name)(layout.tensor, **options)
    return algorithm
