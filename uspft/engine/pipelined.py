"""A step of a pipeline: each rank takes the actions of its schedule, and passes on what they make.

Nothing is negotiated: both ends of a message know its shape from their own share of the batch, and
its place among others from the schedule. Ranks that share rows have equal lists, so that what they
exchange inside an action waits for nobody outside it. Backward actions are the engine's, of a
scalar whose gradient is the one that came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from uspft.config.problems import RunFailed
from uspft.engine.quarantine import begin_accumulation
from uspft.engine.tied import TiedTable
from uspft.model.staged import StagedModel, stage_of
from uspft.pipeline.schedules import (
    Action,
    Kind,
    Scheduler,
    forward_alone,
    forward_and_backward,
)

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.comm import Group
    from uspft.engine.zero import ZeroEngine
    from uspft.model.causal import CausalModel
    from uspft.objective import Objective, Scales
    from uspft.parameters.shards import Holders
    from uspft.pipeline.stages import Stages


def pipelined(
    parts: CausalModel,
    objective: Objective,
    stages: Stages,
    holders: Holders,
    group: Group,
    scheduler: Scheduler | Literal["auto"] | None,
) -> tuple[StagedModel, Pipeline]:
    """Return the stages of this rank as a module, and what runs them.

    group: the ranks along the pipeline. scheduler: a resolved recipe's. Raises
    RunFailed where a stage has nothing that trains.
    """
    assert scheduler and scheduler != "auto"  # the recipe is resolved
    module = StagedModel(parts, objective, stages, group.index)
    named, table = module.named(), parts.model.get_input_embeddings().weight
    trains = {stage_of(name, stages) for name, p in named.items() if p.requires_grad}
    if idle := sorted({*range(stages.count)} - trains):
        raise RunFailed(f"stage {idle[0]} of the pipeline has no parameter that trains")
    tied = None
    tie_trains = parts.model.config.tie_word_embeddings and table.requires_grad
    if parts.model.config.tie_word_embeddings and group.index in (0, group.size - 1):
        name = next(name for name, p in named.items() if p is table)
        first = holders.rank % (holders.everyone.size // group.size)
        size = holders.shards.part(name, holders.shapes[name], first).size
        tied = TiedTable(table, size, group, parts.model.dtype)
        if tied.copy is not None:
            module.copy_head(tied.copy)
    return module, Pipeline(module, stages, scheduler, group, tied, tie_trains=tie_trains)


AHEAD = 2
"""How many sent tensors may wait on a line to be taken."""


class Sent(NamedTuple):
    """What is sent: the result of a stage's forward, the gradient of its input, or of the table."""

    kind: Kind | str
    stage: int
    """The one that takes it."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


TIE = Sent("gradient of the tied table", 0, 0)


class _Given(torch.autograd.Function):
    """A scalar whose gradient for what a stage made is the one that came from the next stage."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros((), dtype=torch.float32, device=made.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.saved_tensors[0], None


