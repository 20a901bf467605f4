"""Which published runs had room, by the memory of the program that ran them.

It is Megatron-LM's with TransformerEngine: ZeRO-1 over data × context, bfloat16 weights beside
float32 gradients, nothing recomputed, tokens divided between the matrices of tensor ranks. uspft's
own memory is planner/memory/formula.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.planning.cases import TABLES

CARD_BYTES, USABLE_SHARE = 85.1e9, 0.92
"""Of an A800, as torch reports it, and what of it tensors may fill."""


def verdicts() -> list[tuple[Mapping[str, Any], float, bool]]:
    """Return every run that a paper says ran or did not, the bytes of a rank, and whether they have
    room."""
    found = []
    for run in TABLES["ran"]:
        needed = bytes_of(run)
        found.append((run, needed, needed <= USABLE_SHARE * CARD_BYTES))
    return found


def bytes_of(run: Mapping[str, Any]) -> float:
    """Return what a rank of a run needs."""
    model = TABLES["models"][run["model"]]
    hidden, inner = model["hidden"], model["inner"]
    query, kv = (model[key] * model["head_dim"] for key in ("heads", "kv_heads"))
    tensor, context = run["tensor"], run["ulysses"] * run["ring"]
    layer = 2 * hidden * query + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    outside = 2 * model["vocabulary"] * hidden + hidden
    parameters = (model["layers"] * layer + outside) / tensor
    state = (2 + 4 + 12 / (context * run["data"])) * parameters
    tokens = run["micro"] * run["tokens"] / context
    norms = hidden / tensor
    heads = max(model["kv_heads"] / tensor / run["ulysses"], 1) * model["head_dim"]
    kept = 4 * norms + 2 * query / tensor + 2 * heads * run["ulysses"]
    kept += 2 * model["heads"] / tensor + 3 * inner / tensor
    at_work = 3 * norms + 6 * inner / tensor + (2 * hidden if tensor > 1 else 0)
    logits = 10 * tokens * model["vocabulary"] / tensor
    return state + 2 * kept * tokens * model["layers"] + max(2 * at_work * tokens, logits)
