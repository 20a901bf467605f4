"""The bytes of weights, gradients and optimizer under DeepSpeed's ZeRO, by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from uspft.planner.products import head_projection
from uspft.planner.trained import (
    EMBEDDING,
    ParameterCounts,
    StageLayers,
    counts_of,
    trained_above,
)

if TYPE_CHECKING:
    from uspft.families import ModelShape
    from uspft.layout import Layout
    from uspft.planner.options import Options

ADAM = 8
"""The bytes of an element's two moments, in float32."""
WIDE = 4
"""The bytes of an element of a master weight, and of a gradient's sum."""
SUB_GROUP = 1e9
"""DeepSpeed's default sub_group_size, in elements."""
LAID_FLAT = 5e8
"""The elements of gradients that DeepSpeed flattens at once if it has no bucket for them."""
NORM = 8
"""The bytes of an element of a gradient while its norm is computed, in float64."""


@dataclass
class State:
    """The bytes of the model's state by part, on the device and on the host."""

    device: dict[str, float] = field(default_factory=dict)
    """The bytes during forward and backward."""
    host: dict[str, float] = field(default_factory=dict)
    beyond: dict[str, float] = field(default_factory=dict)
    """The additional bytes at moments without activations: the reduction of gradients after a
    backward, and the update."""
    between: dict[str, float] = field(default_factory=dict)
    """The additional bytes between the layers and the loss, when layers' activations are saved."""
    at_loss: dict[str, float] = field(default_factory=dict)
    """The additional bytes during the loss, by part of `device`; negative for fewer."""
    coming: tuple[float, ...] = ()
    """For gradients that exist only during a backward: the bytes that have been computed when the
    backward reaches each layer."""

    def beside(self, rows: Mapping[str, float]) -> dict[str, int]:
        """Return the bytes on the device by part, at the moment of the peak. rows: the bytes of
        activations, with the additional bytes of `device` parts at their peak. If another moment
        needs more, the difference is a part of its own."""
        names = dict.fromkeys((*self.device, *rows))
        parts = {name: int(self.device.get(name, 0) + rows.get(name, 0)) for name in names}
        kept = rows["activations"] + rows["batch"]
        moments = [*self.beyond.items(), *((n, size + kept) for n, size in self.between.items())]
        moment, most = max(moments, key=lambda one: one[1], default=("", 0.0))
        over = most - sum(rows.values())
        return parts | {moment: int(over)} if over > 0 else parts


@dataclass(frozen=True)
class ZeroRank:
    """A rank's parameters and options, from which its state under ZeRO follows."""

    options: Options
    layout: Layout
    counts: ParameterCounts
    """The rank's parameters before ZeRO shards anything."""
    matrix: int
    """The elements of a layer's largest matrix."""

    @property
    def element(self) -> int:
        return self.options.element

    @property
    def several(self) -> bool:
        """Whether a step has more than one backward."""
        return self.options.passes(self.layout) > 1

    @property
    def sums_at_the_end(self) -> bool:
        """Whether 16-bit gradients are kept until a backward ends and reduced then (DeepSpeed's
        BF16_Optimizer)."""
        options = self.options
        return options.zero_stage == 1 and self.element < WIDE and not options.offload_optimizer

    @property
    def own(self) -> float:
        """The number of trained parameters whose optimizer states are on this rank."""
        return self.divided(self.counts.trained, self.counts.experts_trained)

    def divided(self, every: int, experts: int) -> float:
        """Return the rank's share of parameters that ZeRO shards. experts: the number of them that
        belong to experts, of which fewer ranks hold copies."""
        return (every - experts) / self.layout.copies + experts / self.layout.alike

    def cast(self, element: int) -> int:
        """Return the bytes of an element of a gradient's copy in the dtype of the reduction; 0: no
        copy is made. element: the bytes of the gradient's own element."""
        return self.options.gradient_bytes if self.options.gradient_bytes != element else 0

    def in_order(self, elements: int) -> int:
        """Return a ZeRO-3 option in elements, or 0 in a pipeline: stages run in another order each
        time, so that DeepSpeed can neither prefetch weights nor keep them for reuse."""
        return elements if self.layout.pipeline == 1 else 0


