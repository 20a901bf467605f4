"""A layer as a rank has it: the sizes, options and degrees that decide its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from uspft.families.projections import BEHIND, STATE_LAYER
from uspft.planner.attention_memory import Sharing
from uspft.planner.expert_memory import Experts
from uspft.planner.layer_kinds import LLAMA, LayerKind
from uspft.planner.operations import WIDE
from uspft.planner.products import (
    SHARED_EXPERT,
    SHARED_GATE,
)
from uspft.planner.state_memory import StateHeads

OUT = "self_attn.o_proj"
OUTWARD = {"self_attn": OUT, "mlp": "mlp.down_proj"}
"""The projection out of each block that may lie on a mesh."""


@dataclass(frozen=True)
class LayerSizes:
    """A layer as a rank has it."""

    sharing: Sharing
    """Of attention, whose tokens are those inside of blocks."""
    hidden: int
    inner: int
    """Features of the MLP, or of the expert that every token meets; 0 where there is neither."""
    kind: LayerKind = LLAMA
    tensor: int = 1
    """Megatron's ranks, or mesh columns."""
    splits_tokens: bool = False
    """Whether Megatron's have different tokens between blocks."""
    mesh_rows: int = 0
    """0 where matrices do not lie on a mesh."""
    slices: tuple[int, ...] = (1, 1, 1, 1)
    """Of each product on a mesh: into attention, out of it, into the MLP, out of it."""
    experts: Experts | None = None
    trained: frozenset[str] = frozenset()
    """The names inside a layer of modules whose weights train."""
    adapted: frozenset[str] = frozenset()
    """Those of projections that have an adapter."""
    rank: int = 0
    """Of adapters."""
    dropout: bool = False
    state: StateHeads | None = None
    """The heads of a layer with a state and no attention."""
    tile: int | None = None
    """Tokens; None where MLPs and norms take all at once."""
    at_once: int | None = None
    """How many query heads of a KV head are attended with at once; None where all heads are."""
    recompute: str | None = None
    """What of attention is made again; None where the layer is not checkpointed."""
    offloads: bool = False
    copies: int = 1
    """Of a rank's tokens, which blocks take by turns."""
    puts_off: bool = True
    """Whether copies put off the gradients of weights, which are here as long as a layer runs."""
    first: bool = False
    """Whether there is no layer below, whose input comes from the host."""
    some_heads: bool = False
    """Whether norms over all heads see those of a tensor rank, where `tensor` does not say so."""
    use: str = ""
    """BEFORE or BEHIND, where projections make features for what attention takes, or for what
    follows it, and zeros for the rest; empty where for both."""

    @property
    def element(self) -> int:
        return self.sharing.element

    @property
    def wide(self) -> float:
        """How much larger float32 is than the type of the weights."""
        return WIDE / self.element

    @property
    def between(self) -> int:
        """The tokens between blocks."""
        tokens = self.sharing.tokens
        return -(-tokens // self.tensor) if self.splits_tokens else tokens

    @property
    def features(self) -> int:
        """Of a token between blocks."""
        return self.hidden // self.tensor if self.mesh_rows else self.hidden

    @property
    def trains(self) -> bool:
        """Whether any weight of the layer does."""
        experts = self.experts
        routed = experts and (experts.adapts_router or any(experts.adapted))
        return bool(self.trained or self.adapted or routed)

    @property
    def block(self) -> str:
        """The name of what mixes tokens."""
        return STATE_LAYER if self.state else "self_attn"

    @property
    def out(self) -> str:
        """The name of the projection out of it."""
        return self.state.out if self.state else OUT

    def inside(self, block: str) -> int:
        """Return the features that the projection out of a block takes."""
        if block == STATE_LAYER and self.state:
            return self.state.values
        return self.sharing.heads * self.sharing.dim if block == "self_attn" else self.inner

    @property
    def in_halves(self) -> bool:
        """Whether the MLP with its norm and residual is one function."""
        return bool(self.at_once) and not (self.tensor > 1 and self.kind.norms.behind_attention)

    @property
    def whole_first(self) -> bool:
        """Whether attention with its norms and residual is one too."""
        return self.in_halves and not (self.splits_tokens and (self.kind.gated or self.state))

    @property
    def gathers(self) -> bool:
        """Whether that puts the tokens of tensor ranks together itself."""
        return self.whole_first and self.splits_tokens and self.tensor > 1

    def of_tile(self, some: Any = None, use: str = "", *, split: bool = False) -> LayerSizes:
        """Return the layer as it takes a tile of tokens. some: other heads, as Sharing or
        StateHeads. use: what projections make features for. split: whether tensor ranks have parts
        of the tile."""
        sharing = some if isinstance(some, Sharing) else self.sharing
        state = some if isinstance(some, StateHeads) else self.state
        tokens = min(self.tile or sharing.tokens, sharing.tokens)
        of = replace(sharing, tokens=tokens)
        state = state and replace(state, tokens=tokens)
        ranks = self.tensor if split else 1
        alone = replace(self, sharing=of, state=state, tile=None, tensor=ranks, splits_tokens=split)
        return replace(alone, at_once=None, use=use, some_heads=self.tensor > 1)

    def weights(self, name: str, takes: int, gives: int) -> float:
        """Return the bytes of those weights of a projection that train."""
        own = takes * gives if name in self.trained else 0
        return float(self.element * (own + self.rank * (takes + gives) * (name in self.adapted)))

    def between_bytes(self) -> float:
        """Return the bytes of what is between blocks."""
        return float(self.between * self.features * self.element)

    def inside_bytes(self) -> float:
        """Return the bytes of all features of the tokens inside of blocks."""
        return float(self.sharing.tokens * self.hidden * self.element)

    def outputs(self, block: str) -> dict[str, int]:
        """Return the features that each projection into a block makes."""
        how = self.sharing
        queries, keys = how.heads * how.dim, how.kv_heads * how.dim
        if block == "self_attn" and self.kind.fused:
            return {"self_attn.qkv_proj": queries + 2 * keys}
        if block == STATE_LAYER and self.state:
            return dict(self.state.into)
        if block == "self_attn":
            both = (1 + self.kind.gated) * queries
            kinds = {"q": both, "k": keys} | ({} if self.kind.keys_are_values else {"v": keys})
            return {f"self_attn.{one}_proj": size for one, size in kinds.items()}
        if self.kind.fused:
            return {"mlp.gate_up_proj": 2 * self.inner}
        into = {f"{self.mlp}.gate_proj": self.inner, f"{self.mlp}.up_proj": self.inner}
        return into | ({SHARED_GATE: 1} if self.mlp == SHARED_EXPERT else {})

    def made_share(self, name: str) -> float:
        """Return the share of a projection's features that are made and not zeros."""
        if not self.use or name == self.out:
            return 1.0
        behind = float(name in (f"{STATE_LAYER}.in_proj_z", f"{STATE_LAYER}.g_proj"))
        if name == "self_attn.q_proj" and self.kind.gated:
            behind = 0.5
        elif name == f"{STATE_LAYER}.in_proj_qkvz" and self.state:
            behind = self.state.values / dict(self.state.into)[name]
        return behind if self.use == BEHIND else 1.0 - behind

    @property
    def mlp(self) -> str:
        """The name of what every token meets."""
        return self.kind.shared if self.experts else "mlp"
