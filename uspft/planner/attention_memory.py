"""What attention across ranks keeps and needs, on a tape, as sequence/ goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from uspft.planner.in_flight import (
    RING,
    BytesPerToken,
    KeyTransfer,
    Window,
    backward_bytes,
    forward_bytes,
)
from uspft.planner.tape import GradientStorages, RunBackward, Storage, Tape, Tensor
from uspft.sequence.rows.heads import split_heads

InnerAttention = Callable[[list[Tensor]], Tensor]
"""A function from queries, keys and values to attention's output."""
KERNEL_BYTES = 0
"""What an attention kernel allocates inside for each token and query head, beside what it returns:
not yet measured on a GPU."""


@dataclass(frozen=True)
class Sharing:
    """How ranks share a row's attention, whose heads are those of a tensor rank."""

    element: int
    tokens: int
    """Of this rank."""
    heads: int
    kv_heads: int
    dim: int
    ulysses: int = 1
    ring: int = 1
    way: KeyTransfer = RING
    window: Window | None = None
    sinks: bool = False
    behind: float = 0.0
    """Of a chunk of rows: tokens of earlier ones for each of its own, whose keys its queries meet
    chunk by chunk, or of all together with those of a ring (sequence/chunk_attention.py)."""

    @property
    def widest(self) -> tuple[int, int]:
        """The query and KV heads of the member of Ulysses that has most."""
        shares = split_heads(self.heads, self.kv_heads, self.ulysses)
        heads, kv = (max(b - a for a, b in part) for part in (shares.query, shares.kv))
        return heads, kv

    def bytes(self, heads: float) -> float:
        """Return the bytes of so many heads of this rank's tokens."""
        return float(heads * self.dim * self.tokens * self.element)


def attend_over_heads(tape: Tape, qkv: list[Tensor], how: Sharing, inner: InnerAttention) -> Tensor:
    """Return attention between the two all-to-alls of Ulysses. inner: attention between them."""
    if how.ulysses == 1:
        return inner(qkv)
    heads, kv = (how.ulysses * each for each in how.widest)
    return _gathered(tape, inner(_scattered(tape, qkv, how, heads, kv)), how, heads)


def _scattered(tape: Tape, qkv: list[Tensor], how: Sharing, heads: int, kv: int) -> list[Tensor]:
    sizes = [how.bytes(heads), how.bytes(kv), how.bytes(kv)]
    before = [one.size for one in qkv]

    def backward() -> RunBackward:
        def run(grads: GradientStorages) -> GradientStorages:
            sends = tape.new(sum(sizes))
            received = tape.new(sum(sizes))
            del sends
            found: GradientStorages = []
            for has, size in zip(sizes, before, strict=True):
                if has > size:  # members share a head, whose gradients are summed
                    wide = tape.new(size * 4 / how.element)
                    found.append(wide if how.element == 4 else tape.new(size))
                    del wide
                else:
                    found.append(tape.new(size))
            del received
            return found

        return run

    sends = tape.new(sum(sizes))
    received = tape.new(sum(sizes))
    del sends
    return tape.record(qkv, sizes, backward, made=[received] * 3)


def _gathered(tape: Tape, out: Tensor, how: Sharing, heads: int) -> Tensor:
    size, sends = how.bytes(how.heads), how.bytes(heads)

    def backward() -> RunBackward:
        def run(grads: GradientStorages) -> GradientStorages:
            leaves = tape.new(sends)
            found = tape.new(sends)
            del leaves
            return [found]

        return run

    received = tape.new(sends)
    made = [tape.new(size)]
    del received
    return tape.record((out,), (size,), backward, made=made)[0]


def attend(tape: Tape, qkv: list[Tensor], how: Sharing) -> Tensor:
    """Return attention of this rank's queries over the keys of all."""
    members, (heads, kv) = how.ulysses, how.widest
    number = members * heads * how.tokens
    lse, out = 4.0 * number, how.bytes(members * heads)
    sizes = [one.size for one in qkv]
    pair = how.bytes(2 * members * kv)
    query, keys, each = (one / how.tokens for one in (out, pair, lse))
    token = BytesPerToken(query, keys, each, 4 // how.element, how.sinks)
    of = how.ulysses, how.ring, token, how.way._replace(behind=how.behind), how.window
    most = backward_bytes(*of)
    if how.behind and how.ring == 1:  # the sum of dQ, what two chunks give, and what they gave
        most = max(most, token.wide * query + 2 * (query + keys))
    made = forward_storages(tape, how, lse, out, how.tokens * forward_bytes(*of))
    saved = [*made]
    tensors = [*qkv]

    def backward() -> RunBackward:
        kept, inputs = [*saved], [*tensors]

        def run(
            grads: GradientStorages, kept: object = kept, inputs: object = inputs
        ) -> GradientStorages:
            kernel = tape.new(KERNEL_BYTES * number)
            work = tape.new(how.tokens * most)
            del work
            del kernel
            return [tape.new(size) for size in sizes]

        return run

    return tape.record(qkv, (out,), backward, saves=True, made=made[1:])[0]


def forward_storages(
    tape: Tape, how: Sharing, lse: float, out: float, coming: float
) -> list[Storage]:
    """Return the log-sum-exp and the output. coming: the bytes of keys and values on their way."""
    large = out * 4 / how.element
    sums = tape.new(lse)
    if how.ring > 1 or how.behind:
        hands = tape.new(coming)
        found = tape.new(out)
        part = tape.new(out), tape.new(lse)
        if large > out:
            found = tape.new(large)
        del part, hands
    else:
        sums, found = tape.new(lse), tape.new(out)
    if how.sinks:
        sums = tape.new(lse)
        found = tape.new(large)
    if found.size > out:
        found = tape.new(out)
    return [sums, found]


class Remembered:
    """What model/recompute.py keeps of one layer's attention between its two runs."""

    def __init__(self, tape: Tape, wanted: bool) -> None:
        """wanted: whether its graph keeps its inputs, which the second run makes again."""
        self._tape, self._wanted = tape, wanted
        self._leaves: list[Tensor] = []
        self._out: Tensor | None = None

    def __call__(self, attend: InnerAttention, inputs: list[Tensor]) -> Tensor:
        tape = self._tape
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

        def backward() -> RunBackward:
            return self._gradients

        return tape.record(inputs, (out.size,), backward, made=[out.storage])[0]

    def _gradients(self, grads: GradientStorages) -> GradientStorages:
        out, leaves = self._out, self._leaves
        self._out, self._leaves = None, []
        assert out and grads[0]
        self._tape.backward(out, grads[0])
        return [leaf.node.gradient if leaf.node else None for leaf in leaves]
