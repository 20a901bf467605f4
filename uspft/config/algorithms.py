"""The tables of sequence-parallel and tensor-parallel algorithms and of objectives, one row each;
nothing else lists them.

Rules, layouts, `auto`, `verify`, messages and README's table read them. A row names its class,
which is imported only when a layout is set up or a model is built. A new algorithm is one row here
and one file in sequence/ or tensor/; a new objective is one row here and one file in objective/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

AUTO = "auto"


class Splits(Enum):
    """What the ranks that share a row split during attention (heads, tokens or both), and how their
    degrees follow from the recipe."""

    HEADS = "heads: Ulysses degree = context_parallel"
    TOKENS = "tokens: ring degree = context_parallel"
    BOTH = "heads ulysses_degree_in_cp ways, tokens the rest"
    MATRICES = "nothing of a row: model_parallel ranks hold parts of each matrix"
    BLOCKS = "tokens over mesh rows, features over mesh columns; blocks of each matrix over both"


@dataclass(frozen=True, eq=False)
class AlgorithmRow:
    """The facts about an algorithm that are known without torch."""

    name: str
    """The value of `context_parallel_algo` or `tensor_parallel_algo` that names it in a recipe."""
    code: str
    """The location of its class, written `module:Class`."""
    splits: Splits
    short: str = "ring"
    """The name of its token split in the `strategy` field of metrics.jsonl."""
    label: str = "ring"
    """The name of its token split in messages that also name Ulysses."""
    alone: str = "zigzag ring"
    """The name of its token split in messages where only tokens are split."""
    synonyms: tuple[str, ...] = ()
    megatron: str = "–"
    """The value of Megatron's `cp_comm_type` that corresponds to it."""
    ulysses_required: bool = False
    """Whether a recipe must give `ulysses_degree_in_cp`; otherwise the default degree is 1."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The keys of `parallel_config` that only it has, each with the field of its class."""
    automatic: bool = False
    """Whether `auto` prefers it to equally fast ones, because it sends no keys that go unused."""
    all_at_once: bool = False
    """Whether each rank receives all keys of a row at once."""
    what: str = ""
    """README's table: what is split during attention."""
    legal: str = ""
    """README's table: where the algorithm is legal."""

    def degrees(self, context: int, ulysses: int | None) -> tuple[int, int]:
        """Return the (Ulysses, ring) degrees of `context` ranks that share a row.

        ulysses: the recipe's Ulysses degree, or None where it says none.
        """
        match self.splits:
            case Splits.HEADS:
                return context, 1
            case Splits.MATRICES | Splits.BLOCKS:
                return 1, 1
            case Splits.TOKENS:
                return 1, context
            case Splits.BOTH:
                return ulysses or 1, context // (ulysses or 1)

    def options_at(self, ring: int) -> set[str]:
        """Return the keys of its options that have an effect at this ring degree."""
        return set(self.options) if ring > 1 or self.splits is Splits.HEADS else set()

    def implied_ulysses(self, context: int) -> int | None:
        """Return the Ulysses degree that follows from `context` alone, or None if the recipe must
        give it.
        """
        return None if self.splits is Splits.BOTH else self.degrees(context, None)[0]


def _table(*rows: AlgorithmRow) -> dict[str, AlgorithmRow]:
    return {row.name: row for row in rows}


