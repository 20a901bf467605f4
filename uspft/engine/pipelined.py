"""A step of a pipeline: each rank runs the actions of its schedule, and sends their results on.

Nothing is negotiated: sender and receiver know a message's shape from their share of the batch, and
its position in the order from the schedule. Ranks that share rows run equal lists of actions, so
that their communication inside an action waits for no other rank. A backward action is the engine's
backward pass of a scalar, constructed so that a stage's output gets the gradient received from the
next stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uspft.engine.mail import TIE, Lines, Mail, PipelineMessage
from uspft.engine.quarantine import begin_accumulation, leaves_out_unreached
from uspft.engine.replicas import TiedTable
from uspft.model.staged import StagedModel
from uspft.parameters.names import stage_of
from uspft.pipeline.schedules import Action, Schedule, forward_alone, forward_and_backward
from uspft.sequence.kept_keys import RowKeys

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.engine.zero import ZeroEngine
    from uspft.mesh import Groups
    from uspft.model.causal import CausalModel
    from uspft.objective import Objective, Scales
    from uspft.parameters.shards import Holders
    from uspft.pipeline.stages import Stages
    from uspft.world import World


def pipelined(
    parts: CausalModel,
    objective: Objective,
    world: World,
    groups: Groups,
    holders: Holders | None = None,
) -> tuple[StagedModel, Pipeline]:
    """Return this rank's stages as a module, and the runner of its pipeline; collective.

    world: the layout with these stages, on the device where the engine will run the module; its
    parameters may still be elsewhere. groups: the process groups of this process. holders: of tied
    embeddings, of which the last stage has a copy; None if the last stage stores the table itself,
    as under `switching: move`.
    """
    stages, mesh, device = world.stages, world.mesh, world.device
    assert stages
    group = mesh.pipeline
    module = StagedModel(parts, objective, stages, group.index)
    named, table = module.named(), parts.model.get_input_embeddings().weight
    trained = {stage_of(name, stages) for name, p in named.items() if p.requires_grad}
    first, own = min(trained), set(range(group.index, stages.count, stages.ranks))
    bare = {stage for stage in own - trained if stage >= first}
    if bare or not own & trained:
        module.add_idle(bare)
    every, lines = mesh.layout.groups(("pipeline",)), Lines(group)
    if device.type == "cuda":
        lines = Lines(group, groups.ways(every, mesh.rank, device))
    tied, ends = None, group.index in (0, group.size - 1)
    if holders and ends and parts.model.config.tie_word_embeddings:
        name = next(name for name, p in named.items() if p is table)
        holder = holders.rank % (holders.everyone.size // group.size)
        size = holders.shards.part(name, holders.shapes[name], holder).size
        tied = TiedTable(table, size, lines, parts.model.dtype, device)
        if tied.copy is not None:
            module.copy_head(tied.copy)
    return module, Pipeline(module, stages, world.schedule, lines, tied, first)


class _Given(torch.autograd.Function):
    """A scalar 0 computed from a stage's output, whose backward gives that output the gradient
    received from the next stage."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros((), dtype=torch.float32, device=made.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.saved_tensors[0], None


class KeysUnderWay:
    """The keys and states that a rank saves of earlier chunks, for each micro-batch in each of its
    stages, from the first chunk's forward to the first chunk's backward."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self.by_pass: dict[tuple[int, int], RowKeys] = {}

    def part(self, batch: Batch, action: Action) -> Batch:
        """Return an action's micro-batch, or its chunk of one."""
        if self._chunks == 1:
            return batch
        keys = self.by_pass.setdefault((action.stage, action.micro_batch), RowKeys())
        return replace(batch.chunks[action.chunk], keys=keys)

    def forget(self, action: Action, last: bool) -> None:
        """Free what an action's stage has saved, if this was its micro-batch's last action
        there."""
        if last:
            self.by_pass.pop((action.stage, action.micro_batch), None)


