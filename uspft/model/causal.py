"""A causal language model and its loss as the one module that the engine trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from uspft.layout import Layout
from uspft.model.attention import Bound
from uspft.model.grid import SplitEmbedding, whole_table
from uspft.model.loss import Head, Logits, Vocabulary
from uspft.model.offload import HostShelf
from uspft.model.parallel import vocabulary_of
from uspft.model.recompute import Recompute
from uspft.model.router import router_loss
from uspft.parameters.names import plain_name

if TYPE_CHECKING:
    from uspft.batch import Batch


ALONE = Layout()
"""The layout of one rank, which holds all of every matrix."""


class CausalLoss(nn.Module):
    """A Hugging Face causal language model with its loss, over this rank's share of the tokens."""

    def __init__(
        self,
        model: Any,
        tile: int | None,
        held: Layout | None = ALONE,
        recompute: Recompute | None = None,
        *,
        offload: bool = False,
    ) -> None:
        """tile: as of Head. held: the layout in which the model's matrices are held; None where it
        is that of each call's rows. recompute: what of attention checkpointed layers make again;
        None where layers are not checkpointed. offload: whether what these keep waits on the
        host."""
        super().__init__()
        self.model, self._held, self._recompute = model, held, recompute
        self._padding: int | None = model.get_input_embeddings().padding_idx if not held else None
        self._offload = offload
        self.head = Head(model.get_output_embeddings(), tile, Logits.of(model.config))
        self.routed: bool = getattr(model.config, "output_router_logits", False)

    def forward(self, batch: Batch, scale: float, router_scale: float | None = None) -> Tensor:
        """Return this rank's two losses, [2].

        They are the sum of the cross-entropy over this rank's target tokens, times scale, and this
        rank's part of the routers' loss summed over rows, times router_scale; 0 where that is None.
        """
        wanted: dict[str, Any] = {}
        if self.routed:
            wanted["output_router_logits"] = router_scale is not None
        recompute = self._recompute if self.training else None
        shelf = HostShelf(batch.input_ids.device) if recompute and self._offload else None
        bound = Bound(batch.world, batch.share, batch.tokens, recompute=recompute, shelf=shelf)
        vocabulary = vocabulary_of(batch.world, self.model.config.vocab_size, self._held)
        if not self._held:
            self._place_padding(vocabulary)
        # ZeRO-3 fetches ahead by the order of modules: it must not depend on how rows are split,
        # since ranks with rows of other layouts fetch together with this one.
        found = self.model.base_model(
            # No name holds it here: where it waits on the host, the loss has its memory.
            inputs_embeds=self._embedded(batch, vocabulary, bound),
            position_ids=batch.position_ids,
            use_cache=False,
            uspft=bound,
            **wanted,
        )
        hidden = bound.enter(found.last_hidden_state)[0]
        config, held = self.model.config, self._held
        on_mesh = batch.world.layout.is_mesh
        whole = (lambda w: whole_table(w, bound, config, held)) if on_mesh else None
        loss: Tensor = self.head(
            hidden, batch.labels, batch.chosen, scale, vocabulary=vocabulary, whole=whole
        )
        if router_scale is None:
            return torch.stack([loss, torch.zeros_like(loss)])
        return torch.stack([loss, self._router_loss(found.router_logits, batch, router_scale)])

    def _embedded(self, batch: Batch, vocabulary: Vocabulary | None, bound: Bound) -> Tensor:
        """Return what the first layer takes, of tokens and of the table's rows that are here."""
        embedding = self.model.get_input_embeddings()
        of_call = (bound,) if isinstance(embedding, SplitEmbedding) else ()
        if vocabulary is None:
            found: Tensor = embedding(batch.input_ids, *of_call)
            return found
        places, others = vocabulary.local(batch.input_ids)
        own: Tensor = embedding(places + vocabulary.offset, *of_call)
        return bound.leave(own.masked_fill(others[..., None], 0.0))

    def _place_padding(self, vocabulary: Vocabulary | None) -> None:
        """Tell the embedding which of its rows in this call, if any, is the padding token's, which
        has no gradient."""
        here, padding = (vocabulary.first, vocabulary.rows) if vocabulary else None, self._padding
        if here and padding is not None:
            padding = padding - here[0] if 0 <= padding - here[0] < here[1] else None
        self.model.get_input_embeddings().padding_idx = padding

    def _router_loss(self, logits: tuple[Tensor, ...], batch: Batch, scale: float) -> Tensor:
        config, rows = self.model.config, len(batch.rows)
        top_k, group = config.num_experts_per_tok, batch.world.mesh.context
        part = router_loss(logits, batch.row_of, rows, top_k, group)
        return part * (config.router_aux_loss_coef * scale)

    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by its Hugging Face name."""
        names = getattr(self.model, "parameter_names", {})
        return {
            names.get(id(value)) or plain_name(name): value
            for name, value in self.model.named_parameters()
        }
