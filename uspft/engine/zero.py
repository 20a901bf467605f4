"""An engine that puts ZeRO 0 to 3 behind one step function, with the loss and gradients of one
process.

A step first sums the divisors of the objective's terms over all ranks, then runs its micro-batches,
and then computes the norm, checks it and updates. The engine scales the loss itself: for each term
a rank's loss is (its part) × Z ÷ (the divisor over all micro-batches and ranks; for the
cross-entropy, the target tokens), where DeepSpeed averages gradients over Z ranks at every stage
(parameters/counting.py). DeepSpeed does not know of sequence parallelism, since its own scale for
that depends on the stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
)
from torch import Tensor, nn

from uspft.comm import total
from uspft.engine.quarantine import (
    compare_traces_within,
    find_fragments_in_turn,
    forget_mpu,
    judge_norm,
    reduce_in_one_order,
    sum_norm_once,
)
from uspft.engine.replicas import ExpertSets, Replicas, mark_for_partition, mpu_of
from uspft.engine.state import GRADIENT, adamw, start_moments
from uspft.engine.step import (
    Engine,
    LossModule,
    StageRunner,
    in_turn,
)
from uspft.model.adapter import ParameterAdapter
from uspft.model.head_groups import WHOLE
from uspft.model.tiles import Tiled
from uspft.parameters import counting
from uspft.parameters.experts import is_experts
from uspft.parameters.names import layer_of

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.config.recipe import OptimizerBlock
    from uspft.objective import Scales
    from uspft.parameters.fill import Partition
    from uspft.parameters.shards import Holders


def partitioner(config: dict[str, Any], holders: Holders) -> Partition | None:
    """Return the function that partitions loaded parameters under ZeRO-3; None at other stages.

    Each is partitioned over the ranks with the same part of it. config: DeepSpeed's.
    """
    if config["zero_optimization"]["stage"] != 3:
        return None
    mpu = mpu_of(holders)
    group = {"mpu": mpu, "data_parallel_group": holders.zero.handle} if mpu else {}

    def partition(parameters: dict[str, nn.Parameter]) -> None:
        mark_for_partition(parameters, holders)
        module = nn.ParameterList(parameters.values())
        deepspeed.zero.Init(module=module, config_dict_or_path=config, **group)

    return partition


class ZeroEngine(Engine):
    """A DeepSpeed engine whose steps take lists of micro-batches."""

    def __init__(
        self,
        module: LossModule,
        config: dict[str, Any],
        options: OptimizerBlock,
        holders: Holders,
        device: torch.device,
        *,
        pipeline: StageRunner | None = None,
        switches: bool = False,
    ) -> None:
        """Build the engine. config: DeepSpeed's. pipeline: the runner of the module's stages, if it
        has only some. switches: whether ranks may run other layouts at the same time, so that
        autograd may compute the gradients of a layer in another order on each."""
        _gather_at_once(module)  # type: ignore[arg-type]
        together = _together(module, by_layer=switches)  # type: ignore[arg-type]
        self.module, self.holders, self.device = module, holders, device
        self.averaged = holders.zero.size  # parameters/counting.py
        zero = dict(config["zero_optimization"])
        self.stage: int = zero["stage"]
        self._pipeline = pipeline
        self.named = module.named()
        """Every parameter by its Hugging Face name, stored because traversing the module for each
        lookup would be slow. A parameter of which this rank stores nothing has no elements here."""
        here = {name: p for name, p in self.named.items() if _elements(p)}
        idle = [pipeline.idle] if pipeline and pipeline.idle is not None else []
        self._parameters = [*here.values(), *idle]
        optimizer = adamw(*_by_decay(self._parameters), options)
        self._experts = ExpertSets(here, holders, self.stage)
        self._experts.give_groups(module, optimizer)  # type: ignore[arg-type]
        mpu, self.replicas = mpu_of(holders), Replicas(here, holders)
        trains = [p for p in self._parameters if p.requires_grad]
        if self.stage:  # DeepSpeed allocates a bucket at once; a larger one would never be filled
            trained = sum(map(_elements, trains))
            zero["reduce_bucket_size"] = max(1, min(zero["reduce_bucket_size"], trained))
        with redirect_stdout(StringIO()):  # it prints memory tables without its logger
            self.deepspeed, *_ = deepspeed.initialize(
                model=module,
                optimizer=optimizer,
                config={**config, "zero_optimization": zero},
                mpu=mpu,
            )
        find_fragments_in_turn(self.deepspeed.optimizer)
        reduce_in_one_order(self.deepspeed.optimizer, together)
        whole: Any = self.deepspeed.optimizer
        self.adam = getattr(whole, "optimizer", whole)
        """torch's AdamW, whose states DeepSpeed may store in flat partitions."""
        layout = holders.shards.layout
        parts_of_experts = self.stage == 3 and layout.experts > 1 and layout.tensor > 1
        if self.stage and (layout.pipeline > 1 or parts_of_experts):
            sum_norm_once(self.deepspeed.optimizer, self.stage, holders.model, device)
        if self.stage == 3:
            compare_traces_within(self.deepspeed.optimizer, holders.zero)
        self._most = math.inf
        """The largest gradient norm with which the current step may update."""
        self._refused: float | None = None
        """The gradient norm for which the current step was refused."""
        if self.deepspeed.optimizer is not self.adam:
            judge_norm(self.deepspeed.optimizer, self.stage, self._judge)
        self._require_float32_buffers()
        self._masters = {} if self.stage else _masters(whole, self.adam)
        if self.stage < 3:
            # DeepSpeed finds moments by parameter only for groups that had them before the first
            # group's first step (stages 1 and 2, 0.19.8).
            start_moments(self.adam)
        if pipeline:
            pipeline.updated(self)

    def _require_float32_buffers(self) -> None:
        """Check that DeepSpeed has not rounded any buffer. Raises RuntimeError.

        Rotary frequencies rounded to bfloat16 are silently wrong on long rows.
        """
        for name, buffer in self.deepspeed.module.named_buffers():
            if buffer.is_floating_point() and buffer.dtype != torch.float32:
                raise RuntimeError(f"buffer {name} is {buffer.dtype}: DeepSpeed has rounded it")

    def fragment(self, name: str, kind: str) -> tuple[int, Tensor]:
        parameter: Any = self.named[name]
        if not _elements(parameter):
            return 0, parameter.detach().flatten()
        if not parameter.requires_grad:
            if kind != "weight":
                shape = tuple(parameter.shape)
                raise RuntimeError(f"a frozen parameter of shape {shape} has no {kind}")
            if not hasattr(parameter, "ds_id"):
                return 0, parameter.detach().flatten()
            return _unpadded(parameter, parameter.ds_tensor.detach())
        if kind == GRADIENT:
            start, made = self._gradient(parameter)
            return start, made.float()
        master = self._masters.get(id(parameter))
        if master is not None:
            held: Tensor = master.detach() if kind == "weight" else self.adam.state[master][kind]
            return 0, held.flatten()
        if hasattr(parameter, "ds_id"):
            if kind == "weight":
                value = safe_get_local_fp32_param(parameter)
            else:
                value = safe_get_local_optimizer_state(parameter, kind)
            return _unpadded(parameter, value)
        mapping: Any = parameter._hp_mapping
        if mapping is None:
            return 0, parameter.detach().new_empty(0, dtype=torch.float32)
        values: Tensor = mapping.get_hp_fragment(None if kind == "weight" else kind)
        return mapping.lp_fragment_address.start, values.detach()

    def _gradient(self, parameter: Any) -> tuple[int, Tensor]:
        """Return (start, flat values) of this rank's fragment of a gradient, still scaled like the
        loss."""
        if id(parameter) in self._masters:
            made = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            return 0, made.detach().flatten()
        if hasattr(parameter, "ds_id"):
            return _unpadded(parameter, safe_get_local_grad(parameter))
        mapping = parameter._hp_mapping
        if mapping is None:
            return 0, parameter.detach().new_empty(0)
        kept = mapping.get_lp_grad_fragment(parameter._index_in_param_group).detach().flatten()
        place = mapping.lp_fragment_address
        # stage 1 accumulates whole bfloat16 gradients on every rank
        if kept.numel() == parameter.numel():
            kept = kept[place.start : place.start + place.numel]
        return place.start, kept

    def write_fragment(self, name: str, kind: str, read: Callable[[int, int], Tensor]) -> None:
        parameter: Any = self.named[name]
        if not hasattr(parameter, "ds_id"):
            super().write_fragment(name, kind, read)
            return
        start, held = self.fragment(name, kind)
        if not held.numel():
            return
        size: int = parameter.ds_tensor.numel()
        padded = torch.zeros(size, dtype=torch.float32, device=held.device)
        padded[: held.numel()] = read(start, start + held.numel())
        if kind == "weight":
            safe_set_local_fp32_param(parameter, padded)
        else:
            safe_set_local_optimizer_state(parameter, padded, kind)

    def make_moments(self, empty: Batch) -> None:
        """Create Adam's states by a step over a batch without targets at learning rate 0.

        DeepSpeed creates them only in its first step; nothing else changes.
        """
        self.step([empty], 0.0, stop=False)

    def run(self, batches: Sequence[Batch], scales: Scales) -> Tensor:
        return (self._pipeline or in_turn)(self, batches, scales)

    def forward(self, batch: Batch, scales: Scales) -> Tensor:
        terms: Tensor = self.deepspeed(batch, scales)
        return terms

    def take(self, batch: Batch, scales: Scales, stage: int | None, x: Tensor | None) -> Tensor:
        """Run the forward of one stage of a staged module for a micro-batch."""
        made: Tensor = self.deepspeed(batch, scales, stage, x)
        return made

    def backward(self, loss: Tensor, batch: Batch, *, last: bool) -> None:
        self.replicas.world = batch.world
        # Set each time, since the number of micro-batches may differ between steps.
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        if not last:
            self.deepspeed.step()

    def update(self, most: float) -> float:
        optimizer: Any = self.deepspeed.optimizer
        self._most, self._refused = most, None
        if self.stage == 0 and optimizer is self.adam:
            norm = self._judge(self._norm())
            if math.isfinite(norm):
                self.deepspeed.step()
            else:
                for parameter in self._parameters:
                    parameter.grad = None
        else:
            self._mark_gradients()
            self.deepspeed.step()
            norm = float(self.deepspeed.get_global_grad_norm())
            if getattr(optimizer, "overflow", False):
                norm = math.inf
        if not math.isfinite(norm):
            return norm if self._refused is None else self._refused
        if self._pipeline:
            self._pipeline.updated(self)
        return norm

    def _judge(self, norm: Any) -> Any:
        """Return what DeepSpeed should use as the gradient's norm: inf discards the gradients.

        norm: a number, or a tensor of one; if finite, the maximum over all ranks counts.
        """
        if self._most == math.inf:
            return norm
        value = float(norm)
        if value < 0:  # with experts DeepSpeed writes −1 for a norm that is not finite
            value = math.inf
        if self._most > 0 and math.isfinite(value):
            (value,) = self.largest(value)
        if value <= self._most:
            return norm
        self._refused = value
        return norm + math.inf

    def _mark_gradients(self) -> None:
        """Copy marks from parameters to their gradients, where the norm looks for them at stage 0
        in 16 bits (0.19.8)."""
        for parameter in self._parameters if self.stage == 0 else ():
            if hasattr(parameter, "model_parallel") and parameter.grad is not None:
                parameter.grad.model_parallel = True  # type: ignore[attr-defined]

    def _norm(self) -> float:
        """Return the 2-norm of the whole gradient, if each rank's gradients are not sharded."""
        holders = self.holders
        norms = [
            torch.linalg.vector_norm(p.grad, dtype=torch.float64)
            for name, p in self.named.items()
            if p.grad is not None and counting.is_counted(holders, name)
        ]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        if holders.model.size == 1:
            return norm
        (squares,) = total([norm * norm], holders.model, self.device)
        return math.sqrt(squares)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.deepspeed.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.deepspeed.train()
            # Under ZeRO-3 the last pass has fetched weights for a backward that never runs.
            self.deepspeed.empty_partition_cache()

    def stages_for(self, batch: Batch) -> StageRunner | None:
        return self._pipeline

    def close(self) -> None:
        self.replicas.close()
        self.deepspeed.destroy()
        forget_mpu()
        self._experts.close()


