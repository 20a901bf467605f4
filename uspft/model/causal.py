"""A causal language model as the three functions from which objectives and pipeline stages are
built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from uspft.layout import Layout
from uspft.model.attention import Bound
from uspft.model.grid import SplitEmbedding, whole_table
from uspft.model.loss import Head, Logits, Vocabulary
from uspft.model.offload import HostShelf
from uspft.model.parallel import vocabulary_of
from uspft.model.recompute import Recompute
from uspft.model.tiles import own_tokens
from uspft.parameters.names import plain_name

if TYPE_CHECKING:
    from uspft.batch import Batch


ALONE = Layout()
"""The layout of one rank, without any split."""


class ForwardPass(NamedTuple):
    """One forward pass over a micro-batch, as returned by `CausalModel.begin`."""

    batch: Batch
    bound: Bound
    vocabulary: Vocabulary | None
    """The part of the vocabulary on this tensor rank; None: all of it."""


class Layered(NamedTuple):
    """The output of the layers for a micro-batch."""

    hidden: Tensor
    """The last layer's output after the final norm, [1, T', d]; split as between blocks."""
    router_logits: tuple[Tensor, ...]
    """Of each layer with experts, if requested."""


def _between(of: ForwardPass) -> Tensor:
    """Return the token ids [1, T'] of this rank's tokens between blocks."""
    ids, world = of.batch.input_ids, of.batch.world
    return own_tokens(ids[0], world.mesh.columns)[None] if world.tensor.splits_tokens else ids


class CausalModel(nn.Module):
    """A Hugging Face causal language model over this rank's share of the tokens, as three
    functions: `embedding`, `layers` and `head`, each of which takes the pass that `begin` returned.
    """

    def __init__(
        self,
        model: Any,
        tile: int | None,
        held: Layout | None = ALONE,
        recompute: Recompute | None = None,
        *,
        offload: bool = False,
    ) -> None:
        """tile: as in Head. held: the layout in which matrices are stored; None if it is always
        that of the call. recompute: what of attention checkpointed layers recompute; None if layers
        are not checkpointed. offload: whether what these save is moved to the host."""
        super().__init__()
        self.model, self._held, self._recompute = model, held, recompute
        self._padding: int | None = model.get_input_embeddings().padding_idx
        self._offload = offload
        head = model.get_output_embeddings()
        assert head.bias is None  # of every family; one that has a bias is refused
        self.head_of_loss = Head(head.weight, tile, Logits.of(model.config))

    def begin(self, batch: Batch) -> ForwardPass:
        """Begin a forward pass over a micro-batch; what is saved for its backward belongs to it
        alone."""
        recompute = self._recompute if self.training else None
        shelf = HostShelf(batch.input_ids.device) if recompute and self._offload else None
        real = batch.row_of >= 0
        bound = Bound(
            batch.world,
            batch.share,
            batch.tokens,
            recompute=recompute,
            shelf=shelf,
            real=real,
            keys=batch.keys,
        )
        vocabulary = vocabulary_of(batch.world, self.model.config.vocab_size, self._held)
        self._place_padding(vocabulary)
        return ForwardPass(batch, bound, vocabulary)

    def embedding(self, of: ForwardPass) -> Tensor:
        """Return the first layer's input, [1, T', d], from this rank's rows of the embedding."""
        batch, bound, vocabulary = of
        embedding = self.model.get_input_embeddings()
        of_call = (bound,) if isinstance(embedding, SplitEmbedding) else ()
        if vocabulary is None:
            found: Tensor = embedding(batch.input_ids, *of_call)
            return found
        places, others = vocabulary.local(batch.input_ids)
        own: Tensor = embedding(places + vocabulary.offset, *of_call)
        return bound.leave(own.masked_fill(others[..., None], 0.0))

    def layers(
        self, of: ForwardPass, x: Tensor, *, routers: bool = False, base: Any = None
    ) -> Layered:
        """Run all layers and the final norm.

        x: the result of `embedding`; callers should not keep a reference, so that an offloaded
        input frees device memory. routers: whether to return the router logits. base: the model
        with the layers to run, if not all.
        """
        # ZeRO-3 prefetches by the order of modules, which must not depend on how rows are split,
        # since ranks with rows of other layouts fetch together with this one.
        config_asks = getattr(self.model.config, "output_router_logits", False)
        base = base or self.model.base_model
        more = {"output_router_logits": routers} if routers or config_asks else {}
        if getattr(base, "hidden_size_per_layer_input", 0):
            more["per_layer_inputs"] = base.get_per_layer_inputs(_between(of), None)
        found = base(
            inputs_embeds=x,
            position_ids=of.batch.position_ids,
            use_cache=False,
            uspft=of.bound,
            **more,
        )
        if of.bound.shelf:
            of.bound.shelf.left()
        return Layered(found.last_hidden_state, found.router_logits if routers else ())

    def head(self, of: ForwardPass, hidden: Tensor, scale: float | None) -> Tensor:
        """Return the cross-entropy summed over this rank's targets, times scale; if scale is None,
        each target's, [C].

        hidden: from `layers`.
        """
        batch, bound, vocabulary = of
        config, held = self.model.config, self._held
        on_mesh = batch.world.layout.is_mesh
        whole = (lambda w: whole_table(w, bound, config, held)) if on_mesh else None
        found: Tensor = self.head_of_loss(
            bound.enter(hidden)[0],
            batch.labels,
            batch.chosen,
            scale,
            vocabulary=vocabulary,
            whole=whole,
        )
        return found

    def _place_padding(self, vocabulary: Vocabulary | None) -> None:
        """Set which of the embedding's rows in this call is the padding token's, if any; it has no
        gradient."""
        padding = self._padding
        if vocabulary and padding is not None:
            row = padding - vocabulary.first
            padding = row + vocabulary.offset if 0 <= row < vocabulary.rows else None
        self.model.get_input_embeddings().padding_idx = padding

    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, by its Hugging Face name."""
        names = getattr(self.model, "parameter_names", {})
        return {
            names.get(id(value)) or plain_name(name): value
            for name, value in self.model.named_parameters()
        }
