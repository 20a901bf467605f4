"""ZeRO 0 to 3 behind one step whose loss and gradients are those of one process.

The scale is ours: each rank's loss is (sum over its target tokens) × ranks ÷ (target tokens of the
step, over all micro-batches and ranks), and DeepSpeed averages gradients over all ranks at every
stage. Sequence parallelism stays hidden from it, since its own scale depends on the stage. The
routers' loss likewise: each rank's parts of its rows' losses × ranks ÷ rows of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import nn

from uspft.comm import total
from uspft.config.problems import RunFailed
from uspft.engine.deepspeed_config import deepspeed_config, micro_batches

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.config import Recipe
    from uspft.model.build import Partition
    from uspft.model.causal import CausalLoss
    from uspft.world import World


class NotFinite(RunFailed):
    """The loss or the gradient norm is not a finite number; nothing was updated."""


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the step's targets; grad_norm: before clipping; stop: a rank asked to;
    router_loss: mean over the step's rows, None where the model has none or it is not asked for."""

    loss: float
    grad_norm: float
    targets: int
    stop: bool
    skipped: bool
    router_loss: float | None = None


def partitioner(config: dict[str, Any]) -> Partition | None:
    """What takes filled parameters apart over all ranks, under ZeRO-3; None at other stages."""
    if config["zero_optimization"]["stage"] != 3:
        return None

    def partition(parameters: list[nn.Parameter]) -> None:
        deepspeed.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=config)

    return partition


class ZeroEngine:
    """A DeepSpeed engine that takes lists of micro-batches."""

    def __init__(self, module: CausalLoss, recipe: Recipe, world: World) -> None:
        self.module, self.world = module, world
        self.stage: int = recipe.deepspeed.zero_optimization.get("stage", 1)
        self.passes = micro_batches(recipe, world.layout)
        options = recipe.optimizer
        optimizer = torch.optim.AdamW(
            _groups(module, options.weight_decay),
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
            fused=True,  # else every step allocates 4 or 8 bytes more for each parameter here
        )
        with redirect_stdout(StringIO()):  # it prints memory tables past its logger
            self.deepspeed, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=deepspeed_config(recipe, world.layout)
            )
        self._require_float32_buffers()
        self.masters = self._masters()
        if self.stage < 3:
            self._make_moments()

    def _masters(self) -> dict[int, nn.Parameter]:
        """By parameter's id what AdamW holds for it, at stage 0: itself, or its float32 copy."""
        optimizer: Any = self.deepspeed.optimizer
        if self.stage > 0:
            return {}
        if optimizer is self.adam:
            return {id(p): p for p in self.module.parameters() if p.requires_grad}
        pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
        return {id(half): full for half, full in pairs}

    def _require_float32_buffers(self) -> None:
        """Rotary frequencies rounded to bfloat16 are silently wrong on long rows."""
        for name, buffer in self.module.named_buffers():
            if buffer.is_floating_point() and buffer.dtype != torch.float32:
                raise RuntimeError(f"buffer {name} is {buffer.dtype}: DeepSpeed has rounded it")

    def _make_moments(self) -> None:
        """Give Adam its states now: DeepSpeed finds moments by parameter only for those groups that
        have them after the first group's first step (stages 1 and 2, 0.19.8)."""
        for group in self.adam.param_groups:
            for parameter in group["params"]:
                zeros = [torch.zeros_like(parameter) for _ in range(2)]
                count = torch.zeros((), device=parameter.device)
                state = {"step": count, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
                self.adam.state[parameter] = state

    @property
    def adam(self) -> torch.optim.Optimizer:
        """torch's AdamW, whose states DeepSpeed may hold in flat partitions."""
        optimizer: Any = self.deepspeed.optimizer
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        return inner

    def step(self, batches: Sequence[Batch], learning_rate: float, stop: bool) -> StepResult:
        """One optimizer step over this rank's micro-batches; collective.

        Raises NotFinite before anything is updated.
        """
        tokens, device = self.world.mesh.tokens, self.world.device
        rows_here = sum(index >= 0 for batch in batches for index in batch.rows)
        targets, rows = total([sum(b.targets for b in batches), rows_here], tokens, device)
        rows /= self.world.mesh.context.size  # all that share a row have counted it
        scale = tokens.size / max(targets, 1.0)
        router_scale = tokens.size / max(rows, 1.0) if self.module.routed else None
        loss_sums = torch.zeros(2, dtype=torch.float64, device=device)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        for micro, batch in enumerate(batches):
            losses = self.deepspeed(batch, self.world, scale, router_scale)
            loss_sums += losses.detach()
            # Another tensor than forward returned: that one DeepSpeed would divide by the passes.
            self.deepspeed.backward(losses.sum(), scale_wrt_gas=False)
            if micro + 1 < len(batches):
                self.deepspeed.step()
        *loss_totals, stops = total([*loss_sums.tolist(), float(stop)], tokens, device)
        mean, router = (value / tokens.size for value in loss_totals)
        if not math.isfinite(mean):
            raise NotFinite(f"the loss is {mean}")
        grad_norm, skipped = self._update()
        router_loss = router if self.module.routed else None
        return StepResult(mean, grad_norm, int(targets), stops > 0, skipped, router_loss)

    def _update(self) -> tuple[float, bool]:
        """(gradient norm before clipping, whether float16 skipped the update)."""
        optimizer: Any = self.deepspeed.optimizer
        norm = None
        if self.stage == 0 and optimizer is self.adam:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]
            norm = float(torch.stack(norms).norm())
            self._must_be_finite(norm)
        self.deepspeed.step()
        if norm is None:
            norm = float(self.deepspeed.get_global_grad_norm())
        if getattr(optimizer, "overflow", False):
            if self.deepspeed.fp16_enabled():
                return norm, True
            norm = math.inf
        self._must_be_finite(norm)
        return norm, False

    @staticmethod
    def _must_be_finite(norm: float) -> None:
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient norm is {norm}")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Forward passes alone: inside no gradient, after it everything as it was; collective."""
        self.deepspeed.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.deepspeed.train()
            # Under ZeRO-3 the last pass has fetched weights for a backward that does not come.
            self.deepspeed.empty_partition_cache()
            self.world.books.close()  # no training step's bytes

    def loss_sum(self, batch: Batch) -> float:
        """Cross-entropy summed over this rank's targets, inside `evaluating`; collective."""
        return float(self.deepspeed(batch, self.world, 1.0)[0])

    def close(self) -> None:
        """Release what DeepSpeed hooked into the module."""
        self.deepspeed.destroy()


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What trains; 1-D parameters are not decayed. Partitioned ones look 1-D: ask for their
    shape."""
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in filter(lambda p: p.requires_grad, module.parameters()):
        shape = getattr(parameter, "ds_shape", parameter.shape)
        (decay if len(shape) > 1 else plain).append(parameter)
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
