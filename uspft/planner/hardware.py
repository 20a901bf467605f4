"""A hardware file says what a cluster can do: it stands in configs/hardware/, or `calibrate` wrote
it. From it follow the seconds of a product, of attention, of a collective.

A group that spans hosts goes by the links between them. There a rank has its own card, of
`bytes_per_second`; where the cards of a host are fewer than its ranks, `host_bytes_per_second` is
what they carry together, in equal shares of all ranks that send at the same time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, ValidationError

from uspft.config.checks import choice, each, real, text
from uspft.config.fields import Count, RecipeBlock, TextOrNone, block, findings_of
from uspft.config.problems import Fault, Origins, Problem, RecipeError, fault
from uspft.config.yaml.document import bare, parse, places
from uspft.planner.flops import PEAK_BF16
from uspft.planner.spread import Spread

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"]
COLLECTIVES: tuple[Collective, ...] = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"),
)

_is = PlainValidator
_NONE = (None,)
_Seconds = Annotated[float, _is(real(0))]
_Rate = Annotated[float, _is(real(above=0))]
_RateOrNone = Annotated[float | None, _is(real(above=0, also=_NONE))]
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10
"""FLOPs of a pair of query and key for each element of a head: two products forward and five
backward, 2 each, as FlashAttention's papers count them."""
POSTED = 3
"""How often an exchange of keys is posted: keys forward, in the backward again where they have not
been kept, and gradients home."""


def _one(kind: type[RecipeBlock], *, optional: bool = False) -> Any:
    return _is(block(kind, also=_NONE if optional else ()))


class Link(RecipeBlock):
    """A transfer takes launch + (messages that follow one another) × hop + bytes ÷ rate."""

    launch_seconds: _Seconds
    """Seconds before a collective moves anything, whatever it moves."""
    hop_seconds: _Seconds
    """Seconds that ranks take to come together for one step of a ring."""
    bytes_per_second: _Rate
    """Bytes that a rank sends in a second, in one direction."""

    def ring_seconds(self, ranks: int, shard_bytes: float, rate: float | None = None) -> float:
        """An all-gather or reduce-scatter in a ring takes launch + (P − 1) · (hop + s ÷ rate),
        where s is the bytes of one rank's shard (MeshSlice, formula 5)."""
        return self.launch_seconds + (ranks - 1) * (
            self.hop_seconds + shard_bytes / (rate or self.bytes_per_second)
        )


_LinkOrNone = Annotated[Link | None, _one(Link, optional=True)]


class Links(Link):
    """The links of one kind have a line for every collective, and one that was measured by itself
    has its own."""

    host_bytes_per_second: _RateOrNone = None
    """Bytes that all ranks of a host together send to others; null: each has a card of its own."""
    all_gather: _LinkOrNone = None
    reduce_scatter: _LinkOrNone = None
    all_reduce: _LinkOrNone = None
    """Where it is null, an all-reduce is a reduce-scatter and an all-gather."""
    all_to_all: _LinkOrNone = None
    point_to_point: _LinkOrNone = None

    def link(self, kind: Collective) -> Link:
        """The line is that of the collective itself, or else that of all."""
        own: Link | None = getattr(self, kind)
        return own or self


class MemorySpeed(RecipeBlock):
    """The block says how large and how fast the memory of one rank is."""

    bytes: _Rate
    """What a rank has of it."""
    bytes_per_second: _Rate
    """What a rank reads and writes in a second, both counted."""


class ProductSpeed(RecipeBlock):
    """The block says how fast the matrix products of one rank are."""

    share: Annotated[float, _is(real(maximum=1, above=0))]
    """The share of the peak that large products reach."""
    launch_seconds: _Seconds
    """Seconds of a product of nothing."""
    dtype: Annotated[str, _is(choice("bfloat16", "float16", "float32"))] = "bfloat16"
    """The type that the share is for."""


class AttentionSpeed(RecipeBlock):
    """The block says how fast the attention kernel of one rank is; a pair of query and key counts 4
    FLOPs forward and 10 backward for each element of a head."""

    forward_flops: _Rate
    """FLOP/s forward."""
    backward_flops: _Rate
    """FLOP/s backward."""
    launch_seconds: _Seconds
    """Seconds of a call that sees nothing."""


