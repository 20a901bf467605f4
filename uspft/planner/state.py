"""The bytes of weights, gradients and optimizer under DeepSpeed's ZeRO, by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uspft.planner.trained import ParameterCounts

ADAM = 8
"""Of a parameter's two moments, in float32."""
WIDE = 4
"""Of a master weight, and of a gradient as it is summed."""
SUB_GROUP = 1e9
"""DeepSpeed's elements of sub_group_size."""
LAID_FLAT = 5e8
"""Of gradients, in elements, that DeepSpeed lays flat at once where it has no bucket for them."""
NORM = 8
"""Of a gradient while its norm is taken, in float64."""


@dataclass(frozen=True)
class Zero:
    """What decides the state of a rank beside its parameters."""

    stage: int
    ranks: int
    """That hold the same parameters, and divide their state."""
    alike: int
    """Of them those that hold the same experts too, where these are divided."""
    element: int
    """Of weights, in bytes."""
    crossing: int
    """Of gradients as they cross ranks, in bytes."""
    bucket: int
    """In elements; DeepSpeed is told of no more than there are gradients of."""
    two_buckets: bool
    """Whether one is filled while another crosses, at stages 1 and 2."""
    live: int
    """The gathered elements up to which stage 3 fetches weights ahead."""
    reuse: int
    """The elements of weights within which stage 3 keeps those that come again."""
    again: bool
    """Whether layers run forward once more before their backward."""
    matrix: int
    """The elements of the largest matrix of a layer."""
    several: bool = False
    """Whether a step has more than one backward."""
    optimizer_away: bool = False
    weights_away: bool = False

    def cast(self, element: int) -> int:
        """Return the bytes of a gradient's copy in the type that crosses ranks. element: of the
        gradient."""
        return self.crossing if self.crossing != element else 0

    def over(self, every: int, experts: int) -> float:
        """Return what a rank has of parameters whose state is divided. experts: how many of them
        are those of divided experts."""
        return (every - experts) / self.ranks + experts / self.alike


@dataclass
class State:
    """The bytes by part, on the device and on the host."""

    device: dict[str, float] = field(default_factory=dict)
    """In forward and backward."""
    host: dict[str, float] = field(default_factory=dict)
    beyond: dict[str, float] = field(default_factory=dict)
    """What the device has beyond that where no row is there: as gradients are summed over ranks
    when a backward has ended, and in the update."""

    def beside(self, rows: Mapping[str, float]) -> dict[str, int]:
        """Return the bytes on the device by part, of the moment that takes most. rows: of what rows
        need; what another moment takes beyond them is a part too."""
        parts = {name: int(size) for name, size in (self.device | dict(rows)).items()}
        moment, most = max(self.beyond.items(), key=lambda one: one[1], default=("", 0.0))
        over = most - sum(rows.values())
        return parts | {moment: int(over)} if over > 0 else parts


def state_of(zero: Zero, counts: ParameterCounts) -> State:
    """Return what a rank has of the model's state, and of the buckets in which gradients cross."""
    if zero.stage == 0:
        return _whole(zero, counts)
    return _gathered(zero, counts) if zero.stage == 3 else _divided(zero, counts)


def moving_state_bytes(
    element: int, counts: ParameterCounts, at_work: ParameterCounts, ranks: int
) -> float:
    """Return the bytes of one rank's state where weights move between layouts.

    Each parameter's master, moments and summed gradient are in as many pieces as there are ranks;
    weights and their float32 gradient are there as the layout at work has them. counts, at_work: of
    all of the model, and of the part that a rank of that layout has.
    """
    here = element * at_work.every + WIDE * at_work.trained
    return here + (2 * WIDE + ADAM) * counts.trained / ranks


def _whole(zero: Zero, counts: ParameterCounts) -> State:
    """Stage 0, whose optimizer takes gradients in float32."""
    e, trained = zero.element, float(counts.trained)
    master, copy = (0, NORM * counts.largest_trained) if e == WIDE else (WIDE, WIDE * trained)
    device = {
        "weights": float(e * counts.every),
        "gradients": e * trained,
        "optimizer": (ADAM + master) * trained,
    }
    flat = (e + zero.cast(e)) * min(trained, LAID_FLAT)
    return State(device, beyond={"reduction": flat, "update": copy})


