"""What the planner predicts of a case that is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from uspft.config.algorithms import CONTEXT, WHOLE
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.model.tile_sizes import tile_tokens
from uspft.pipeline.schedules import Schedule
from uspft.planner.memory.formula import Memory, memory_of, memory_of_ranks
from uspft.planner.memory.passes import BATCH_BYTES
from uspft.planner.options import Options, trains_of

NONE_STAY = 0
"""A ZeRO stage whose state is the same at every moment of rows, since none of it is counted."""
COUNTED = 8
"""The bytes of a token of its batch that a count sees: operations return no more of it."""


def predicted(
    shape: ModelShape,
    layout: Layout,
    row_tokens: int,
    memory: MemoryBlock,
    algorithm: str,
    *,
    dtype: str = "bfloat16",
    parallel: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
    rows: int = 1,
    **options: Any,
) -> Memory:
    """Return what is predicted of what `count` counts; the arguments are its own."""
    of: dict[str, Any] = {"dtype": dtype, "parallel": parallel, "trained": trained}
    of["micro_batch"] = rows
    asked = options_for(shape, memory, algorithm, **of, **options)
    found = memory_of(shape, layout, row_tokens, options=asked)
    tokens = -(-rows * row_tokens // layout.context)
    seen = found.parts["batch"] - (BATCH_BYTES - COUNTED) * tokens
    return replace(found, parts={**found.parts, "batch": seen})


def predicted_of_ranks(
    shape: ModelShape,
    tokens: int,
    memory: MemoryBlock,
    layout: Layout,
    schedule: Schedule,
    micro_batches: int,
    *,
    dtype: str = "bfloat16",
    parallel: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
    algorithm: str = "ulysses_cp",
    equal_tokens: bool = False,
) -> list[int]:
    """Return what is predicted of each rank's rows, of what `count_stages` counts; the arguments
    are its own. equal_tokens: whether chunks of rows have as many, and not equal FLOPs."""
    options = options_for(
        shape,
        memory,
        algorithm,
        dtype=dtype,
        parallel=parallel,
        trained=trained,
        schedule=schedule,
        step_rows=micro_batches,
        equal_tokens=equal_tokens,
    )
    batches = micro_batches * tokens // layout.context * BATCH_BYTES
    batches *= 2 if schedule.chunks > 1 else 1  # whole, and chunk by chunk
    every = memory_of_ranks(shape, layout, tokens, options=options)
    copies = (one.parts.get("tied copy", 0) for one in every)
    return [one.activation_bytes + copy - batches for one, copy in zip(every, copies, strict=True)]


def options_for(
    shape: ModelShape,
    memory: MemoryBlock,
    algorithm: str,
    *,
    dtype: str = "bfloat16",
    parallel: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
    stages: int = 0,
    **others: Any,
) -> Options:
    """Return the options of a case that is counted. stages: of an exchange of keys. others: fields
    of `Options`."""
    asked = parallel or {}
    model = ModelBlock(config=Path(), **(trained or {}))
    auto, again = memory.recompute == "auto", memory.gradient_checkpointing
    return Options(
        algorithm=CONTEXT.get(algorithm, WHOLE),
        exchange_stages=stages,
        use_seq_parallel=asked.get("use_seq_parallel", False),
        copies=asked.get("fine_grain_interleave", 1),
        slices=asked.get("tensor_slices", (1,) * 4),
        dtype=dtype,
        checkpointing=bool(again),
        first_layers=None if isinstance(again, bool) else again,
        recompute="nothing" if auto else memory.recompute,
        at_once=memory.heads_at_once,
        offload_activations=memory.offload_activations == "cpu",
        loss_tile=tile_tokens(memory.loss_tile_tokens, shape.vocab_size),
        mlp_tile=memory.mlp_tile_tokens if isinstance(memory.mlp_tile_tokens, int) else None,
        trains=trains_of(model),
        **{"zero_stage": NONE_STAY, **others},
    )
