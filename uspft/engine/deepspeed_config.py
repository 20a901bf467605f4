"""DeepSpeed's configuration, as a pure function of recipe and layout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from uspft.config.deepspeed_fields import elements

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.layout import Layout

REDUCTION = {"float32": "fp32", "bfloat16": "bf16"}
"""DeepSpeed's names of the dtypes in which gradients are reduced."""


def micro_batches(recipe: Recipe, layout: Layout) -> int:
    """Return the number of forward passes per step on each replica.

    If a step has too few rows, the last passes have empty rows.
    """
    rows = recipe.training.micro_batch_size * layout.data
    return math.ceil(recipe.training.global_batch_size / rows)


def deepspeed_config(recipe: Recipe, replicas: int, passes: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a recipe.

    Ranks that share a row count as data-parallel ones: DeepSpeed averages gradients over them too,
    and the loss is scaled for it (engine/zero.py). Accumulation is float32 whatever the compute
    dtype. replicas: how many ranks store the same parameters. passes: micro-batches per step, or
    the most if steps differ.
    """
    micro = recipe.training.micro_batch_size
    zero = {"stage": 1} | dict(recipe.deepspeed.zero_optimization)
    if zero["stage"] > 0:
        zero["reduce_bucket_size"] = elements(zero, "reduce_bucket_size")
    extra = recipe.deepspeed.model_dump(exclude={"zero_optimization"}, exclude_none=True)
    config: dict[str, Any] = {
        "train_batch_size": micro * passes * replicas,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": passes,
        "gradient_clipping": recipe.training.max_grad_norm or 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": REDUCTION[recipe.memory.gradient_reduction],
        "steps_per_print": 10**9,
        **extra,
    }
    if recipe.model.dtype == "bfloat16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if recipe.model.dtype != "float32" and zero["stage"] > 0:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
