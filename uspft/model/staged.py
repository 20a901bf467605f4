"""The stages of a model that one rank of a pipeline has, as the one module that its engine has."""

from __future__ import annotations

import copy
from collections.abc import Collection
from types import SimpleNamespace
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
    """The stages of one rank: forward takes one of them, and the last one gives an objective's
    terms.

    Registered are the parameters of these stages alone; `named` has those of the whole model.
    """

    parts: CausalModel

    def __init__(self, parts: CausalModel, objective: Any, stages: Stages, place: int) -> None:
        """place: this rank's along the pipeline."""
        super().__init__()
        self.objective, self._last = objective, stages.count - 1
        self.idle: nn.Parameter | None = None
        """What trains in a stage where nothing else does."""
        self._bare: frozenset[int] = frozenset()
        self.__dict__["parts"] = parts  # of which other ranks' parameters are no concern of ours
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
        """Add a parameter of one element, always 0, for an engine that wants one in each backward.

        bare: the stages of this rank in whose backward no other takes part.
        """
        device = self.parts.model.device
        self.idle = nn.Parameter(torch.zeros(1, dtype=self.parts.model.dtype, device=device))
        self._bare = frozenset(bare)

    def forward(
        self, batch: Batch, scales: tuple[float | None, ...], stage: int | None, x: Tensor | None
    ) -> Tensor:
        """Take a micro-batch through a stage; return what enters the next one, or of the last the
        objective's terms, [terms].

        stage: None for the idle parameter alone, as `nothing`. x: what the stage before made; None
        before the first.
        """
        if stage is None:
            return self.nothing()
        made = self._made(batch, scales, stage, x)
        if stage not in self._bare or self.idle is None:
            return made
        nothing = torch.zeros_like(self.idle)  # the gradient of what the stage does not use
        found: Tensor = with_backward(
            lambda made, _: made.view_as(made), lambda dmade: (dmade, nothing), made, self.idle
        )
        return found

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
        """Return 0 as a float32 scalar, with a gradient of 0 for all of this rank that trains."""
        every = [p.flatten()[0].float() for p in self.parameters() if p.requires_grad]
        return torch.stack(every).sum() * 0.0

    def hidden_buffer(self, batch: Batch) -> Tensor:
        """Return memory for what stages of this rank take from others of a micro-batch."""
        tokens, world = batch.input_ids.shape[1], batch.world
        columns, features = world.layout.mesh_columns, self.parts.model.config.hidden_size
        if world.tensor.splits_tokens:
            tokens = -(-tokens // columns)
        if world.layout.is_mesh:
            features //= columns
        dtype = self.parts.model.dtype
        return torch.empty(1, tokens, features, dtype=dtype, device=batch.input_ids.device)

    def copy_head(self, table: Tensor) -> None:
        """Have the last stage's head use a copy of a table that another rank trains."""
        head = self.parts.head_of_loss
        projection: Any = SimpleNamespace(weight=table, bias=None)
        self.head = self.parts.head_of_loss = Head(projection, head.tile, head.logits)

    def named(self) -> dict[str, nn.Parameter]:
        """Return every parameter of the model once, by its Hugging Face name; those of other ranks'
        stages have no elements."""
        return self._named


class _OfStage:
    """A causal language model whose layers are those of one stage."""

    def __init__(self, parts: CausalModel, base: Any, x: Tensor | None) -> None:
        self._parts, self._base, self._x = parts, base, x
        self.begin, self.head = parts.begin, parts.head

    def embedding(self, of: ForwardPass) -> Tensor:
        """Return what the stage's first layer takes."""
        return self._parts.embedding(of) if self._x is None else self._x

    def layers(self, of: ForwardPass, x: Tensor, *, routers: bool = False) -> Layered:
        return self._parts.layers(of, x, routers=routers, base=self._base)


def cut_layers(base: Any, layers: range) -> Any:
    """Return a base model (`model.base_model`) that takes hidden states through some layers.

    They are the base model's own layers; what the first takes enters as `inputs_embeds`, and after
    the last layer comes the final norm, after others nothing. The base model itself is left as it
    is. Raises ValueError for a family of which it is not known what its stages need.
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
    # The layers keep the whole config: by it they are made, and it names their attention.
    found.config = copy.deepcopy(base.config)
    found.config.num_hidden_layers = len(layers)
    for field in needs.by_layer:
        every = getattr(base.config, field)
        setattr(found.config, field, every and every[layers.start : layers.stop])
    for attribute, value in needs.after_first.items() if layers.start else ():
        setattr(found, attribute, value)
    return found
