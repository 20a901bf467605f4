"""A simulation of a schedule: each rank runs its actions in order, each as soon as its inputs have
arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from uspft.pipeline.schedules import Action

Lists = Sequence[Sequence[Action]]
"""The actions of each rank, in order."""


class Timed(NamedTuple):
    """An action, and when it begins and ends."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of all actions, in the unit of the costs; time starts at 0."""

    ranks: tuple[tuple[Timed, ...], ...]
    peaks: tuple[int, ...]
    """For each rank, the most stage inputs (of chunks) that it stores for backwards at a time."""

    @property
    def end(self) -> float:
        """When the last action ends."""
        return max((timed[-1].end for timed in self.ranks if timed), default=0)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank works."""
        return tuple(sum(one.end - one.begin for one in timed) for timed in self.ranks)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.ranks) * self.end) if self.end else 0.0


def simulate(
    lists: Lists, cost: Callable[[Action], float], link: Callable[[Action], float] = lambda _: 0
) -> Timeline:
    """Return when each action of some lists begins and ends.

    cost: the duration of an action. link: the duration of a transfer of an action's result to
    another rank; it overlaps with work on both ranks, but transfers from one rank to the same other
    rank run one after another. Raises ValueError, which names the waiting actions, on a deadlock or
    where an input is never computed.
    """
    rank_of = {one: rank for rank, actions in enumerate(lists) for one in actions}
    last, chunks = _most(rank_of)
    ends: dict[Action, float] = {}
    arrives: dict[Action, float] = {}
    lines: dict[tuple[int, int], float] = {}
    ranks: list[list[Timed]] = [[] for _ in lists]
    able, waiting = list(range(len(lists))), dict[Action, int]()
    while able:
        rank = able.pop()
        timed, now = ranks[rank], ranks[rank][-1].end if ranks[rank] else 0
        for action in lists[rank][len(timed) :]:
            needed = needs(action, last, chunks)
            if missing := [one for one in needed if one not in ends]:
                waiting[missing[0]] = rank
                break
            begin = now
            for one in needed:
                begin = max(begin, ends[one] if rank_of[one] == rank else arrives[one])
            ends[action] = now = begin + cost(action)
            timed.append(Timed(action, begin, now))
            taker = _taker(action)
            to = rank_of.get(taker, rank)
            if to != rank:
                leaves = max(now, lines.get((rank, to), 0))
                arrives[action] = lines[rank, to] = leaves + link(action)
            if action in waiting:
                able.append(waiting.pop(action))
    if len(ends) < len(rank_of):
        raise ValueError(_waiting(lists, ranks, rank_of))
    return Timeline(tuple(map(tuple, ranks)), tuple(map(_peak, lists)))


def needs(action: Action, last: int, chunks: int = 1) -> list[Action]:
    """Return the actions that must be done before another one.

    last: the last stage.
    """
    kind, stage, _, chunk = action
    if kind == "forward":
        found = [action._replace(stage=stage - 1)] if stage else []
        return found + ([action._replace(chunk=chunk - 1)] if chunk else [])
    found = [action._replace(kind="forward")]
    if stage < last:
        found.append(action._replace(stage=stage + 1))
    return found + ([action._replace(chunk=chunk + 1)] if chunk + 1 < chunks else [])


def _most(actions: Iterable[Action]) -> tuple[int, int]:
    """Return (the last stage of some actions, the number of chunks)."""
    every = [(one.stage, one.chunk) for one in actions] or [(0, 0)]
    return max(stage for stage, _ in every), max(chunk for _, chunk in every) + 1


def _taker(action: Action) -> Action:
    """Return the action of another stage, if any, that needs an action's result."""
    kind, stage, micro_batch, chunk = action
    return Action(kind, stage + (1 if kind == "forward" else -1), micro_batch, chunk)


def _peak(actions: Sequence[Action]) -> int:
    """Return the most inputs stored at a time; inputs of actions without a backward are not
    stored."""
    kept = {one._replace(kind="forward") for one in actions if one.kind == "backward"}
    now = most = 0
    for one in actions:
        now += 1 if one in kept else -1 if one.kind == "backward" else 0
        most = max(most, now)
    return most


def _waiting(lists: Lists, ranks: Sequence[Sequence[Timed]], rank_of: dict[Action, int]) -> str:
    """Return a phrase on which action of each rank waits for which."""
    said, done = [], {one.action for timed in ranks for one in timed}
    last, chunks = _most(rank_of)
    for rank, (actions, timed) in enumerate(zip(lists, ranks, strict=True)):
        if len(timed) < len(actions):
            waits = actions[len(timed)]
            needed = next(one for one in needs(waits, last, chunks) if one not in done)
            whose = f"of rank {rank_of[needed]}" if needed in rank_of else "which no rank has"
            said.append(f"rank {rank}: {waits}, waits for {needed}, {whose}")
    return "the schedule waits for ever: " + "; ".join(said)