class Pipeline:
    """The runner of one rank's stages in the order of the schedule; a `StageRunner`."""

    def __init__(
        self,
        module: StagedModel,
        stages: Stages,
        schedule: Schedule,
        lines: Lines,
        tied: TiedTable | None,
        first: int,
    ) -> None:
        """lines: connections between the ranks of the pipeline. tied: the tied embeddings, on its
        first and last rank. first: the first stage that trains: no earlier stage has a backward,
        and its input needs no gradient."""
        self._module, self._stages, self._lines = module, stages, lines
        self._tied, self._first = tied, first
        self._ties = tied is not None and tied.trains
        self.idle = module.idle
        ranks, (order, virtual, _, self._chunks) = stages.ranks, schedule

        def actions(micro_batches: int) -> list[list[Action]]:
            every = forward_and_backward(order, ranks, micro_batches, virtual, self._chunks)
            return [[a for a in mine if a.kind == "forward" or a.stage >= first] for mine in every]

        self._train = cache(actions)
        self._forwards = forward_alone(ranks, 1, virtual, self._chunks)
        self._place = lines.group.index
        own = range(self._place, stages.count, ranks)
        trained = [stage for stage in own if stage >= first]
        last = self._chunks - 1
        self._lap = ("backward", trained[0], 0) if trained else ("forward", own[-1], last)
        """The action that ends a micro-batch on this rank: its kind, stage and chunk."""

    def __call__(self, engine: ZeroEngine, batches: Sequence[Batch], scales: Scales) -> Tensor:
        """Run a step as `Engine.run` does."""
        if engine.stage == 3:
            begin_accumulation(engine.deepspeed.optimizer)
        sums = torch.zeros(len(scales), dtype=torch.float64, device=engine.device)
        return self._run(engine, batches, scales, self._train(len(batches)), sums)

    def forward(self, engine: ZeroEngine, batch: Batch, scales: Scales) -> Tensor:
        terms = torch.zeros(len(scales), device=engine.device)
        return self._run(engine, [batch], scales, self._forwards, terms)

    def _run(
        self,
        engine: ZeroEngine,
        batches: Sequence[Batch],
        scales: Scales,
        lists: Sequence[Sequence[Action]],
        sums: Tensor,
    ) -> Tensor:
        """Run this rank's actions, and add to `sums` the terms of tokens that it counts.

        lists: the actions of each rank of the pipeline.
        """
        mine, mail, trains = lists[self._place], self._mail(lists, batches), torch.is_grad_enabled()
        last = max((n for n, one in enumerate(mine) if one.kind == "backward"), default=None)
        live: dict[Action, tuple[Tensor | None, Tensor]] = {}
        keys = KeysUnderWay(self._chunks)
        for number, action in enumerate(mine):
            kind, stage, index, chunk = action
            batch = keys.part(batches[index], action)
            if kind == "forward":
                x, goes_back = self._entering(action, mail), trains and stage >= self._first
                with torch.set_grad_enabled(goes_back):  # a graph that no backward frees would stay
                    made = engine.take(batch, scales, stage, x)
                if goes_back:
                    live[action] = x, made
                else:
                    keys.forget(action, chunk + 1 == self._chunks)
                if stage < self._stages.count - 1:
                    mail.send(*self._sent(action), made)
                elif batch.world.mesh.counts:
                    sums += made.detach()
            else:
                x, made = live.pop(action._replace(kind="forward"))
                self._backward(engine, action, batch, made, mail, last=number == last)
                keys.forget(action, chunk == 0)
                if x is not None and x.requires_grad:
                    assert x.grad is not None
                    mail.send(*self._sent(action), x.grad)
                if self._completes(action, len(batches)):
                    assert self._tied
                    mail.send(0, TIE, self._tied.gradient())
            del x, made  # a graph that has run backward would stay until the next action ends
            if trains and (kind, stage, chunk) == self._lap:
                engine.laps.mark()
        # all of this rank's stages are before the first one that trains
        if trains and last is None:
            nothing = engine.take(batches[-1], scales, None, None)
            engine.backward(nothing, batches[-1], last=True)
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
        """Run the backward of an action. last: whether it is this rank's last one in the step."""
        stage = action.stage
        if stage == self._stages.count - 1:
            loss = made.sum()
        else:
            loss = _Given.apply(made, mail.receive(action))
        if last and self._ties and stage == 0:
            assert self._tied
            self._tied.add(mail.receive(TIE))
        if last and len(self._module.stages) > 1 and leaves_out_unreached(engine.deepspeed):
            loss = loss + self._module.nothing()
        engine.backward(loss, batch, last=last)

    def updated(self, engine: ZeroEngine) -> None:
        """Send the table's new values to the last stage; collective over the ranks of a
        pipeline."""
        if self._tied:
            self._tied.spread(engine.stage)

    def _entering(self, action: Action, mail: Mail) -> Tensor | None:
        if not action.stage:
            return None
        x = mail.receive(action)
        return x.requires_grad_(torch.is_grad_enabled() and action.stage > self._first)

    def _sent(self, action: Action) -> tuple[int, Action]:
        """Return the message that an action sends, and the pipeline index of its receiver."""
        stage = action.stage + (1 if action.kind == "forward" else -1)
        return self._stages.rank_of(stage), action._replace(stage=stage)

    def _completes(self, action: Action, micro_batches: int) -> bool:
        """Return whether a backward completes the gradient of the last stage's table."""
        last = Action("backward", self._stages.count - 1, micro_batches - 1)
        return self._ties and action == last

    def _mail(self, lists: Sequence[Sequence[Action]], batches: Sequence[Batch]) -> Mail:
        def buffer(message: PipelineMessage) -> Tensor:
            if isinstance(message, str):
                assert self._tied
                return self._tied.buffer()
            batch = batches[message.micro_batch]
            return self._module.hidden_buffer(
                batch.chunks[message.chunk] if self._chunks > 1 else batch
            )

        def messages(actions: Sequence[Action]) -> Iterator[PipelineMessage]:
            for action in actions:
                to, message = self._sent(action)
                first = self._first if action.kind == "backward" else 0
                if first <= message.stage < self._stages.count and to == self._place:
                    yield message
                if self._completes(action, len(batches)) and self._place == 0:
                    yield TIE

        return Mail(self._lines, [list(messages(actions)) for actions in lists], buffer)
