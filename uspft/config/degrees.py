"""The keys of `parallel_config`, which say how a run is split over ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from uspft.config.algorithms import AUTO, CONTEXT, TENSOR, Splits
from uspft.config.allowed import Described, described
from uspft.config.checks import LARGEST, choice, each, flag, of_stages, tokens, whole
from uspft.config.fields import (
    Count,
    CountAutoOrNone,
    CountOpenOrNone,
    CountOrAuto,
    CountOrOpen,
    Flag,
    RecipeBlock,
    block,
)

_is = PlainValidator


def _synonyms() -> dict[str, str]:
    return {other: row.name for row in CONTEXT.values() for other in row.synonyms}


def _of_the_table() -> Described:
    return described(choice(*CONTEXT, AUTO, also=(None,), synonyms=_synonyms()))


def _context_algorithm() -> Described:
    """Return a check for a name in the table of algorithms, or a synonym of one.

    The check reads the table each time it is asked, so that a row added since counts too.
    """
    said = "".join(f"; {other} means {name}" for other, name in _synonyms().items())
    now = _of_the_table()

    def check(value: Any) -> Any:
        return _of_the_table()(value)

    return Described(check, now.wanted + said, now.schema)


def _slices() -> Described:
    """Return a check of one number of slices for all products, or one for each."""
    one = described(whole(1, also=(AUTO, None)))
    each_of = described(each(whole(1), "[qkv, out, gate_up, down]", size=4))

    def check(value: Any) -> Any:
        return (each_of if isinstance(value, list | tuple) else one)(value)

    schema = {"anyOf": [one.schema, each_of.schema]}
    return Described(check, f"{one.wanted} or {each_of.wanted}", schema)


EachStage = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""A number for each stage: [p], or [v][p] with virtual stages."""


def _offset() -> Described:
    """Return a check of one number for all stages, or one for each."""
    one = described(whole(-LARGEST, also=(None,)))
    each_of = described(of_stages(whole(-LARGEST)))

    def check(value: Any) -> Any:
        return (each_of if isinstance(value, list | tuple) else one)(value)

    schema = {"anyOf": [*one.schema["anyOf"], *each_of.schema["anyOf"]]}
    return Described(check, f"a whole number, {each_of.wanted} or null", schema)


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

    data_parallel: CountOrAuto = "auto"
    """Number of replicas that take different rows; `auto` is processes ÷ the other degrees."""
    model_parallel: CountOrOpen = 1
    """Tensor parallel degree: ranks that hold parts of one matrix; `auto` asks the planner."""
    use_seq_parallel: Flag = False
    """Whether tensor parallel ranks also split the tokens between their matrices."""
    context_parallel: CountOrOpen = 1
    """Number of ranks that share one row; `auto` asks the planner."""
    context_parallel_algo: Annotated[str | None, _is(_context_algorithm())] = None
    """How ranks share a row; required where several do; `auto` chooses, and the run says why."""
    ulysses_degree_in_cp: CountOpenOrNone = None
    """Ranks that split heads; context_parallel ÷ it split tokens; null: the algorithm's, or 1."""
    exchange_stages: CountAutoOrNone = "auto"
    """Steps in which keys are exchanged; `auto` and null take at least one for each other rank."""
    tensor_parallel_algo: Annotated[str, _is(choice(*TENSOR))] = "megatron"
    """Algorithm with which tensor parallel ranks split a matrix."""
    tensor_mesh: Annotated[
        tuple[int, int] | Literal["auto"] | None,
        _is(each(whole(1), "[rows, cols]", size=2, also=("auto", None))),
    ] = "auto"
    """Rows and columns of meshslice's grid of ranks; `auto` and null leave the choice to it."""
    tensor_slices: Annotated[
        int | tuple[int, int, int, int] | Literal["auto"] | None, _is(_slices())
    ] = "auto"
    """Number of slices of each product in meshslice; `auto` and null leave the choice to it."""
    pipeline_stage: CountOrOpen = 1
    """Pipeline stages, on ranks of their own, that the layers are split into; `auto` chooses."""
    micro_batch_num: CountOrAuto = "auto"
    """Number of micro-batches in a step, which the batch decides; without stages `1` stands too."""
    pp_interleave_num: Count = 1
    """Number of virtual stages that each stage's ranks take in turn; more make a bubble smaller."""
    seq_split_num: Count = 1
    """Number of chunks of a row that follow one another through a pipeline (seqpipe)."""
    fine_grain_interleave: Count = 1
    """Number of parts of a layer's work that alternate, which hides tensor parallel transfers."""

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

    max_length: Annotated[int, _is(tokens(1))]
    """Number of tokens in the longest row that this layout is for."""


class ParallelBlock(Degrees):
    """The block says how ranks split a run, in MindSpore Transformers' names; or `auto` chooses."""

    strategies: Annotated[
        tuple[Strategy, ...] | Literal["auto"] | None,
        _is(each(block(Strategy), "a list of layouts", also=("auto", None))),
    ] = None
    """Layouts that the samples of one step run under, by length; `auto` chooses; null: one."""
    switching: Annotated[
        Literal["auto", "in_place", "move"] | None,
        _is(choice("auto", "in_place", "move", also=(None,))),
    ] = "auto"
    """How tensor degrees switch: ranks use parts of what they hold (`in_place`), or it moves."""
    expert_parallel: CountOrOpen = 1
    """Neighbouring ranks of data × context that a layer's experts are spread over, or `auto`."""
    pipeline_scheduler: Annotated[
        Literal["auto", "gpipe", "1f1b", "seqpipe"] | None,
        _is(choice("auto", "gpipe", "1f1b", "seqpipe", also=(None,))),
    ] = "auto"
    """Order of a pipeline's work; `auto` is seqpipe where `seq_split_num` is above 1, else 1f1b."""
    sequence_chunks: Annotated[Literal["time", "tokens"], _is(choice("time", "tokens"))] = "time"
    """Whether chunks of a row take equal time, by the planner's price, or have equal tokens."""
    pipeline_interleave: Annotated[bool | Literal["auto"] | None, _is(flag(also=(AUTO, None)))] = (
        "auto"
    )
    """Whether stages have virtual ones; `auto` follows `pp_interleave_num`, which says how many."""
    layers_per_stage: Annotated[EachStage | None, _is(of_stages(whole(1), also=(None,)))] = None
    """Number of layers of each stage; null deals them out so that stages cost alike."""
    offset: Annotated[int | EachStage | None, _is(_offset())] = None
    """Layers of each stage beyond the whole share, as in MindSpore; null: `layers_per_stage`."""