def state_of(
    shape: ModelShape, layout: Layout, options: Options, stage: StageLayers | None = None
) -> State:
    """Return the bytes of a rank's weights, gradients, optimizer states and reduction buckets.
    stage: the layers of a rank in a pipeline; None: all."""
    held = layout.mesh_columns, options.trains
    counts = counts_of(shape, *held, stage, layout.experts)
    if layout.mesh_rows > 1:
        counts = counts.divided(layout.mesh_rows)
    zero = ZeroRank(options, layout, counts, shape.hidden_size * shape.intermediate_size)
    state = (_whole, _divided, _divided, _gathered)[options.zero_stage](zero)
    if zero.sums_at_the_end and stage is None and not zero.several:
        ways, every = layout.mesh_rows, zero.element * counts.trained
        above = trained_above(shape, *held, layout.experts)
        state.coming = tuple(zero.element * one / ways for one in above)
        state.device["gradients"] -= every
        state.beyond["reduction"] += every
        state.at_loss = {}
    if options.saves_beside:  # ranks that store the same parts split them evenly
        state.host["checkpoint"] = (WIDE + ADAM) * counts.trained / layout.copies
    # a copy of tied embeddings, and the sum of its gradients
    if stage and stage.last and shape.tied:
        table = head_projection(shape).on(layout.mesh_columns).parameters / layout.mesh_rows
        trains = EMBEDDING in options.trains.outside
        state.device["tied copy"] = table * (options.element + WIDE * trains)
    return state


def moving_state_bytes(
    element: int, counts: ParameterCounts, at_work: ParameterCounts, ranks: int
) -> float:
    """Return the bytes of one rank's state under `switching: move`.

    Each parameter's master weight, moments and summed gradient are sharded over all ranks; weights
    and their float32 gradients are those of the current layout. counts: of the whole model.
    at_work: of a rank's part in that layout.
    """
    here = element * at_work.every + WIDE * at_work.trained
    return here + (2 * WIDE + ADAM) * counts.trained / ranks


def _whole(zero: ZeroRank) -> State:
    """Return the state at stage 0, whose optimizer takes float32 gradients."""
    counts = zero.counts
    e, trained = zero.element, float(counts.trained)
    master, copy = (0, NORM * counts.largest_trained) if e == WIDE else (WIDE, WIDE * trained)
    device = {
        "weights": float(e * counts.every),
        "gradients": e * trained,
        "optimizer": (ADAM + master) * trained,
    }
    flat = (e + zero.cast(e)) * min(trained, LAID_FLAT)
    return State(device, beyond={"reduction": flat, "update": copy})


