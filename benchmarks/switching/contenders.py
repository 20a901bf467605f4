"""What takes part: layouts that are switched, each layout alone, DeepSpeed's Ulysses, the bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Degrees = Mapping[str, Any]

BOUND = "computation and state alone"
PEER = "DeepSpeed's Ulysses"
SWITCHED, STATIC, CHOSEN = "switched", "static", "chosen"


@dataclass(frozen=True)
class Contender:
    """Rows of each length under a layout.

    strategies: a bucket's row length as a share of the longest row, 1 / the key, and its degrees.
    """

    kind: str
    family: str
    """What a switched one is compared with: the static ones of the same family."""
    strategies: Mapping[int, Degrees]
    moves: bool = False
    straight: bool = False
    """Whether weights move from layout to layout as in HotSPa, and not by their owners."""
    zero3: bool = field(default=False)
    """Whether it is also run under ZeRO-3."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Contender:
        """Return it from what JSON keeps of it."""
        shares = {int(share): one for share, one in record["strategies"].items()}
        return cls(**{**record, "strategies": shares})

    def degrees(self) -> list[int]:
        """Return the tensor degrees that it has, rising."""
        return sorted({one.get("model_parallel", 1) for one in self.strategies.values()})


def contenders(ranks: int) -> dict[str, Contender]:
    """Return them by name.

    A rank holds at most 1 / ranks of the longest row at once, however it is shared; the bound alone
    does not keep to that.
    """
    found = {
        f"Ulysses {_degrees(ranks)}": Contender(
            SWITCHED, "ulysses", _halved(ranks, _ulysses), zero3=True
        ),
        f"ring {_degrees(ranks)}": Contender(SWITCHED, "ring", _halved(ranks, _ring)),
        f"planned {ranks}, 1": Contender(
            SWITCHED, "planned", {ranks: {}, 1: _shared(ranks, "planned_cp")}
        ),
        f"tensor {_degrees(ranks)} in place": Contender(
            SWITCHED, "tensor", _halved(ranks, _tensor), zero3=True
        ),
        f"tensor {_degrees(ranks)} moved by owners": Contender(
            SWITCHED, "tensor", _halved(ranks, _tensor), moves=True
        ),
        f"tensor {_degrees(ranks)} moved straight": Contender(
            SWITCHED, "tensor", _halved(ranks, _tensor), moves=True, straight=True
        ),
        f"static Ulysses {ranks}": Contender(STATIC, "ulysses", {1: _ulysses(ranks)}, zero3=True),
        f"static ring {ranks}": Contender(STATIC, "ring", {1: _ring(ranks)}),
        f"static all-gather {ranks}": Contender(
            STATIC, "gather", {1: _shared(ranks, "allgather_cp")}
        ),
        f"static planned {ranks}": Contender(
            STATIC, "planned", {1: _shared(ranks, "planned_cp")}, zero3=True
        ),
        f"static tensor {ranks}": Contender(STATIC, "tensor", {1: _tensor(ranks)}),
        f"static tensor 2 × planned {ranks // 2}": Contender(
            STATIC, "both", {1: {**_shared(ranks // 2, "planned_cp"), **_tensor(2)}}
        ),
        f"static tensor 2 × Ulysses {ranks // 2}": Contender(
            STATIC, "both", {1: {**_ulysses(ranks // 2), **_tensor(2)}}
        ),
        f"{PEER} {ranks}": Contender(PEER, "ulysses", {1: {}}, zero3=True),
        BOUND: Contender(BOUND, "none", {degree: {} for degree in _powers(ranks)}),
    }
    if ranks > 4:  # the machine's cores are shared by as many ranks: less is enough
        for name in ("all-gather", f"tensor 2 × Ulysses {ranks // 2}"):
            found.pop(f"static {name}" if "×" in name else f"static {name} {ranks}")
    return found


def _degrees(ranks: int) -> str:
    return ", ".join(map(str, reversed(_powers(ranks))))


def _powers(ranks: int) -> list[int]:
    return [1 << i for i in range(ranks.bit_length()) if 1 << i <= ranks]


def _halved(ranks: int, layout: Any) -> dict[int, Degrees]:
    """Return layouts of halved degrees for rows of halved lengths, so that ranks hold as much."""
    return {ranks // degree: layout(degree) for degree in _powers(ranks)}


def _shared(degree: int, algorithm: str) -> dict[str, Any]:
    if degree == 1:
        return {}
    return {"context_parallel": degree, "context_parallel_algo": algorithm}


def _ulysses(degree: int) -> dict[str, Any]:
    return _shared(degree, "ulysses_cp")


def _ring(degree: int) -> dict[str, Any]:
    return _shared(degree, "ring_cp")


def _tensor(degree: int) -> dict[str, Any]:
    return {"model_parallel": degree, "use_seq_parallel": True} if degree > 1 else {}