def _elements(parameter: nn.Parameter) -> int:
    """Return how many elements a rank's part of a parameter has, partitioned by ZeRO-3 or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _gather_at_once(module: nn.Module) -> None:
    """Make ZeRO-3 gather all weights of a tiled module once for all of its tiles, those of
    attention in groups of heads once for all groups, and adapters with their parameters.

    DeepSpeed then adds no hooks to the modules inside, so it must be told before it adds any. Under
    expert parallelism ranks have different numbers of tiles: activation functions with hooks inside
    would run more often on some ranks, which DeepSpeed refuses.
    """
    for part in module.modules():
        tiled = _in_tiles(part) and any(True for _ in part.children())
        adapted = any(isinstance(one, ParameterAdapter) for one in part.children())
        if tiled or getattr(part, WHOLE, False) or adapted:
            set_z3_leaf_module(part, True)


def _in_tiles(part: Any) -> bool:
    """Whether a module works on one tile of tokens after another."""
    runs = part.forward, getattr(getattr(part, "uspft", None), "compute", None)
    return any(isinstance(run, Tiled) for run in runs)


def _together(module: nn.Module, *, by_layer: bool) -> list[list[nn.Parameter]]:
    """Return the groups of parameters whose gradients come in no fixed order.

    by_layer: whether that holds for all of a layer. Otherwise it holds for those that one autograd
    function returns: of experts, of tiled modules, and the others of attention in groups of heads.
    """
    found: list[list[nn.Parameter]] = []
    taken: set[int] = set()
    layers: dict[int, list[nn.Parameter]] = {}
    for name, p in module.named_parameters() if by_layer else ():
        if p.requires_grad and (layer := layer_of(name)) is not None:
            layers.setdefault(layer, []).append(p)
            taken.add(id(p))
    found += layers.values()
    for name, part in reversed(list(module.named_modules())):  # inner modules first
        experts = any(is_experts(n) for n, _ in part.named_parameters(name, recurse=False))
        if experts or _in_tiles(part) or getattr(part, WHOLE, False):
            some = [p for p in part.parameters() if p.requires_grad and id(p) not in taken]
            taken.update(map(id, some))
            found += [some] if len(some) > 1 else []
    return found


def _by_decay(parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters with weight decay, and those without, which are 1-D.

    A partitioned parameter looks 1-D, so its whole shape counts.
    """
    trained = [p for p in parameters if p.requires_grad]
    dims = [len(getattr(p, "ds_shape", p.shape)) for p in trained]
    pairs = list(zip(trained, dims, strict=True))
    return [p for p, n in pairs if n > 1], [p for p, n in pairs if n <= 1]


def _masters(optimizer: Any, adam: torch.optim.Optimizer) -> dict[int, nn.Parameter]:
    """Return AdamW's tensor for each parameter at stage 0, by the parameter's id.

    It is the parameter itself or its float32 copy.
    """
    if optimizer is adam:
        return {id(p): p for p in chain(*(group["params"] for group in adam.param_groups))}
    pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
    return {id(half): full for half, full in pairs}


def _unpadded(parameter: Any, values: Tensor) -> tuple[int, Tensor]:
    """Return (start, flat values) of this rank's fragment under ZeRO-3, without its padding.

    ZeRO-3 cuts a parameter into equal fragments; the last may exceed the parameter's end.
    """
    start = min(values.numel() * parameter.ds_zero_partition_rank, parameter.ds_numel)
    return start, values.flatten()[: parameter.ds_numel - start]
