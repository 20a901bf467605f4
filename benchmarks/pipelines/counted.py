"""Bytes of activations on each rank of a pipeline: counted, and as the planner's formula has them.

The runner of a step runs with all its micro-batches on meta tensors, and every storage is counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.memory.__main__ import config_of
from benchmarks.memory.count import count_stages
from benchmarks.memory.options import MODEL
from benchmarks.memory.predicted import predicted_of_ranks
from benchmarks.pipelines.sleeping import RANKS, SCHEDULES
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.pipeline.schedules import forward_and_backward
from uspft.pipeline.simulator import simulate
from uspft.prepare.invocation import CONFIGS


@dataclass(frozen=True)
class Case:
    """Layers of Llama-3.1-8B, split alike, in rows of one document."""

    layers: int
    tokens: int
    micro_batches: int

    @property
    def sentence(self) -> str:
        """It tells the case to a person."""
        return (
            f"{self.layers} layers of Llama-3.1-8B on {RANKS} ranks, {self.micro_batches} "
            f"micro-batches of {self.tokens:,} tokens, bfloat16, `recompute: nothing`"
        )


def counted(case: Case) -> dict[str, Any]:
    """Return for each schedule what each rank has, counted and predicted, and its stage inputs."""
    memory = MemoryBlock(recompute="nothing", loss_tile_tokens=1024)
    sizes = {"num_hidden_layers": case.layers}
    shape = read_shape(ModelBlock(name_or_path=MODEL, overrides=sizes), CONFIGS)
    assert isinstance(shape, ModelShape)
    found, layout = {}, Layout(pipeline=RANKS)
    for name, schedule in SCHEDULES.items():
        stages = RANKS * schedule.virtual
        dealt = schedule._replace(sizes=(case.layers // stages,) * stages)
        arguments = case.tokens, memory, layout, dealt, case.micro_batches
        lists = forward_and_backward(
            schedule.scheduler, RANKS, case.micro_batches, schedule.virtual
        )
        found[name] = {
            "inputs": list(simulate(lists, lambda _: 1.0).peaks),
            "counted_bytes": count_stages(config_of(case.layers), *arguments),
            "predicted_bytes": predicted_of_ranks(shape, *arguments),
        }
    return {"case": asdict(case), "by_schedule": found}