def _divided(zero: Zero, counts: ParameterCounts) -> State:
    """Stages 1 and 2, where optimizers, and gradients at 2, are divided.

    Sums of gradients in 16 bits, at stage 2 or of an optimizer on the host, lie flat in float32.
    """
    e, trained, away = zero.element, counts.trained, zero.optimizer_away
    own = zero.over(trained, counts.experts_trained)
    device = {"weights": float(e * counts.every)}
    optimizer = (WIDE + ADAM) * own
    if zero.stage == 1 and e < WIDE and not away:
        # Gradients in 16 bits until the backward ends, then summed (DeepSpeed's BF16_Optimizer).
        device |= {"gradients": float((e + WIDE) * trained), "optimizer": optimizer}
        return State(device, beyond={"reduction": _summed(zero, counts)})
    bucket, each = min(zero.bucket, trained), 2 if zero.two_buckets else 1
    norm = NORM * min(counts.largest_trained, own)
    if zero.stage == 2:
        # Laid flat once more, and cast, while the gradient that is next waits.
        matrix = float(e * min(zero.matrix, counts.largest_trained))
        device["buckets"] = bucket * (e * (each + 1) + zero.cast(e)) + matrix
        device["gradients"] = WIDE * own if e < WIDE or not away else 0.0
        more = {"update": norm if e < WIDE or away else max(WIDE * own, norm)}
        if zero.several and e == WIDE and not away:
            # They come beside the sums of the backwards before, which alone the update has.
            device["gradients"] += WIDE * own
            more["update"] -= WIDE * own
    else:
        device |= {"buckets": float(WIDE * bucket * each), "gradients": float(WIDE * trained)}
        # What fills the first bucket lies in it, and then beside it for the owner.
        summed = WIDE * own if e < WIDE or not away else 0.0
        cast = (WIDE + zero.cast(WIDE)) * bucket if e < WIDE else 0.0
        more = {"reduction": summed + max(cast, norm if away else 0.0)}
    beyond = {name: size - device["buckets"] for name, size in more.items()}
    if not away:
        return State({**device, "optimizer": optimizer}, beyond=beyond)
    # The host also has gradients, at stage 2 their sums over several backwards, and new weights of
    # its part; both sides a buffer for one gradient.
    buffer = float(e * counts.largest_trained)
    device["buckets"] += buffer
    optimizer += (WIDE * (1 + (zero.several and zero.stage == 2)) + e) * own + buffer
    return State(device, {"optimizer": optimizer}, beyond)


def _summed(zero: Zero, counts: ParameterCounts) -> float:
    """Return what is laid beside the gradients of DeepSpeed's BF16_Optimizer: each in float32 as it
    is added; then their flat copies as they cross ranks, of few in float32 too, where matrices and
    the rest are summed at once, and in the type that crosses."""
    dense = counts.trained - counts.experts_trained
    laid = WIDE * dense if counts.vectors and dense <= LAID_FLAT else 0
    crossing = zero.cast(WIDE) * max(dense, counts.experts_trained)
    return float(max(WIDE * counts.largest_trained, laid + crossing))


def _gathered(zero: Zero, counts: ParameterCounts) -> State:
    """Stage 3: the bucket is in the type that crosses ranks, laid out once more by rank as it is
    summed. Weights are gathered ahead up to DeepSpeed's bound of those, a layer or the head and one
    more parameter in any case; the last layers of a forward stay for their backward as far as its
    reuse distance reaches, which no bound limits. When the bucket is full, those are not there any
    more whose gradients fill it.

    Where the optimizer is on the host, gradients are summed beside it (DeepSpeed's
    grad_partitions_flat_buffer), and stay there once more as the update takes them.
    """
    e, own = zero.element, zero.over(counts.trained, counts.experts_trained)
    bucket = float(zero.crossing * min(zero.bucket, counts.trained))
    live = min(counts.every, max(zero.live, max(counts.layer, counts.head) + counts.largest))
    kept = min(counts.every, _kept(zero, counts))
    gone = counts.every * min(1.0, zero.bucket / max(1, counts.trained))
    beside = max(min(live, counts.every - gone), kept - gone)
    device = {
        "weights": e * zero.over(counts.every, counts.experts),
        "gradients": WIDE * own,
        "optimizer": (WIDE + ADAM) * own,
        "gathered": max(e * float(live), e * float(kept), bucket + e * beside),
        "buckets": bucket,
    }
    host: dict[str, float] = {}
    if zero.optimizer_away:
        host |= {name: device.pop(name) for name in ("gradients", "optimizer")}
        host["update"] = WIDE * own
    if zero.weights_away:
        host["weights"] = device.pop("weights")
    # The gradients of one of DeepSpeed's groups of parameters, as wide as the optimizer's.
    group = WIDE * min(own, SUB_GROUP) if e < WIDE and not zero.optimizer_away else 0.0
    return State(device, host, {"update": group - device["gathered"]})


def _kept(zero: Zero, counts: ParameterCounts) -> float:
    """Return the elements that stay from the end of a forward for the backward: those of the head
    and of the last layers, between which and their next use DeepSpeed meets less than its reuse
    distance: the head twice, layers behind them in each pass."""
    passes, far = 3 if zero.again else 2, zero.reuse - 2 * counts.head
    return counts.head + counts.layer * ceil(far / (passes * counts.layer)) if far > 0 else 0.0
