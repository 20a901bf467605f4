"""Bytes of the model's state that a rank sends in a step and holds between steps, for each of
its parameters."""

from __future__ import annotations

from benchmarks.switching.contenders import Contender

WEIGHT, GRADIENT = 4, 4
"""Bytes: everything here is float32."""


def sent_bytes(one: Contender, ranks: int) -> float:
    """Return what a rank sends on average for each parameter under ZeRO-1.

    In place: an all-reduce of gradients and an all-gather of new weights over the ranks that hold
    the same part. Moving: as straight.py says.
    """
    degrees = one.degrees()
    if not one.moves:
        held, copies = 1 / degrees[0], ranks / degrees[0]
        return held * (copies - 1) / copies * (2 * GRADIENT + WEIGHT)
    most = degrees[-1]
    home = 1 / most - 1 / ranks
    if not one.straight:
        return sum((1 / t - 1 / ranks) * (WEIGHT + GRADIENT) for t in degrees)
    reduced = sum(2 * (1 - t / ranks) / t * GRADIENT for t in degrees if t < most)
    return (1 / degrees[0] - 1 / most) * WEIGHT + reduced + home * (GRADIENT + WEIGHT)


def held_bytes(one: Contender, ranks: int) -> float:
    """Return what a rank holds between steps for each parameter under ZeRO-1.

    In place: weights, and of the ranks that hold the same a share of masters and Adam's moments.
    Moving, as uspft/switching/move/moving.py says: masters, moments and summed gradients of what it
    owns; straight also the weights of the most sharded layout.
    """
    degrees = one.degrees()
    if one.moves:
        return 16 / ranks + one.straight * WEIGHT / degrees[-1]
    return WEIGHT / degrees[0] + 12 / ranks