def _divided(zero: ZeroRank) -> State:
    """Return the state at stages 1 and 2, which shard optimizer states, and at stage 2 gradients
    too.

    At stage 2, or with the optimizer on the host, 16-bit gradients are summed in a flat float32
    tensor. During a step's first loss there are no gradients yet.
    """
    options, counts = zero.options, zero.counts
    e, trained, away = zero.element, counts.trained, options.offload_optimizer
    own = zero.own
    device = {"weights": float(e * counts.every)}
    optimizer = (WIDE + ADAM) * own
    if zero.sums_at_the_end:
        device |= {"gradients": float((e + WIDE) * trained), "optimizer": optimizer}
        at_loss = {} if zero.several else {"gradients": -float(e * trained)}
        return State(device, beyond={"reduction": _summed(zero)}, at_loss=at_loss)
    bucket, each = min(options.bucket, trained), 2 if options.two_buckets else 1
    norm = NORM * min(counts.largest_trained, own)
    if options.zero_stage == 2:
        # Flattened and cast once more, while the next gradient, or a layer's, is waiting.
        alone = min(zero.matrix, counts.largest_trained)
        wait = float(e * (min(counts.layer, trained) if options.switches else alone))
        device["buckets"] = bucket * (e * (each + 1) + zero.cast(e)) + wait
        device["gradients"] = WIDE * own if e < WIDE or not away else 0.0
        device["waiting"], end = _large(zero)
        at_loss = {"waiting": -device["waiting"]}
        if e == WIDE or not zero.several:
            at_loss["gradients"] = -device["gradients"]
        more = {"update": norm if e < WIDE or away else max(WIDE * own, norm)}
        if end:
            more["reduction"] = end + e * bucket * each + wait
        more = {name: size - device["waiting"] for name, size in more.items()}
        if zero.several and e == WIDE and not away:
            # They come in addition to the sums of earlier backwards, which are all that the update
            # has.
            device["gradients"] += WIDE * own
            more["update"] -= WIDE * own
    else:
        device |= {"buckets": float(WIDE * bucket * each), "gradients": float(WIDE * trained)}
        at_loss = {} if zero.several else {"gradients": -device["gradients"]}
        # Gradients that fit in the first bucket are stored there, and then also at their owner;
        # larger ones are separate at once.
        summed = WIDE * own if e < WIDE or not away else 0.0
        cast = (WIDE + zero.cast(WIDE)) * bucket if e < WIDE else 0.0
        large = device["buckets"] * (counts.largest_trained > options.bucket)
        table = device["buckets"] + 2 * WIDE * counts.head * counts.tied
        more = {"reduction": max(summed + max(cast, norm if away else 0.0) + large, table)}
    at_loss["buckets"] = -device["buckets"]
    beyond = {name: size - device["buckets"] for name, size in more.items()}
    if not away:
        return State({**device, "optimizer": optimizer}, beyond=beyond, at_loss=at_loss)
    # The host also has gradients (at stage 2 their sums over several backwards) and the new weights
    # of its part; device and host each have a buffer for one gradient.
    buffer = float(e * counts.largest_trained)
    device["buckets"] += buffer
    optimizer += (WIDE * (1 + (zero.several and options.zero_stage == 2)) + e) * own + buffer
    return State(device, {"optimizer": optimizer}, beyond, at_loss=at_loss)


def _large(zero: ZeroRank) -> tuple[float, float]:
    """Return the bytes of gradients at stage 2 outside of its buckets: during the loss, and at the
    end of a backward.

    A tied head's gradient waits for the embedding's. A gradient larger than a bucket is reduced
    alone, and in 16 bits a rank's own part stays until the update.
    """
    options, counts = zero.options, zero.counts
    e, tied, largest = zero.element, counts.head * counts.tied, counts.largest_trained
    if largest <= options.bucket:
        return float(e * tied), float(3 * e * tied)
    stays = e < WIDE and not options.offload_optimizer
    own = max(largest, counts.above(options.bucket) / zero.layout.copies) * stays
    norm = NORM * largest * options.offload_optimizer
    alone = e * own + e * largest + max(zero.cast(e) * largest, norm)
    return float(e * max(tied, largest * stays)), max(alone, float(3 * e * tied))


def _summed(zero: ZeroRank) -> float:
    """Return the additional bytes of DeepSpeed's BF16_Optimizer: each gradient in float32 while it
    is added; then flat copies for the reduction in its dtype, also in float32 if matrices and the
    rest are reduced at once."""
    counts = zero.counts
    dense = counts.trained - counts.experts_trained
    laid = WIDE * dense if counts.vectors and dense <= LAID_FLAT else 0
    crossing = zero.cast(WIDE) * max(dense, counts.experts_trained)
    return float(max(WIDE * counts.largest_trained, laid + crossing))


