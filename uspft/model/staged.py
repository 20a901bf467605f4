"""The pipeline stages of one rank, as the single module that its engine trains."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from uspft.comm import with_backward
from uspft.families.table import FAMILIES
from uspft.model.causal import CausalModel, ForwardPass, Layered
from uspft.model.loss import Head

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.pipeline.stages import Stages


class StagedModel(nn.Module):
    """The stages of one rank: forward runs one of them; the last stage returns an objective's
    terms.

    Only the parameters of these stages are registered; `named` has those of the whole model.
    """

    parts: CausalModel

    def __init__(self, parts: CausalModel, objective: Any, stages: Stages, place: int) -> None:
        """place: this rank's pipeline index."""
        super().__init__()
        self.objective, self._last = objective, stages.count - 1
        self.idle: nn.Parameter | None = None
        """A dummy parameter for stages without trained parameters."""
        self._bare: frozenset[int] = frozenset()
        self.__dict__["parts"] = parts  # not registered: it includes other ranks' parameters
        self._named = parts.named()
        base = parts.model.base_model
        mine = range(place, stages.count, stages.ranks)
        self.stages = nn.ModuleDict({str(s): cut_layers(base, stages.layers(s)) for s in mine})
        if 0 in mine:
            self.table = parts.model.get_input_embeddings()
        if self._last in mine:
            self.head = parts.head_of_loss

    def train(self, mode: bool = True) -> StagedModel:
        super().train(mode)
        self.parts.train(mode)
        return self

    def add_idle(self, bare: Collection[int]) -> None:
        """Add a dummy parameter of one element, always 0, for an engine that needs one in each
        backward.

        bare: the stages of this rank without trained parameters.
        """
        device = self.parts.model.device
        self.idle = nn.Parameter(torch.zeros(1, dtype=self.parts.model.dtype, device=device))
        self._bare = frozenset(bare)

    def forward(
        self, batch: Batch, scales: tuple[float | None, ...], stage: int | None, x: Tensor | None
    ) -> Tensor:
        """Run a stage on a micro-batch; return the next stage's input, or in the last stage the
        objective's terms, [terms].

        stage: None runs only the dummy parameter, as `nothing`. x: the output of the stage before;
        None in the first.
        """
        if stage is None:
            return self.nothing()
        made = self._made(batch, scales, stage, x)
        if stage not in self._bare or self.idle is None:
            return made
        nothing = torch.zeros_like(self.idle)  # the gradient of the unused dummy parameter
        return with_backward(
            lambda made, _: made.view_as(made), lambda dmade: (dmade, nothing), made, self.idle
        )

    def _made(
        self, batch: Batch, scales: tuple[float | None, ...], stage: int, x: Tensor | None
    ) -> Tensor:
        of_stage = _OfStage(self.parts, self.stages[str(stage)], x)
        if stage == self._last:
            terms: Tensor = self.objective(of_stage, batch, scales)
            return terms
        call = of_stage.begin(batch)
        return of_stage.layers(call, of_stage.embedding(call)).hidden

    def nothing(self) -> Tensor:
        """Return 0 as a float32 scalar that gives all trained parameters of this rank a gradient of
        0."""
        every = [p.flatten()[0].float() for p in self.parameters() if p.requires_grad]
        return torch.stack(every).sum() * 0.0

    def hidden_buffer(self, batch: Batch) -> Tensor:
        """Return an empty tensor for a micro-batch's hidden states received from another rank."""
        tokens, world = batch.input_ids.shape[1], batch.world
        columns, features = world.layout.mesh_columns, self.parts.model.config.hidden_size
        if world.tensor.splits_tokens:
            tokens = -(-tokens // columns)
        if world.layout.is_mesh:
            features //= columns
        dtype = self.parts.model.dtype
        return torch.empty(1, tokens, features, dtype=dtype, device=batch.input_ids.device)

    def copy_head(self, table: Tensor) -> None:
        """Make the last stage's head use a copy of tied embeddings that another rank trains."""
        head = self.parts.head_of_loss
        self.head = self.parts.head_of_loss = Head(table, head.tile, head.logits)

    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter of the model once, by its Hugging Face name; those of other ranks'
        stages have no elements."""
        return self._named


class _OfStage:
    """A causal language model with only the layers of one stage."""

    def __init__(self, parts: CausalModel, base: Any, x: Tensor | None) -> None:
        self._parts, self._base, self._x = parts, base, x
        self.begin, self.head = parts.begin, parts.head

    def embedding(self, of: ForwardPass) -> Tensor:
        """Return the input of the stage's first layer."""
        return self._parts.embedding(of) if self._x is None else self._x

    def layers(self, of: ForwardPass, x: Tensor, *, routers: bool = False) -> Layered:
        return self._parts.layers(of, x, routers=routers, base=self._base)


def cut_layers(base: Any, layers: range) -> Any:
    """Return a base model (`model.base_model`) that runs hidden states through some layers.

    The layers are shared with the base model; the input is `inputs_embeds`, and the final norm
    follows only the last layer. The base model itself is unchanged. Raises ValueError for a family
    whose forward is not known to support that.
    """
    family = FAMILIES.get(base.config.model_type)
    needs = family.cut if family else None
    if needs is None:
        raise ValueError(f"stages of model_type `{base.config.model_type}` are not available yet")
    found = copy.copy(base)
    for registered in ("_modules", "_forward_hooks", "_forward_pre_hooks"):
        found.__dict__[registered] = copy.copy(base.__dict__[registered])
    found.layers = nn.ModuleList(base.layers[layers.start : layers.stop])
    del found.embed_tokens
    if layers.stop < len(base.layers):
        found.norm = nn.Identity()
    # the layers keep the whole config, since it describes all of them and names their attention
    found.config = copy.deepcopy(base.config)
    found.config.num_hidden_layers = len(layers)
    for field in needs.by_layer:
        every = getattr(base.config, field)
        setattr(found.config, field, every and every[layers.start : layers.stop])
    for attribute, value in needs.after_first.items() if layers.start else ():
        setattr(found, attribute, value)
    return found
