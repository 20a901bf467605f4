"""Patches for DeepSpeed 0.19: to use it without a compiler or log noise, and on ranks with
different parameters.

On CPU its init compiles a shared-memory collective that training never uses (40 s, and a crash
without a compiler). Every ZeRO engine imports its Muon optimizer, which no recipe can name, and
with it torch's whole compiler (2 s of CPU per rank). It also logs at INFO. Upstream range:
deepspeed >= 0.19, < 0.20. tests/unit/engine/test_quarantine.py fails when upstream changes; for
ranks with different parameters tests/parity/test_holders.py and test_pipelines.py do.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import nn

    from uspft.comm import Group


def prepare_deepspeed(*, talks: bool = False) -> None:
    """Prepare DeepSpeed: call once before its first use, after torch.distributed is initialised.

    talks: whether its loggers stay at INFO, because a recipe asks for their output.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    logger.setLevel(logging.INFO if talks else logging.ERROR)
    # Reading this table probes every op's build; GPUs have no such op, so it is not read there.
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon_uncompiled()
    # torch 2.13 warns on every call of a collective by the older names that DeepSpeed uses.
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"torch\.distributed.*|deepspeed.*"
    )
    warnings.filterwarnings("ignore", category=UserWarning, module=r"deepspeed.*")
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer without compiling its kernels.

    Other uses of its compiler are unchanged.
    """
    from deepspeed.runtime import compiler

    decorate, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = decorate


def forget_mpu() -> None:
    """Reset the `mpu` and hpZ's group of ranks, which DeepSpeed stores for the whole process.

    Otherwise the next engine, which may have no `mpu`, would use it, and DeepSpeed 0.19 refuses to
    make a second group.
    """
    from deepspeed.utils import groups

    groups.mpu = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def sum_norm_once(optimizer: Any, stage: int, group: Group, device: torch.device) -> None:
    """Make a ZeRO optimizer sum the norm once a step over the ranks that store one copy of the
    model.

    DeepSpeed 0.19 sums once for each of this rank's parameter groups (stages 1 and 2) or sub-groups
    (stage 3): where another rank has a different number of them, it hangs. At stage 1 in bfloat16
    its optimizer sums once anyway. At stage 3 it does not sum over ranks with parts of an expert's
    matrix, and counts replicas on each of them.
    """
    reduce = getattr(optimizer, "_model_parallel_all_reduce", None)
    if reduce is None:
        return

    def not_the_norm(tensor: torch.Tensor, op: Any) -> None:
        if not str(op).endswith("SUM"):  # DeepSpeed's enumeration is not torch's
            reduce(tensor=tensor, op=op)

    def over_model(norms: list[torch.Tensor]) -> torch.Tensor:
        """Return the norm over all ranks of the group. norms: this rank's; DeepSpeed writes −1 for
        one that is not finite, for which inf is returned."""
        every = torch.stack([norm.float().reshape(()) for norm in norms])
        here = torch.where(every < 0, torch.inf, every).square().sum()
        squares = here.to(device)
        dist.all_reduce(squares, group=group.handle)
        return squares.sqrt().to(here.device)

    optimizer._model_parallel_all_reduce = not_the_norm
    if stage == 3:
        of_groups = optimizer._get_norm_groups
        optimizer._grad_norm_counts_every_rank = lambda *_: False
        optimizer._get_norm_groups = lambda: [over_model(of_groups())]
    else:
        here = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda norm_type=2: over_model([here(norm_type)])


def judge_norm(optimizer: Any, stage: int, judge: Callable[[Any], Any]) -> None:
    """Make DeepSpeed's optimizer use judge(norm) in place of the gradient's norm.

    DeepSpeed 0.19 discards a step's gradients if their norm is inf, without changing weights or
    moments; it cannot refuse any other norm. Each of its optimizers computes the norm once a step,
    in a different place.
    """
    if stage == 3:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        of_groups = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: [judge(combine_grad_norm_groups(of_groups()))]
        return
    if hasattr(optimizer, "scaled_global_norm"):
        here = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda norm_type=2: judge(here(norm_type))
        return
    module, step = sys.modules[type(optimizer).__module__], optimizer.step
    name = "get_global_norm"  # stage 0
    if stage:
        experts = getattr(optimizer, "has_moe_layers", False)
        name = "get_norm_with_moe_layers" if experts else "get_global_norm_of_tensors"
    plain = getattr(module, name)

    def judged_step(*given: Any, **named: Any) -> Any:
        setattr(module, name, lambda *of, **how: judge(plain(*of, **how)))
        try:
            return step(*given, **named)
        finally:
            setattr(module, name, plain)

    optimizer.step = judged_step


def reduce_in_one_order(optimizer: Any, together: Sequence[Sequence[nn.Parameter]]) -> None:
    """Make ZeRO-1 and 2 put gradients into buckets in the same order on all ranks.

    DeepSpeed 0.19 reduces what is at the same position of the ranks' buckets, which it fills in the
    order in which gradients are computed. together: groups of parameters whose gradients come in an
    order that may differ between ranks: those that one autograd function returns, or a whole
    layer's where ranks run different layouts. They are put into buckets once all of a group are
    computed, or the backward pass has ended.
    """
    if not hasattr(optimizer, "process_gradients"):  # stages 0 and 3
        return
    reduce, end = optimizer.process_gradients, optimizer.independent_gradient_partition_epilogue
    of = {id(p): (n, k) for n, some in enumerate(together) for k, p in enumerate(some)}
    come: dict[int, list[tuple[int, nn.Parameter, int]]] = {}

    def pass_on(number: int) -> None:
        for _, parameter, group in sorted(come.pop(number), key=itemgetter(0)):
            reduce(parameter, group)

    def process_gradients(parameter: nn.Parameter, group: int) -> None:
        if id(parameter) not in of:
            reduce(parameter, group)
            return
        number, place = of[id(parameter)]
        come.setdefault(number, []).append((place, parameter, group))
        if len(come[number]) == len(together[number]):
            pass_on(number)

    def epilogue() -> None:
        for number in sorted(come):
            pass_on(number)
        end()

    optimizer.process_gradients = process_gradients
    optimizer.independent_gradient_partition_epilogue = epilogue


def find_fragments_in_turn(optimizer: Any) -> None:
    """Have ZeRO-1 and 2 find masters, moments and gradients by parameter under
    `round_robin_gradients`.

    DeepSpeed 0.19 then lays a group's parameters flat in another order, and looks for each of them
    where it would lie without, unless parameters are padded: checkpoints and exports would have
    values of other parameters. It goes by the places that it keeps where a padding is noted.
    """
    if not getattr(optimizer, "round_robin_gradients", False):
        return
    padding = optimizer.round_robin_bit16_padding
    optimizer.round_robin_bit16_padding = [[1]] * len(padding)
    optimizer._link_all_hp_params()
    optimizer.round_robin_bit16_padding = padding


def begin_accumulation(optimizer: Any) -> None:
    """Make ZeRO-3 accumulate all gradients of a step, starting from zero.

    In DeepSpeed 0.19 the first backward pass overwrites the last step's gradients. The backward of
    one stage overwrites only its own, and those of the rank's other stages would be added to old
    ones.
    """
    optimizer.micro_step_id = 1
    if (buffer := getattr(optimizer, "grad_partitions_flat_buffer", None)) is not None:
        buffer.zero_()


def leaves_out_unreached(engine: Any) -> bool:
    """Return whether only gradients that a step's last backward pass reaches are reduced.

    At stage 1 with overlapping reduction, DeepSpeed 0.19 does not reduce those of a rank's other
    stages.
    """
    return bool(engine.zero_optimization_stage() == 1 and engine.zero_overlap_comm())


def compare_traces_within(optimizer: Any, group: Group) -> None:
    """Make ZeRO-3 compare the order of modules only among the ranks with the same parameters.

    DeepSpeed 0.19 compares it over all ranks, and refuses ranks that run other modules, or number
    the same ones otherwise because an earlier engine of the process had other stages there.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator as module

    coordinator = optimizer.parameter_offload.get_param_coordinator()
    plain, everywhere = coordinator.reset_step, module.assert_ints_same_as_other_ranks

    def reset_step() -> None:
        module.assert_ints_same_as_other_ranks = partial(_require_same, group)
        try:
            plain()
        finally:
            module.assert_ints_same_as_other_ranks = everywhere

    coordinator.reset_step = reset_step


def _require_same(group: Group, numbers: list[int]) -> None:
    """Check that all ranks of a group have the same module numbers, relative to the smallest;
    collective.

    DeepSpeed numbers all modules of a process, and an earlier engine may have had other stages on
    these ranks. Raises RuntimeError.
    """
    numbers = [number - min(numbers) for number in numbers]
    every: list[Any] = [numbers]
    if group.size > 1:
        every = [None] * group.size
        dist.all_gather_object(every, numbers, group=group.handle)
    if any(one != every[0] for one in every):
        raise RuntimeError("ranks that hold the same parameters run modules in different orders")
