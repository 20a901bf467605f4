"""The bytes of weights, gradients and optimizer under DeepSpeed's ZeRO, by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uspft.planner.trained import ParameterCounts

ADAM = 8
"""Of a parameter's two moments, in float32."""
WIDE = 4
"""Of a master weight, and of a gradient as it is summed."""
SUB_GROUP = 1e9
"""DeepSpeed's elements of sub_group_size."""


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
    """The elements of weights that stay gathered at stage 3, where there is room."""
    matrix: int
    """The elements of the largest matrix of a layer."""
    optimizer_away: bool = False
    weights_away: bool = False

    def over(self, every: int, experts: int) -> float:
        """Return what a rank has of parameters whose state is divided. experts: how many of them
        are those of divided experts."""
        return (every - experts) / self.ranks + experts / self.alike


@dataclass
class State:
    """The bytes by part, on the device and on the host."""

    device: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    in_update: float = 0.0
    """What the update takes on the device, where nothing is gathered and no row is there."""

    def beside(self, rows: Mapping[str, float]) -> dict[str, int]:
        """Return the bytes on the device by part. rows: of what rows need, which are not there in
        the update: what that takes beyond them and what is gathered is a part too."""
        parts = {name: int(size) for name, size in (self.device | dict(rows)).items()}
        over = self.in_update - sum(rows.values()) - self.device.get("gathered", 0.0)
        return parts | {"update": int(over)} if over > 0 else parts


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
    e, trained = float(zero.element), float(counts.trained)
    parts: dict[str, float] = {"weights": e * counts.every, "gradients": e * trained}
    parts["optimizer"] = ADAM * trained
    if e < WIDE:
        parts["gradients"] += WIDE * trained
        parts["optimizer"] += WIDE * trained
    return State(parts)


def _divided(zero: Zero, counts: ParameterCounts) -> State:
    """Stages 1 and 2, where optimizers, and gradients at 2, are divided."""
    e, trained = zero.element, counts.trained
    own = zero.over(trained, counts.experts_trained)
    optimizer = (WIDE + ADAM) * own
    if zero.stage == 1 and e == 2 and not zero.optimizer_away:
        # Gradients in 16 bits until the backward ends, then summed (DeepSpeed's BF16_Optimizer).
        gradients = float((e + WIDE) * trained)
        device = {"weights": float(e * counts.every), "gradients": gradients}
        return State({**device, "optimizer": optimizer})
    bucket, each = min(zero.bucket, trained), 2 if zero.two_buckets else 1
    matrix = float(e * min(zero.matrix, counts.largest_trained))
    if zero.stage == 2:
        # In 16 bits laid flat once more, and cast, while the gradient that is next waits.
        again = e + (WIDE if zero.crossing != e else 0) if e < WIDE else 0
        buckets = bucket * (e * each + again) + matrix
        gradients = WIDE * own
    else:
        buckets, gradients = float(WIDE * bucket * each), float(WIDE * trained)
    parts = {"weights": float(e * counts.every), "gradients": gradients, "buckets": buckets}
    if not zero.optimizer_away:
        return State({**parts, "optimizer": optimizer})
    # The host also has gradients and new weights of its part; both sides a buffer for one gradient.
    buffer = float(e * counts.largest_trained)
    away = optimizer + (WIDE + e) * own + buffer
    return State({**parts, "buckets": buckets + buffer}, {"optimizer": away})


def _gathered(zero: Zero, counts: ParameterCounts) -> State:
    """Stage 3: the bucket is in the type that crosses ranks, laid out once more by rank as it is
    summed. Weights stay gathered until DeepSpeed's bound of those, or two layers, or the head, are
    there; where few train and the bucket has room for all gradients, it is summed without them.

    Where the optimizer is on the host, gradients are summed beside it (DeepSpeed's
    grad_partitions_flat_buffer), and stay there once more as the update takes them.
    """
    e, own = zero.element, zero.over(counts.trained, counts.experts_trained)
    bucket = float(zero.crossing * min(zero.bucket, counts.trained))
    most = max(zero.live, counts.head, 2 * counts.layer)
    live = float(e * min(counts.every, most))
    beside = live if zero.bucket < counts.trained or counts.trained == counts.every else 0.0
    device = {
        "weights": e * zero.over(counts.every, counts.experts),
        "gradients": WIDE * own,
        "optimizer": (WIDE + ADAM) * own,
        "gathered": max(live, bucket + beside),
        "buckets": bucket,
    }
    host: dict[str, float] = {}
    if zero.optimizer_away:
        host |= {name: device.pop(name) for name in ("gradients", "optimizer")}
        host["update"] = WIDE * own
    if zero.weights_away:
        host["weights"] = device.pop("weights")
    # The gradients of one of DeepSpeed's groups of parameters, as wide as the optimizer's.
    in_update = WIDE * min(own, SUB_GROUP) if e < WIDE and not zero.optimizer_away else 0.0
    return State(device, host, in_update)
