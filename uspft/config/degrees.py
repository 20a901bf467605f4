"""The keys of `parallel_config`, which say how a run is split over ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from uspft.config.algorithms import AUTO, CONTEXT, TENSOR, Splits
from uspft.config.types import (
    Count,
    CountOpenOrNone,
    CountOrOpen,
    EachStage,
    Integer,
    OneOf,
    RecipeBlock,
    Tokens,
    of_stages,
)


def _algorithms() -> dict[str, str]:
    """Return the names of algorithms that share a row, each with the one that it stands for."""
    synonyms = {other: row.name for row in CONTEXT.values() for other in row.synonyms}
    return {**{name: name for name in CONTEXT}, **synonyms, AUTO: AUTO}


PLANNED = (
    "data_parallel",
    "model_parallel",
    "pipeline_stage",
    "context_parallel",
    "context_parallel_algo",
    "ulysses_degree_in_cp",
    "expert_parallel",
)
"""The keys that `parallel_config: auto` leaves to the planner, beside those whose default does."""


class Degrees(RecipeBlock):
    """A layout says how many ways each thing is split, and by which algorithms."""

    data_parallel: Count | Literal["auto"] = "auto"
    """Number of replicas that take different rows; `auto` is processes ÷ the other degrees."""
    model_parallel: CountOrOpen = 1
    """Tensor parallel degree: ranks that hold parts of one matrix; `auto` asks the planner."""
    use_seq_parallel: bool = False
    """Whether tensor parallel ranks also split the tokens between their matrices."""
    context_parallel: CountOrOpen = 1
    """Number of ranks that share one row; `auto` asks the planner."""
    context_parallel_algo: Annotated[str, OneOf(_algorithms)] | None = None
    """How ranks share a row; required where several do; `auto` chooses, and the run says why."""
    ulysses_degree_in_cp: CountOpenOrNone = None
    """Ranks that split heads; context_parallel ÷ it split tokens; null: the algorithm's, or 1."""
    exchange_stages: Count | Literal["auto"] | None = "auto"
    """Steps in which keys are exchanged; `auto` and null take at least one for each other rank."""
    tensor_parallel_algo: Annotated[str, OneOf(lambda: {name: name for name in TENSOR})] = (
        "megatron"
    )
    """Algorithm with which tensor parallel ranks split a matrix."""
    tensor_mesh: (
        Annotated[tuple[Count, Count], Strict(False), Field(title="[rows, cols]")]
        | Literal["auto"]
        | None
    ) = "auto"
    """Rows and columns of meshslice's grid of ranks; `auto` and null leave the choice to it."""
    tensor_slices: (
        Count
        | Annotated[
            tuple[Count, Count, Count, Count],
            Strict(False),
            Field(title="[qkv, out, gate_up, down]"),
        ]
        | Literal["auto"]
        | None
    ) = "auto"
    """Number of slices of each product in meshslice; `auto` and null leave the choice to it."""
    pipeline_stage: CountOrOpen = 1
    """Pipeline stages, on ranks of their own, that the layers are split into; `auto` chooses."""
    micro_batch_num: Count | Literal["auto"] = "auto"
    """Number of micro-batches in a step, which the batch decides; without stages `1` stands too."""
    pp_interleave_num: Count = 1
    """Number of virtual stages that each stage's ranks take in turn; more make a bubble smaller."""
    layers_per_stage: Annotated[EachStage, of_stages(Count)] | None = None
    """Number of layers of each stage; null deals them out so that stages cost alike."""
    seq_split_num: Count = 1
    """Number of chunks of a row that follow one another through a pipeline (seqpipe)."""
    fine_grain_interleave: Count = 1
    """Number of copies of a layer's work that take turns, which hides tensor parallel transfers."""

    @property
    def mesh_rows(self) -> int:
        """The rows of the mesh that holds a matrix; 1 where there is none, or none chosen yet."""
        return self.tensor_mesh[0] if isinstance(self.tensor_mesh, tuple) else 1

    @property
    def on_a_mesh(self) -> bool:
        """Whether ranks hold matrices over both dimensions, so that mesh rows split tokens."""
        blocks = TENSOR[self.tensor_parallel_algo].splits is Splits.BLOCKS
        return blocks and self.model_parallel > 1

    @property
    def mesh_is_open(self) -> bool:
        """Whether how many mesh rows there are is yet to be chosen."""
        return self.on_a_mesh and not isinstance(self.tensor_mesh, tuple)

    @property
    def row_ranks(self) -> int:
        """The number of ranks that share a row of tokens: the mesh's rows are among them."""
        return self.mesh_rows * self.context_parallel


class Strategy(Degrees):
    """One of several layouts: degrees left out are 1, and `data_parallel` takes what is left."""

    max_length: Tokens
    """Number of tokens in the longest row that this layout is for."""


class ParallelBlock(Degrees):
    """The block says how ranks split a run, in MindSpore Transformers' names; or `auto` chooses."""

    strategies: (
        Annotated[tuple[Strategy, ...], Strict(False), Field(title="a list of layouts")]
        | Literal["auto"]
        | None
    ) = None
    """Layouts that the samples of one step run under, by length; `auto` chooses; null: one."""
    switching: Literal["auto", "in_place", "move"] | None = "auto"
    """How tensor degrees switch: ranks use parts of what they hold (`in_place`), or it moves."""
    expert_parallel: CountOrOpen = 1
    """Neighbouring ranks of data × context that a layer's experts are spread over, or `auto`."""
    pipeline_scheduler: Literal["auto", "gpipe", "1f1b", "seqpipe"] | None = "auto"
    """Order of a pipeline's work; `auto` is seqpipe where `seq_split_num` is above 1, else 1f1b."""
    sequence_chunks: Literal["time", "tokens"] = "time"
    """Whether chunks of a row take equal time, by the planner's price, or have equal tokens."""
    pipeline_interleave: bool | Literal["auto"] | None = "auto"
    """Whether stages have virtual ones; `auto` follows `pp_interleave_num`, which says how many."""
    offset: Integer | Annotated[EachStage, of_stages(Integer)] | None = None
    """Layers of each stage beyond the whole share, as in MindSpore; null: `layers_per_stage`."""