def _gathered(zero: ZeroRank) -> State:
    """Return the state at stage 3.

    DeepSpeed prefetches weights up to its bound plus one parameter, at least a layer; the last
    layers of a forward are kept for their backward within its reuse distance, regardless of the
    bound. Prefetched weights are gathered into one flat buffer. When the first of them is needed,
    all are copied out, and the buffer stays until the last is used (0.19.8,
    AllGatherCoalescedHandle.wait). The head is gathered together with the weights before it, so
    that it exists twice before the last norm, and once during the loss.

    With the optimizer on the host, gradients are summed next to it (DeepSpeed's
    grad_partitions_flat_buffer), and copied once more for the update.
    """
    options, counts = zero.options, zero.counts
    e, own, every = zero.element, zero.own, counts.every
    at_once = min(options.live, zero.in_order(options.prefetch))
    ahead, together = (n + counts.largest if at_once else 0 for n in (options.live, at_once))
    live, kept = min(every, max(ahead, counts.layer)), min(every, _kept(zero))
    in_layers = e * float(max(live + min(every, together), kept))
    at_head = max(counts.head, min(every, ahead))
    at_loss = e * float(max(at_head, kept))
    # If more is kept than the prefetch bound, the head is fetched alone when it is needed.
    with_others = at_once and options.live > kept - counts.head
    twice = min(every, max(at_once, counts.head)) if with_others else 0
    between = {"head": e * float(at_head + twice)}
    head, waits = e * float(counts.head), e * float(counts.head * counts.tied)
    largest = counts.largest_trained
    beyond = {"reduction": head + max(_crossing(zero, largest), 3 * waits)}
    if options.bucket < counts.trained:
        # When the bucket is full, the gradients that fill it are freed.
        gone = every * options.bucket / counts.trained
        beside = max(min(live, every - gone), kept - gone)
        crossing = _crossing(zero, min(largest, counts.largest))
        in_layers = max(in_layers, e * beside + crossing)
        if largest > options.bucket:  # such as the head's, before the layers'
            others = min(live, every - largest)
            between["reduction"] = e * others + _crossing(zero, largest)
    device = {
        "weights": e * zero.divided(every, counts.experts),
        "gradients": WIDE * own,
        "optimizer": (WIDE + ADAM) * own,
        "gathered": in_layers,
        "waiting": waits,
        "buckets": float(zero.options.gradient_bytes * min(options.bucket, counts.trained)),
    }
    host: dict[str, float] = {}
    if options.offload_optimizer:
        host |= {name: device.pop(name) for name in ("gradients", "optimizer")}
        host["update"] = WIDE * own
    else:  # the gradients of one of DeepSpeed's parameter groups
        beyond["update"] = WIDE * min(own, SUB_GROUP)
    if options.offload_weights:
        host["weights"] = device.pop("weights")
    there = in_layers + waits
    beyond, between = ({n: size - there for n, size in one.items()} for one in (beyond, between))
    return State(
        device, host, beyond, between, {"gathered": at_loss - in_layers, "waiting": -waits}
    )


def _crossing(zero: ZeroRank, largest: int) -> float:
    """Return the bytes at stage 3 outside of its bucket while gradients are reduced: the bucket
    rearranged by rank while the next gradient is waiting, or a gradient larger than the bucket.

    largest: the elements of a gradient. 16-bit shards are cast to be added; if they go to the host,
    their norms are computed.
    """
    options, counts = zero.options, zero.counts
    e, bucket = zero.element, min(options.bucket, counts.trained)
    share, norm = (
        WIDE * (zero.options.gradient_bytes < WIDE) / zero.layout.copies,
        NORM * options.offload_optimizer / zero.layout.copies,
    )
    laid = (zero.options.gradient_bytes + share) * bucket + norm * min(bucket, largest)
    if largest > bucket:
        laid = max(laid, (zero.cast(e) + share + norm) * largest)
    return laid + e * largest * (options.bucket < counts.trained)


def _kept(zero: ZeroRank) -> float:
    """Return the elements that are kept from the end of a forward for the backward: weights of the
    head and the last layers with less than DeepSpeed's reuse distance between their two uses. The
    head is used twice, later layers in each pass."""
    options, counts = zero.options, zero.counts
    passes, far = 3 if options.checkpointing else 2, zero.in_order(options.reuse) - 2 * counts.head
    return counts.head + counts.layer * ceil(far / (passes * counts.layer)) if far > 0 else 0.0