class Pipeline:
    """The runner of one rank's stages."""

    def __init__(
        self,
        module: StagedModel,
        stages: Stages,
        scheduler: Scheduler,
        group: Group,
        tied: TiedTable | None,
        *,
        tie_trains: bool,
    ) -> None:
        """group: the ranks along the pipeline. tied: on its first and last rank, where the table of
        embeddings is the head's too; tie_trains: whether it trains then."""
        self._module, self._stages, self._group = module, stages, group
        self._tied, self._tie_trains = tied, tie_trains
        ranks, virtual = stages.ranks, stages.count // stages.ranks
        self._train = cache(lambda m: forward_and_backward(scheduler, ranks, m, virtual))
        self._forwards = forward_alone(ranks, 1, virtual)

    def __call__(self, engine: ZeroEngine, batches: Sequence[Batch], scales: Scales) -> Tensor:
        """Run a step as a `Runner` does."""
        lists = self._train(len(batches))
        mine, mail = lists[self._group.index], self._mail(lists, batches)
        if engine.stage == 3:
            begin_accumulation(engine.deepspeed.optimizer)
        sums = torch.zeros(len(scales), dtype=torch.float64, device=engine.device)
        live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        for number, action in enumerate(mine):
            _, stage, index, _ = action
            batch = batches[index]
            if action.kind == "forward":
                x = self._entering(action, mail)
                made = engine.take(batch, scales, stage, x)
                live[stage, index] = x, made
                if stage == self._stages.count - 1:
                    sums += made.detach() if batch.world.mesh.counts else 0
                else:
                    mail.send(*self._sent(action), made)
                continue
            x, made = live.pop((stage, index))
            self._backward(engine, action, batch, made, mail, last=number == len(mine) - 1)
            if x is not None:
                assert x.grad is not None
                mail.send(*self._sent(action), x.grad)
            if self._ties(action, len(batches)):
                assert self._tied
                mail.send(0, TIE, self._tied.gradient())
            if stage < self._stages.ranks:  # this rank's first
                engine.laps.mark()
        mail.close()
        return sums

    def _backward(
        self,
        engine: ZeroEngine,
        action: Action,
        batch: Batch,
        made: Tensor,
        mail: Mail,
        *,
        last: bool,
    ) -> None:
        stage = action.stage
        if stage == self._stages.count - 1:
            loss = made.sum()
        else:
            gradient = mail.receive(Sent("backward", stage, action.micro_batch))
            loss = _Given.apply(made, gradient)
        if last and self._tied and self._tie_trains and stage == 0:
            self._tied.add(mail.receive(TIE))
        engine.backward(loss, batch, last=last)

    def forward(self, engine: ZeroEngine, batch: Batch, scales: Scales) -> Tensor:
        """Return an objective's terms of a micro-batch, 0 where this rank has not the last stage;
        collective, and without gradients."""
        mail = self._mail(self._forwards, [batch])
        terms = torch.zeros(len(scales), device=engine.device)
        for action in self._forwards[self._group.index]:
            made = engine.take(batch, scales, action.stage, self._entering(action, mail))
            if action.stage == self._stages.count - 1:
                terms = made
            else:
                mail.send(*self._sent(action), made)
        mail.close()
        return terms

    def updated(self, engine: ZeroEngine) -> None:
        """Give the last stage the table's new values; collective over the ranks of a pipeline."""
        if self._tied:
            self._tied.spread(engine.stage)

    def _entering(self, action: Action, mail: Mail) -> Tensor | None:
        if not action.stage:
            return None
        x = mail.receive(Sent("forward", action.stage, action.micro_batch))
        return x.requires_grad_(torch.is_grad_enabled())

    def _sent(self, action: Action) -> tuple[int, Sent]:
        """Return what an action sends, and to which rank along the pipeline."""
        stage = action.stage + (1 if action.kind == "forward" else -1)
        return self._stages.rank_of(stage), Sent(action.kind, stage, action.micro_batch)

    def _ties(self, action: Action, micro_batches: int) -> bool:
        """Return whether a backward completes the gradient of the last stage's table."""
        last = Action("backward", self._stages.count - 1, micro_batches - 1)
        return self._tie_trains and action == last

    def _mail(self, lists: Sequence[Sequence[Action]], batches: Sequence[Batch]) -> Mail:
        def buffer(message: Sent) -> Tensor:
            if message == TIE:
                assert self._tied
                return self._tied.buffer()
            return self._module.hidden_buffer(batches[message.micro_batch])

        def messages(actions: Sequence[Action]) -> Iterator[Sent]:
            for action in actions:
                to, message = self._sent(action)
                if 0 <= message.stage < self._stages.count and to == self._group.index:
                    yield message
                if self._ties(action, len(batches)) and self._group.index == 0:
                    yield TIE

        return Mail(self._group, [list(messages(actions)) for actions in lists], buffer)


class Mail:
    """What comes to this rank and leaves it in a step, received in each sender's order."""

    def __init__(
        self,
        group: Group,
        coming: Sequence[Sequence[Sent]],
        buffer: Callable[[Sent], Tensor],
    ) -> None:
        """coming: by rank what it sends to this one, in order. buffer: returns memory for it."""
        self._group, self._buffer = group, buffer
        self._from = {m: rank for rank, every in enumerate(coming) for m in every}
        self._coming = [deque(every) for every in coming]
        self._posted: dict[Sent, tuple[Tensor, dist.Work]] = {}
        self._here: dict[Sent, Tensor] = {}
        self._lines: dict[int, deque[tuple[Tensor, dist.Work]]] = {}
        for rank in range(group.size):
            self._post(rank)

    def _post(self, rank: int) -> None:
        """Start to receive what comes next from a rank."""
        if rank != self._group.index and self._coming[rank]:
            message = self._coming[rank].popleft()
            x, source = self._buffer(message), self._group.ranks[rank]
            work = dist.irecv(x, source, group=self._group.handle)
            assert work
            self._posted[message] = x, work

    def send(self, to: int, message: Sent, x: Tensor) -> None:
        """Send a tensor, which is kept until it is taken."""
        x = x.detach()
        if to == self._group.index:
            self._here[message] = x
            return
        line, x = self._lines.setdefault(to, deque()), x.contiguous()
        if len(line) == AHEAD:
            line.popleft()[1].wait()
        self._group.books.add("pipeline", x.numel() * x.element_size())
        work = dist.isend(x, self._group.ranks[to], group=self._group.handle)
        assert work
        line.append((x, work))

    def receive(self, message: Sent) -> Tensor:
        """Wait for a message. Raises RuntimeError where no rank sends it."""
        source = self._from.get(message)
        if source is None:
            raise RuntimeError(f"no rank sends {message}; this is an error in uspft")
        if source == self._group.index:
            return self._here.pop(message)
        while message not in self._posted:
            self._post(source)
        x, work = self._posted.pop(message)
        try:
            work.wait()
        except RuntimeError as error:
            rank = self._group.ranks[source]
            raise RuntimeError(f"{message} did not come from rank {rank}: {error}") from error
        self._post(source)
        return x

    def close(self) -> None:
        """Wait until all that was sent is taken. Raises RuntimeError where something is left."""
        for line in self._lines.values():
            for _, work in line:
                work.wait()
        if left := [*self._posted, *self._here]:
            raise RuntimeError(f"{left[0]} was sent and not taken; this is an error in uspft")
