"""How a run is split over ranks: the keys of `parallel_config`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from uspft.config.algorithms import AUTO, CONTEXT
from uspft.config.allowed import Described, described
from uspft.config.checks import choice, each, tokens, whole
from uspft.config.fields import (
    Count,
    CountAutoOrNone,
    CountOrAuto,
    CountOrNone,
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
    """A name of the table of algorithms, or a synonym of one.

    The check reads the table when it is asked: a row that has been added counts.
    """
    said = "".join(f"; {other} means {name}" for other, name in _synonyms().items())
    now = _of_the_table()

    def check(value: Any) -> Any:
        return _of_the_table()(value)

    return Described(check, now.wanted + said, now.schema)


class Degrees(RecipeBlock):
    """A layout: how many ways each thing is split, and by which algorithms."""

    data_parallel: CountOrAuto = "auto"
    """Rows in work at a time; `auto` takes what the other degrees leave of the processes."""
    model_parallel: Count = 1
    """Tensor parallel degree: ranks that hold parts of one matrix."""
    use_seq_parallel: Flag = False
    """Whether tensor parallel ranks also split the tokens between their matrices."""
    context_parallel: Count = 1
    """Ranks that share one row."""
    context_parallel_algo: Annotated[str | None, _is(_context_algorithm())] = None
    """How ranks share a row, required where several do; `auto` chooses, and the run says why."""
    ulysses_degree_in_cp: CountOrNone = None
    """Ranks that split heads (tokens: context_parallel ÷ this); null: the algorithm's own, or 1."""
    exchange_stages: CountAutoOrNone = "auto"
    """Steps of an exchange of keys; `auto` and null: at least one for each other rank."""
    tensor_parallel_algo: Annotated[
        Literal["megatron", "meshslice"], _is(choice("megatron", "meshslice"))
    ] = "megatron"
    """How tensor parallel ranks split a matrix."""
    tensor_mesh: Annotated[
        tuple[int, int] | Literal["auto"] | None,
        _is(each(whole(1), "[rows, cols]", size=2, also=("auto", None))),
    ] = "auto"
    """Rows and columns of meshslice's ranks; `auto` and null leave the choice to it."""
    tensor_slices: CountAutoOrNone = "auto"
    """Slices of one product in meshslice; `auto` and null leave the choice to it."""
    pipeline_stage: Count = 1
    """Pipeline stages that the layers are split into."""
    micro_batch_num: Count = 1
    """Micro-batches in flight in a pipeline."""
    pp_interleave_num: Count = 1
    """Virtual pipeline stages per rank."""
    seq_split_num: Count = 1
    """Parts of a row that follow one another through a pipeline."""
    fine_grain_interleave: Count = 1
    """Parts of a layer's work that alternate, so that tensor parallel transfers are hidden."""


class Strategy(Degrees):
    """One of several layouts: a degree that it leaves out is 1, `data_parallel` what is left."""

    max_length: Annotated[int, _is(tokens(1))]
    """Tokens of the longest row that this layout is for."""


class ParallelBlock(Degrees):
    """The block lays a run out over its ranks, in MindSpore Transformers' words."""

    strategies: Annotated[
        tuple[Strategy, ...] | Literal["auto"] | None,
        _is(each(block(Strategy), "a list of layouts", also=("auto", None))),
    ] = None
    """Layouts that a run switches between by the length of its rows; null keeps one layout."""
