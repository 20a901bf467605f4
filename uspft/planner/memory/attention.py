"""What attention across ranks keeps and needs, on a tape, as sequence/ goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from uspft.planner.memory.in_flight import backward_bytes, forward_bytes
from uspft.planner.memory.operations import WIDE, LayerTape
from uspft.planner.memory.sizes import Sharing
from uspft.planner.memory.tape import GradientStorages, Storage, Tensor

InnerAttention = Callable[[list[Tensor]], Tensor]
"""A function from queries, keys and values to attention's output."""
DIM_STEP = 32
"""To whose multiples flash attention rounds the features of a head."""


def attend_over_heads(
    tape: LayerTape, qkv: list[Tensor], how: Sharing, inner: InnerAttention
) -> Tensor:
    """Return attention between the two all-to-alls of Ulysses. inner: attention between them."""
    if how.row.ulysses == 1:
        return inner(qkv)
    heads, kv = (how.bytes(how.row.ulysses * each) for each in how.widest)
    made = inner(scattered(tape, qkv, [heads, kv, kv], how.element))
    return tape.remade(made, how.bytes(how.heads), beside=made.size, back=made.size)


def scattered(
    tape: LayerTape, parts: list[Tensor], sizes: Sequence[float], element: int
) -> list[Tensor]:
    """Return some heads of all tokens of the group: three as views of what came, others as copies.
    sizes: of each, more than before where members share a head, whose gradients are summed."""
    before, every = [one.size for one in parts], sum(sizes)

    def backward(grads: GradientStorages) -> GradientStorages:
        sends = tape.new(every)
        received = tape.new(every)
        del sends
        found: GradientStorages = []
        for has, size in zip(sizes, before, strict=True):
            if has > size:
                wide = tape.new(size * WIDE / element)
                found.append(wide if element == WIDE else tape.new(size))
                del wide
            else:
                found.append(tape.new(size))
        del received
        return found

    sends = tape.new(every)
    received = tape.new(every)
    del sends
    made = [*[received] * 3, *map(tape.new, sizes[3:])]
    return tape.record(parts, sizes, backward, made=made)


def attend(tape: LayerTape, qkv: list[Tensor], how: Sharing) -> Tensor:
    """Return attention of this rank's queries over the keys of all."""
    heads, kv = (how.row.ulysses * each for each in how.widest)
    sizes, work = [one.size for one in qkv], work_bytes(how, heads, kv)
    made = attended(tape, how, heads, kv)

    def backward(grads: GradientStorages) -> GradientStorages:
        tape.new(work)
        return [tape.new(size) for size in sizes]

    size = how.bytes(heads)
    return tape.record(qkv, (size,), backward, saves=True, keeps=[*made, *qkv], made=made[1:])[0]


def work_bytes(how: Sharing, queries: int, keys: int) -> float:
    """Return the most that the backward of so many query and KV heads has beside what was kept and
    the gradients that it returns."""
    token = how.token(queries, keys)
    most = backward_bytes(how.row, token)
    if (
        how.row.behind and how.row.ring == 1
    ):  # the sum of dQ, what two chunks give, and what they gave
        most = max(most, token.wide * token.query + 2 * (token.query + token.pair))
    return how.tokens * (most + how.flash * flash_bytes(how, queries, keys))


def flash_bytes(how: Sharing, queries: int, keys: int) -> float:
    """Return what torch's flash attention allocates of a token in a backward beside what it
    returns: the sum of dQ in float32, and where heads share keys dK and dV of each; with two
    float32 of a query head, for its softmax (measured, benchmarks/results/card.json: flash-attn 4
    allocates as much or less)."""
    wide = 4.0 * queries * (-(-how.dim // DIM_STEP) * DIM_STEP + 2)
    return wide + (2.0 * how.element * queries * how.dim if queries != keys else 0.0)


def attended(tape: LayerTape, how: Sharing, queries: int, keys: int) -> list[Storage]:
    """Return the log-sum-exp and the output of so many query and KV heads."""
    token, out = how.token(queries, keys), how.bytes(queries)
    lse, large = token.lse * how.tokens, out * token.wide
    sums = tape.new(lse)
    if how.row.ring > 1 or how.row.behind:
        coming = how.tokens * forward_bytes(how.row, token)
        hands = [tape.new(coming / 2), tape.new(coming / 2)]
        found = tape.new(out)
        if (
            how.row.ring == 2 and how.row.stages is None and not how.row.behind
        ):  # its last keys are at hand
            hands.pop()
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

    def __init__(self, tape: LayerTape, wanted: bool) -> None:
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

        return tape.record(inputs, (out.size,), self._gradients, made=[out.storage])[0]

    def _gradients(self, grads: GradientStorages) -> GradientStorages:
        out, leaves = self._out, self._leaves
        self._out, self._leaves = None, []
        assert out and grads[0]
        self._tape.backward(out, grads[0])
        return [leaf.node.gradient if leaf.node else None for leaf in leaves]
