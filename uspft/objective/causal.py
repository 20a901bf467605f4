"""The cross-entropy of each next token, and the load-balancing loss of routers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from uspft.comm import sum_over
from uspft.model.router import router_loss
from uspft.model.tiles import own_tokens
from uspft.objective import ROWS, TARGETS, Scales, Term

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.batch import Batch
    from uspft.model.causal import CausalModel, Layered

LOSS = Term("loss", TARGETS)
ROUTERS = Term("router_loss", ROWS, evaluated=False)


class Causal:
    """The mean cross-entropy over a step's targets; of models whose config asks for it
    (`output_router_logits`), plus the mean over its rows of the routers' loss."""

    def __init__(self, config: Any) -> None:
        self._config = config
        routed = getattr(config, "output_router_logits", False)
        self.terms = (LOSS, ROUTERS) if routed else (LOSS,)

    def __call__(self, model: CausalModel, batch: Batch, scales: Scales) -> Tensor:
        scale, *of_routers = scales
        call = model.begin(batch)
        found = model.layers(call, model.embedding(call), routers=of_routers not in ([], [None]))
        loss = model.head(call, found.hidden, scale)
        balance = [
            torch.zeros_like(loss) if factor is None else self._balance(found, batch, factor)
            for factor in of_routers
        ]
        return torch.stack([loss, *balance])

    def _balance(self, found: Layered, batch: Batch, scale: float) -> Tensor:
        config, rows, mesh = self._config, len(batch.rows), batch.world.mesh
        top_k, row_of = config.num_experts_per_tok, batch.row_of
        groups = [mesh.context]
        if batch.world.tensor.splits_tokens:
            row_of = own_tokens(row_of, mesh.columns, -1)
            groups.append(mesh.columns)
        part = router_loss(found.router_logits, row_of, rows, top_k, groups)
        part = part * (config.router_aux_loss_coef * scale)
        if len(groups) == 1:
            return part
        # The value counts on one of the tensor ranks, but each gets the gradient of its own tokens.
        whole = sum_over(part.detach().clone(), mesh.columns, "router")
        return part + (whole - part).detach()

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        loss = means["loss"]
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}

    def loss_of_guessing(self, vocabulary: int) -> float | None:
        return math.log(vocabulary)
