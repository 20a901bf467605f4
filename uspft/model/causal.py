"""Model and loss as the one module that the engine owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from uspft.model.attention import Bound
from uspft.model.loss import Head, Logits

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.world import World


class CausalLoss(nn.Module):
    """A Hugging Face causal language model with its loss, over this rank's share of the tokens."""

    def __init__(self, model: Any, tile: int | None) -> None:
        super().__init__()
        self.model = model
        self.head = Head(model.get_output_embeddings(), tile, Logits.of(model.config))

    def forward(self, batch: Batch, world: World, scale: float) -> Tensor:
        """Sum of the cross-entropy over this rank's target tokens, times scale."""
        hidden = self.model.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            uspft=Bound(
                world, batch.plan, twice=self.training and self.model.is_gradient_checkpointing
            ),
        ).last_hidden_state
        loss: Tensor = self.head(hidden[0], batch.labels, scale)
        return loss

    def named(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its Hugging Face name."""
        return dict(self.model.named_parameters())