CONTEXT = _table(
    AlgorithmRow(
        "ulysses_cp",
        "uspft.sequence.usp:Usp",
        Splits.HEADS,
        megatron="a2a",
        automatic=True,
        what="heads; one all-to-all before attention, one after",
        legal="`context_parallel` divides the row",
    ),
    AlgorithmRow(
        "ring_cp",
        "uspft.sequence.usp:Usp",
        Splits.TOKENS,
        megatron="p2p",
        what="tokens, in zigzag order; keys and values travel",
        legal="2 · `context_parallel` divides the row",
    ),
    AlgorithmRow(
        "hybrid_cp",
        "uspft.sequence.usp:Usp",
        Splits.BOTH,
        megatron="a2a+p2p",
        ulysses_required=True,
        what="heads `ulysses_degree_in_cp` ways, tokens the rest",
        legal="`context_parallel` divides the row, twice where tokens are split",
    ),
    AlgorithmRow(
        "allgather_cp",
        "uspft.sequence.allgather:AllGather",
        Splits.TOKENS,
        short="allgather",
        label="all-gather",
        alone="all-gather",
        synonyms=("colossalai_cp",),
        megatron="all_gather",
        all_at_once=True,
        what="tokens; all keys and values come at once, again in the backward",
        legal="as `ring_cp`",
    ),
    AlgorithmRow(
        "planned_cp",
        "uspft.sequence.planned:Planned",
        Splits.BOTH,
        short="planned",
        label="exchange",
        alone="exchange",
        options={"exchange_stages": "stages"},
        automatic=True,
        what="heads `ulysses_degree_in_cp` ways, tokens the rest; "
        "only needed keys and values travel",
        legal="as `hybrid_cp`",
    ),
)
"""The algorithms that share a row, by the value of `context_parallel_algo`."""

TENSOR = _table(
    AlgorithmRow(
        "megatron",
        "uspft.tensor.megatron:Megatron",
        Splits.MATRICES,
        megatron="TP",
        options={"use_seq_parallel": "splits_tokens", "fine_grain_interleave": "copies"},
        what="matrices, by columns and then rows; a sum over ranks after attention and the MLP",
        legal="`model_parallel` divides the query heads, and the KV heads or is a multiple of them",
    ),
    AlgorithmRow(
        "meshslice",
        "uspft.tensor.meshslice:MeshSlice",
        Splits.BLOCKS,
        options={"tensor_mesh": "mesh", "tensor_slices": "slices"},
        what="blocks of matrices over mesh rows × columns; transfers in slices, behind products",
        legal="mesh columns as `model_parallel` above; rows and columns divide the hidden size",
    ),
)
"""The tensor-parallel algorithms, by the value of `tensor_parallel_algo`."""

MESH_OPTIONS = frozenset(
    option for row in TENSOR.values() if row.splits is Splits.BLOCKS for option in row.options
)
"""The keys of `parallel_config` that set how matrices are split over a mesh of ranks."""
ON_A_MESH = "planned_cp"
"""The sequence-parallel algorithm that mesh rows use when the recipe names none."""

WHOLE = AlgorithmRow(
    "whole",
    "uspft.sequence.usp:Usp",
    Splits.TOKENS,
    what="nothing: the row is whole on its process",
    legal="always",
)
"""The row used when `context_parallel` is 1, so that each rank has whole rows."""


def row_of(name: str | None, context: int) -> AlgorithmRow:
    """Return the table row of a recipe's algorithm, or WHOLE if it names none or `context` is 1.

    context: how many ranks share a row of the data.
    """
    return CONTEXT[name] if name and context > 1 else WHOLE


def names(table: Mapping[str, AlgorithmRow]) -> str:
    """Return the names in a table, joined as messages list them."""
    *rest, last = table
    return f"{', '.join(rest)} or {last}" if rest else last


def every_option(table: Mapping[str, AlgorithmRow]) -> set[str]:
    """Return every key of `parallel_config` that is an option of some algorithm of a table."""
    return {option for row in table.values() for option in row.options}


def having(option: str, table: Mapping[str, AlgorithmRow]) -> list[str]:
    """Return the names of the algorithms in a table that have an option."""
    return [row.name for row in table.values() if option in row.options]


@dataclass(frozen=True, eq=False)
class ObjectiveRow:
    """The facts about an objective that are known without torch."""

    name: str
    """The value of `training.objective` that names it."""
    code: str
    """The location of its class, written `module:Class`."""
    plain: bool = False
    """Whether `verify` also computes it with plain transformers (verify/plain.py)."""


CAUSAL = ObjectiveRow("causal", "uspft.objective.causal:Causal", plain=True)
OBJECTIVES: dict[str, ObjectiveRow] = {CAUSAL.name: CAUSAL}
