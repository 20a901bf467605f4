"""The memory of attention across ranks, by replaying on a tape what sequence/ allocates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from uspft.planner.memory.in_flight import (
    BytesPerToken,
    backward_bytes,
    forward_bytes,
    kept_bytes,
)
from uspft.planner.memory.operations import WIDE, LayerTape
from uspft.planner.memory.sizes import Sharing, StateHeads
from uspft.planner.memory.tape import GradientStorages, Storage, Tensor

InnerAttention = Callable[[list[Tensor]], Tensor]
"""A function from queries, keys and values to attention's output."""
DIM_STEP = 32
"""Flash attention rounds the features of a head up to a multiple of this."""


def attend_over_heads(
    tape: LayerTape, qkv: list[Tensor], how: Sharing, inner: InnerAttention
) -> Tensor:
    """Return attention with Ulysses' all-to-alls around it. inner: attention between these."""
    if how.row.ulysses == 1:
        return inner(qkv)
    heads, kv = (how.bytes(how.row.ulysses * each) for each in how.widest)
    made = inner(scattered(tape, qkv, [heads, kv, kv], how))
    return at_home(tape, made, how.bytes(how.heads), how)


def at_home(tape: LayerTape, out: Tensor, size: float, how: Sharing | StateHeads) -> Tensor:
    """Return the output of all heads for this rank's tokens, after the all-to-all back. size: its
    bytes."""
    (out,) = in_order(tape, [out], how)
    return tape.received(out, size, out.size)


def in_order(tape: LayerTape, parts: list[Tensor], how: Sharing | StateHeads) -> list[Tensor]:
    """Return copies of parts with all tokens of a Ulysses group in another order, if received
    tokens are not sorted."""
    if how.index is None:
        return parts
    index = tape.new(how.index)
    return [tape.remade(one, keeps=[index]) for one in parts]


def scattered(
    tape: LayerTape, parts: list[Tensor], sizes: Sequence[float], how: Sharing | StateHeads
) -> list[Tensor]:
    """Return the parts after the all-to-all that splits heads: q, k and v as views of the received
    buffer, others as copies. sizes: of each; larger than before if ranks share a head, whose
    gradients are then summed."""
    before, every = [one.size for one in parts], sum(sizes)

    def backward(grads: GradientStorages) -> GradientStorages:
        sends = tape.new(every)
        received = tape.new(every)
        del sends
        found: GradientStorages = []
        for has, size in zip(sizes, before, strict=True):
            if has > size:
                wide = tape.new(size * WIDE / how.element)
                found.append(wide if how.element == WIDE else tape.new(size))
                del wide
            else:
                found.append(tape.new(size))
        del received
        return found

    sends = tape.new(every)
    received = tape.new(every)
    del sends
    made = [*[received] * 3, *map(tape.new, sizes[3:])]
    found = tape.record(parts, sizes, backward, made=made)
    del received, made
    return in_order(tape, found, how)


def attend(tape: LayerTape, qkv: list[Tensor], how: Sharing) -> Tensor:
    """Return attention of this rank's queries over the keys of all ring ranks."""
    token = how.whole
    sizes, work = [one.size for one in qkv], work_bytes(how, token)
    made = attended(tape, how, token)
    received = tape.new(how.tokens * kept_bytes(how.row, token))

    def backward(grads: GradientStorages) -> GradientStorages:
        tape.new(work)
        return [tape.new(size) for size in sizes]

    size = how.tokens * token.query
    keeps = [*made, received, *qkv]
    return tape.record(qkv, (size,), backward, saves=True, keeps=keeps, made=made[1:])[0]


def work_bytes(how: Sharing, token: BytesPerToken) -> float:
    """Return the peak bytes of the backward of some query and KV heads, apart from saved tensors
    and the gradients that it returns."""
    most = backward_bytes(how.row, token)
    if (
        how.row.behind and how.row.ring == 1
    ):  # the sum of dQ, the results of two chunks, and their outputs
        most = max(most, token.wide * token.query + (2 + bool(token.calls)) * token.results)
    flash = max(flash_bytes(how, some) for some in token.calls or (token,))
    return how.tokens * (most + how.flash * flash)


def flash_bytes(how: Sharing, token: BytesPerToken) -> float:
    """Return the bytes per token of the workspace of torch's flash attention in a backward: the sum
    of dQ in float32; if heads share keys, dK and dV of each; and two float32 per query head for its
    softmax (measured, benchmarks/results/card.json: flash-attn 4 allocates as much or less)."""
    wide = token.lse * (-(-how.dim // DIM_STEP) * DIM_STEP + 2)
    return wide + (2 * token.query if 2 * token.query != token.pair else 0.0)


def attended(tape: LayerTape, how: Sharing, token: BytesPerToken) -> list[Storage]:
    """Return the log-sum-exp and the output of some query and KV heads."""
    out = how.tokens * token.query
    lse, large = token.lse * how.tokens, out * token.wide
    sums = tape.new(lse)
    if how.row.ring > 1 or how.row.behind:
        coming = how.tokens * forward_bytes(how.row, token)
        hands = [tape.new(coming / 2), tape.new(coming / 2)]
        found = tape.new(out)
        if (
            how.row.ring == 2 and how.row.stages is None and not how.row.behind
        ):  # its last keys are in memory
            hands.pop()
        part = _output(tape, token, out, lse)
        if large > out:
            found = tape.new(large)
        del part, hands
    else:
        found, sums = _output(tape, token, out, lse)
    if how.sinks:
        sums = tape.new(lse)
        found = tape.new(large)
    if found.size > out:
        found = tape.new(out)
    return [sums, found]


def _output(
    tape: LayerTape, token: BytesPerToken, out: float, lse: float
) -> tuple[Storage, Storage]:
    """Return the output and the log-sum-exp of a kernel, concatenated if it makes several calls."""
    parts = [tape.new(out + lse)] if token.calls else []
    found = tape.new(out), tape.new(lse)
    del parts
    return found


class Remembered:
    """What model/recompute.py saves of one layer's attention between its two runs."""

    def __init__(self, tape: LayerTape, wanted: bool) -> None:
        """wanted: whether its graph needs its inputs, which the second run recomputes."""
        self._tape, self._wanted = tape, wanted
        self._leaves: list[Tensor] = []
        self._out: Tensor | None = None

    def __call__(self, attend: InnerAttention, inputs: list[Tensor]) -> Tensor:
        tape = self._tape
        if not any(one.node for one in inputs):  # without a backward nothing is saved
            return attend(inputs)
        if self._out is None:
            with tape.apart():
                self._leaves = [tape.leaf(one.size, one.storage) for one in inputs]
                self._out = attend(self._leaves)
            for leaf in self._leaves:
                leaf.storage = None
        elif self._wanted:
            for leaf, one in zip(self._leaves, inputs, strict=True):
                leaf.storage = one.storage
        out = self._out
        assert out.storage

        return tape.record(inputs, (out.size,), self._gradients, made=[out.storage])[0]

    def _gradients(self, grads: GradientStorages) -> GradientStorages:
        out, leaves = self._out, self._leaves
        self._out, self._leaves = None, []
        assert out and grads[0]
        self._tape.backward(out, grads[0])
        return [leaf.node.gradient if leaf.node else None for leaf in leaves]
