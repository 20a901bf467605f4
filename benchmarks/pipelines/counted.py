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
from benchmarks.pipelines.sleeping import CHUNKED, RANKS, WHOLE
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.pipeline.schedules import Schedule, forward_and_backward
from uspft.pipeline.simulator import simulate
from uspft.planner.stages import cut_by_flops
from uspft.prepare.host import CONFIGS
from uspft.sequence.chunked import Cut

EQUAL_TOKENS, EQUAL_TIME = "seqpipe, equal tokens", "seqpipe, equal time"


@dataclass(frozen=True)
class Case:
    """Layers of Llama-3.1-8B, split alike, in rows of one document."""

    layers: int
    tokens: int
    micro_batches: int
    again: bool = True
    """Whether layers are checkpointed."""

    @property
    def sentence(self) -> str:
        """It tells the case to a person."""
        again = "`recompute: nothing`" if self.again else "`gradient_checkpointing: false`"
        return (
            f"{self.layers} layers of Llama-3.1-8B on {RANKS} ranks, {self.micro_batches} "
            f"micro-batches of {self.tokens:,} tokens, bfloat16, {again}"
        )

    @property
    def shape(self) -> ModelShape:
        sizes = {"num_hidden_layers": self.layers}
        found = read_shape(ModelBlock(name_or_path=MODEL, overrides=sizes), CONFIGS)
        assert isinstance(found, ModelShape)
        return found

    def counted(self, schedule: Schedule, cut: Cut | None = None) -> dict[str, Any]:
        """Return what each rank has under a schedule, counted and predicted, and its stage inputs.

        cut: how rows are cut into chunks, if they are.
        """
        memory = MemoryBlock(
            gradient_checkpointing=self.again, recompute="nothing", loss_tile_tokens=1024
        )
        stages, layout = RANKS * schedule.virtual, Layout(pipeline=RANKS)
        dealt = schedule._replace(sizes=(self.layers // stages,) * stages)
        arguments = self.tokens, memory, layout, dealt, self.micro_batches
        order, virtual, _, chunks = schedule
        lists = forward_and_backward(order, RANKS, self.micro_batches, virtual, chunks)
        equal = cut is not None and cut == cut.of_tokens
        return {
            "inputs": list(simulate(lists, lambda _: 1.0).peaks),
            "counted_bytes": count_stages(config_of(self.layers), *arguments, cut=cut),
            "predicted_bytes": predicted_of_ranks(self.shape, *arguments, equal_tokens=equal),
        }


def counted(case: Case) -> dict[str, Any]:
    """Return for each schedule of whole rows what each rank has."""
    found = {name: case.counted(schedule) for name, schedule in WHOLE.items()}
    return {"case": asdict(case), "by_schedule": found}


def counted_in_chunks(case: Case) -> dict[str, Any]:
    """Return what each rank has of rows that go through whole, and in chunks of equal tokens and of
    equal FLOPs, which is near to equal time."""
    schedule = CHUNKED["seqpipe"]
    cut = cut_by_flops(case.shape, schedule.chunks, 1)
    ways = {EQUAL_TOKENS: cut.of_tokens, EQUAL_TIME: cut}
    found = {"1f1b": case.counted(WHOLE["1f1b"])}
    found |= {name: case.counted(schedule, one) for name, one in ways.items()}
    sizes = {name: [*map(int, one.of_one_document(case.tokens))] for name, one in ways.items()}
    return {"case": asdict(case), "by_schedule": found, "chunks": sizes}