class Hardware(RecipeBlock):
    """A file describes one kind of cluster, and every figure has its source there."""

    name: Annotated[str, _is(text("the file's own name"))]
    what: Annotated[str, _is(text("what the cluster is"))]
    sources: Annotated[tuple[str, ...], _is(each(text(), "a list of sources"))]
    device: Annotated[str | None, _is(choice(*PEAK_BF16, also=_NONE))] = None
    """The GPU's name in the table of peaks (planner/flops.py), which has the FLOP/s."""
    peak_flops: _RateOrNone = None
    """FLOP/s of matrix products where no table has them: of a CPU, the most that was measured."""
    kernel: TextOrNone = None
    """The attention kernel that was measured, where the file comes from `calibrate`."""
    ranks_per_host: Count
    """Ranks of a host that compute at once: its GPUs; of CPUs, as many as were measured."""
    memory: Annotated[MemorySpeed, _one(MemorySpeed)]
    products: Annotated[ProductSpeed, _one(ProductSpeed)]
    attention: Annotated[AttentionSpeed, _one(AttentionSpeed)]
    inside: Annotated[Links, _one(Links)]
    """Links between the ranks of one host."""
    between: Annotated[Links, _one(Links)]
    """Links between hosts."""

    @property
    def peak(self) -> float:
        """The products could reach so many FLOP/s."""
        return PEAK_BF16[self.device] if self.device else float(self.peak_flops or 0)

    def product_seconds(self, m: float, k: float, n: float, element_bytes: int = 2) -> float:
        """A product [m, k] × [k, n] is bound by its FLOPs, or by reading both matrices and writing
        the result."""
        flops = 2.0 * m * k * n / (self.products.share * self.peak)
        moved = self.memory_seconds(element_bytes * (m * k + k * n + m * n))
        return self.products.launch_seconds + max(flops, moved)

    def attention_seconds(
        self, pairs: float, heads: float, dim: int, *, backward: bool = False
    ) -> float:
        """Attention computes so many pairs of query and key in each of so many heads, forward alone
        or backward."""
        speed, of_pair = self.attention.forward_flops, _FORWARD_FLOPS
        if backward:
            speed, of_pair = self.attention.backward_flops, _BACKWARD_FLOPS
        return self.attention.launch_seconds + of_pair * pairs * heads * dim / speed

    def memory_seconds(self, moved_bytes: float) -> float:
        """What the device's own memory bounds moves so many bytes, read and written together."""
        return moved_bytes / self.memory.bytes_per_second

    def collective_seconds(self, kind: Collective, of_bytes: float, spread: Spread) -> float:
        """A group makes one collective.

        of_bytes: of an all-gather's result, of what a reduce-scatter or an all-reduce starts from;
        of an all-to-all and point to point, what one rank sends to the others.
        """
        if spread.ranks == 1:
            return 0.0
        if kind in ("all_to_all", "point_to_point"):
            steps = spread.ranks - 1 if kind == "all_to_all" else 1
            link = self._links(spread).link(kind)
            latency = link.launch_seconds + steps * link.hop_seconds
            return latency + self._spread_out_seconds(kind, of_bytes, spread)
        links, shard = self._links(spread), of_bytes / spread.ranks
        if kind == "all_reduce" and links.all_reduce is None:
            parts: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
            return sum(self.collective_seconds(part, of_bytes, spread) for part in parts)
        link = links.link(kind)
        rate = self._ring_rate(kind, spread)
        if kind == "all_reduce":  # there and back, launched once
            twice = 2 * link.ring_seconds(spread.ranks, shard, rate)
            return twice - link.launch_seconds
        return link.ring_seconds(spread.ranks, shard, rate)

    def messages_seconds(
        self, sent_bytes: float, messages: int, spread: Spread, *, to_next: bool
    ) -> float:
        """One rank sends so many messages.

        to_next: all go to the next rank of a ring, and each is launched when the one before it has
        come; else they go to the others in equal parts, and all that are posted together wait for
        one launch.
        """
        if not messages or spread.ranks == 1:
            return 0.0
        link = self._links(spread).link("point_to_point")
        launches = messages if to_next else min(messages, POSTED)
        latency = launches * link.launch_seconds + messages * link.hop_seconds
        if not to_next:
            return latency + self._spread_out_seconds("point_to_point", sent_bytes, spread)
        rate = link.bytes_per_second
        if spread.spans_hosts:  # of each ring, one member a host sends to another host
            rate = self._across("point_to_point", spread.groups)
        return latency + sent_bytes / rate

    def _links(self, spread: Spread) -> Links:
        """A group goes by the slower links that it needs."""
        return self.between if spread.spans_hosts else self.inside

    def _across(self, kind: Collective, senders: int) -> float:
        """One of so many ranks of a host that send to other hosts sends so many bytes a second."""
        links = self.between
        own, shared = links.link(kind).bytes_per_second, links.host_bytes_per_second
        return own if shared is None else min(own, shared / senders)

    def _ring_rate(self, kind: Collective, spread: Spread) -> float:
        """A collective's ring has a channel through the card of each member of a host (NCCL); with
        one card a host (gloo) they share it."""
        inside = self.inside.link(kind).bytes_per_second
        if not spread.spans_hosts:
            return inside
        senders = spread.per_host * spread.groups
        return min(inside, spread.per_host * self._across(kind, senders))

    def _spread_out_seconds(self, kind: Collective, sent_bytes: float, spread: Spread) -> float:
        """A rank sends bytes to all others in equal parts: those that stay on its host and those
        that leave it go at the same time, the latter through its own card."""
        across = sent_bytes * spread.share_across
        stays = (sent_bytes - across) / self.inside.link(kind).bytes_per_second
        if not across:
            return stays
        return max(stays, across / self._across(kind, spread.per_host * spread.groups))

    def on_hosts_of(self, ranks: int) -> Hardware:
        """The same cluster has so many ranks on a host: CPUs divide what the ranks of the file had,
        and a host of GPUs has no more ranks than GPUs."""
        crowd = ranks / self.ranks_per_host
        if self.device or crowd <= 1:
            return self.model_copy(update={"ranks_per_host": min(ranks, self.ranks_per_host)})
        slower = {"forward_flops", "backward_flops", "bytes_per_second"}

        def divided(part: Any) -> Any:
            own = {name: getattr(part, name) for name in type(part).model_fields}
            for name, value in own.items():
                if name in slower:
                    own[name] = value / crowd
                elif isinstance(value, Link):
                    own[name] = divided(value)
            return part.model_copy(update=own)

        parts = {name: divided(getattr(self, name)) for name in ("memory", "attention", "inside")}
        products = self.products.model_copy(update={"share": self.products.share / crowd})
        return self.model_copy(update={**parts, "products": products, "ranks_per_host": ranks})


def read_hardware(file: Path) -> Hardware:
    """The file is read as strictly as a recipe. Raises RecipeError with every problem, each with
    its line."""
    try:
        written = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        what = f"cannot be read: {error}"
        raise RecipeError([Problem(f"{file}:1", "", what, "name another")]) from error
    tree, problems = parse(written, lambda line: f"{file}:{line}")
    if tree is None or problems:
        raise RecipeError(problems)
    origins = Origins(str(file), dict(places(tree)))
    try:
        found: Hardware = _hardware(bare(tree))
    except Fault as error:
        raise RecipeError(origins.problem(*finding) for finding in error.findings) from error
    return found


def _hardware(value: Any) -> Hardware:
    if not isinstance(value, dict):
        raise fault("is no hardware file", "write its keys: name, what, sources and so on")
    try:
        found = Hardware.model_validate(value)
    except ValidationError as error:
        raise Fault(findings_of(error)) from error
    if (found.device is None) == (found.peak_flops is None):
        what = "one of `device` and `peak_flops` says how fast its products are"
        raise Fault([("peak_flops", what, "write one of them, and null for the other")])
    return found
