"""Hardware files, which describe a cluster (from configs/hardware/ or `calibrate`), and the seconds
of products, attention and collectives that follow from them.

A group that spans hosts uses the links between hosts. There each rank has a network card of its own
with `bytes_per_second`; if a host has fewer cards than ranks, `host_bytes_per_second` is their rate
together, which all ranks that send at the same time share equally.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import lcm, prod
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from uspft.config.document import bare, parse, places
from uspft.config.messages import shown
from uspft.config.problems import Fault, Origins, Problem, RecipeError, fault
from uspft.config.types import (
    As,
    Count,
    Fraction,
    NotNegative,
    OneOf,
    Positive,
    RecipeBlock,
    Text,
    validated,
)
from uspft.layout import Layout

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
SUMS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")
"""The collectives whose rate across hosts depends on the number of group members per host."""

LAUNCH_SECONDS, HOP_SECONDS = 15e-6, 1.5e-6
"""The defaults for a link whose file gives neither: 16 GPUs of two hosts take 46 µs for 8 bytes
(github.com/NVIDIA/nccl/issues/1244), and 8 on PCIe 42 (issue 1530)."""


def _by_number(value: Any) -> Any:
    """Return the mapping with strings as keys, after checking that they are numbers of ranks."""
    if not isinstance(value, Mapping) or not value:
        raise fault(f"expected rates by a number of ranks, got {shown(value)}", "write {'2': 1e9}")
    wrong = [ranks for ranks in value if not str(ranks).isdigit() or int(ranks) < 1]
    if wrong:
        what = [(str(ranks), f"expected a number of ranks, got {shown(ranks)}") for ranks in wrong]
        raise Fault([(key, said, "write '2': 1e9") for key, said in what])
    return {str(ranks): rate for ranks, rate in value.items()}


_Rates = Annotated[
    Mapping[int, float],
    As(
        Annotated[
            dict[str, Positive],
            BeforeValidator(_by_number),
            AfterValidator(lambda found: {int(k): found[k] for k in sorted(found, key=int)}),
        ]
    ),
]


def in_turn(kind: Collective, ranks: int, of_bytes: float) -> tuple[int, float]:
    """Return the number of consecutive steps of a collective, and the bytes that a rank sends in
    all of them. of_bytes: as in `Hardware.collective_seconds`.

    An all-gather or reduce-scatter takes P − 1 steps round a ring of P ranks, each with a P-th of
    the bytes (MeshSlice, formula 5); an all-reduce takes twice as many.
    """
    if kind not in SUMS:
        return (ranks - 1 if kind == "all_to_all" else 1), of_bytes
    steps = (2 if kind == "all_reduce" else 1) * (ranks - 1)
    return steps, steps * of_bytes / ranks


def rate_of(rates: Mapping[int, float], ranks: int) -> float:
    """Return the rate for the largest known number of ranks up to `ranks`, else for the smallest
    known number."""
    return rates[max((known for known in rates if known <= ranks), default=min(rates))]


class Link(RecipeBlock):
    """The cost of a transfer: launch + (number of consecutive messages) × hop + bytes ÷ rate."""

    launch_seconds: NotNegative = LAUNCH_SECONDS
    """Seconds before a collective sends anything, whatever its size."""
    hop_seconds: NotNegative = HOP_SECONDS
    """Seconds of latency of one step of a ring."""
    bytes_per_second: Positive
    """Bytes that a rank sends in a second, in one direction."""
    by_ranks: _Rates | None = None
    """The same by the number of ranks in a group, while all of a host's groups send; null: one rate
    for all."""
    host_by_members: _Rates | None = None
    """Bytes per second that a host sends to others in all-gathers and reductions, by the number of
    group members on the host, while all its groups send; null: by `host_bytes_per_second`."""

    def rate(self, ranks: int) -> float:
        """Return the bytes per second of a rank in a group of `ranks` ranks."""
        return rate_of(self.by_ranks, ranks) if self.by_ranks else self.bytes_per_second


class Links(Link):
    """The links inside a host or between hosts; a collective may have figures of its own."""

    host_bytes_per_second: Positive | None = None
    """Bytes per second that all ranks of a host together send to other hosts; null: each rank has a
    network card of its own."""
    all_gather: Link | None = None
    reduce_scatter: Link | None = None
    all_reduce: Link | None = None
    """If null, an all-reduce costs as much as a reduce-scatter and an all-gather."""
    all_to_all: Link | None = None
    point_to_point: Link | None = None

    def link(self, kind: Collective) -> Link:
        """Return the figures of a collective: its own, or else those for all."""
        own: Link | None = getattr(self, kind)
        return own or self

    def of_host(self, kind: Collective, members: int) -> float | None:
        """Return the bytes per second of a host with `members` members of each group; None: not
        known."""
        known = self.link(kind).host_by_members or self.host_by_members
        return rate_of(known, members) if known else None


@dataclass(frozen=True)
class Spread:
    """A group of ranks that exchange data, and how it is spread over hosts."""

    ranks: int
    """The number of members of the group."""
    per_host: int
    """The members on a host; if hosts have unequal numbers, the smallest, whose ranks send the
    largest share to other hosts."""
    groups: int = 1
    """The number of such groups with members on one host, which all send at the same time."""
    even: bool = True
    """Whether every host has the same number of members."""

    @classmethod
    def inside(cls, ranks: int) -> Spread:
        """Return a group whose members are all on one host."""
        return cls(ranks, ranks)

    @classmethod
    @cache
    def of(cls, layout: Layout, axes: tuple[str, ...], ranks_per_host: int) -> Spread:
        """Return the spread of a layout's groups whose members differ along `axes`, which follow
        one another in AXES or in HELD, the fastest-varying first.

        Ranks are numbered host by host. Groups whose ranks fill hosts evenly follow from their
        degrees and the ranks between two members; others are counted.
        """
        apart, size = layout.stride(axes[0])[0], prod(layout.stride(one)[1] for one in axes)
        return cls._regular(apart, size, layout.ranks, ranks_per_host)

    @classmethod
    @cache
    def _regular(cls, apart: int, size: int, ranks: int, host: int) -> Spread:
        """Return the spread of groups of `size` members, each `apart` ranks from the next."""
        block = apart * size
        inside = host % block == 0
        if inside or (block % host == 0 and (host % apart == 0 or apart % host == 0)):
            here = max(1, min(size, host // apart))
            return cls(size, here, min(host, ranks) // here)
        repeats = lcm(block, host)
        some = range(0, repeats if ranks % repeats == 0 else ranks, block)
        groups = [range(first + n, first + block, apart) for first in some for n in range(apart)]
        hosts = [Counter(rank // host for rank in group) for group in groups]
        beside = Counter(host for group in hosts for host in group)
        counts = {count for group in hosts for count in group.values()}
        return cls(size, min(counts), max(beside.values()), len(counts) == 1)

    @property
    def spans_hosts(self) -> bool:
        return self.per_host < self.ranks

    @property
    def by_host(self) -> tuple[Spread, Spread] | None:
        """The groups inside a host, and those of ranks at the same position on every host, for
        collectives in two steps (comm.gather_over); None unless the group spans hosts that each
        have the same number of members, more than one."""
        if not self.spans_hosts or self.per_host == 1 or not self.even:
            return None
        across = Spread(self.ranks // self.per_host, 1, self.groups * self.per_host)
        return Spread.inside(self.per_host), across

    @property
    def share_across(self) -> float:
        """The share of an equal exchange with all members that leaves a member's host."""
        return (self.ranks - self.per_host) / (self.ranks - 1) if self.ranks > 1 else 0.0


PEAK_BF16 = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "B100": 1.75e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L20": 119.5e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
"""Dense 16-bit matrix FLOP/s from the vendors' data sheets, by words of the device's name.

If a name begins with another one, the longer name comes first. Hardware files refer to a row; a
run's MFU also needs peaks of devices without a file.
"""

OTHER = r" (?:Ti|D|Laptop)\b|.*\bMIG\b"
"""The pattern that, after a device's name, marks a slower or faster relative, or a slice of it."""


def device_of(device_name: str) -> str | None:
    """Return the entry of the table that a device's name contains, or None (a CPU, a new GPU)."""
    for words in PEAK_BF16:
        if re.search(rf"(?<!\w){words}(?!\w|{OTHER})", device_name):
            return words
    return None


def peak_flops(device_name: str) -> float | None:
    """Return the device's 16-bit peak, or None where it is not known."""
    words = device_of(device_name)
    return PEAK_BF16[words] if words else None


_SUM_BYTES = 4
"""The bytes per element of a float32 sum to which products are added."""
PAIR_FLOPS = (4, 10)
"""The FLOPs of a (query, key) pair per element of a head, forward and backward: two and five
products of 2 each, as FlashAttention's papers count."""
POSTED = 2
"""The largest number of exchanges of keys that a layer starts in one direction: in the backward,
those of keys that were not saved, and of gradients."""


class MemorySpeed(RecipeBlock):
    """The block says how large and how fast the memory of one rank is."""

    bytes: Positive
    """Bytes of memory of a rank."""
    bytes_per_second: Positive
    """Bytes that a rank reads and writes per second together."""


class ProductSpeed(RecipeBlock):
    """The block says how fast the matrix products of one rank are."""

    share: Annotated[float, Field(gt=0, le=1)]
    """The share of the peak that large products reach."""
    launch_seconds: NotNegative
    """Seconds of an empty product."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """The dtype for which the share was measured."""


class AttentionSpeed(RecipeBlock):
    """The block says how fast the attention kernel of one rank is.

    A pair of query and key counts 4 FLOPs forward and 10 backward for each element of a head.
    """

    forward_flops: Positive
    """FLOP/s forward."""
    backward_flops: Positive
    """FLOP/s backward."""
    launch_seconds: NotNegative
    """Seconds of a call without (query, key) pairs."""


Figure = Literal["memory", "products", "attention", "inside", "between", "hide"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
"""The figures of a file that `calibrate` measures, by their keys."""
CALIBRATED_ERROR, SHIPPED_ERROR = 0.05, 0.12
"""The relative error of the ratio of two layouts' prices: with figures measured on the cluster, and
with published ones."""


class Measurement(RecipeBlock):
    """The block says what `calibrate` measured of a file, when, and with which versions."""

    date: Annotated[Text, Field(title="a date, as 2026-11-25")]
    """The day of the measurement, in UTC."""
    versions: Annotated[Text, Field(title="names and versions")]
    """The software that was measured, with versions."""
    figures: Annotated[tuple[Figure, ...], Strict(False), Field(title="a list of figures")]
    """The keys of the file that were measured; the others come from another file."""


class Hardware(RecipeBlock):
    """One kind of cluster, as described by a file that has the source of every figure."""

    name: Annotated[Text, Field(title="the file's own name")]
    what: Annotated[Text, Field(title="what the cluster is")]
    sources: Annotated[tuple[Text, ...], Strict(False), Field(title="a list of sources")]
    device: Annotated[str, OneOf(lambda: {name: name for name in PEAK_BF16})] | None = None
    """The GPU's name in the table of peak FLOP/s."""
    peak_flops: Positive | None = None
    """FLOP/s of matrix products for devices not in the table; for a CPU, the most that was
    measured."""
    kernel: Text | None = None
    """The attention kernel that was measured, if the file comes from `calibrate`."""
    measured: Measurement | None = None
    """What was measured; null: nothing, as in the shipped files."""
    ranks_per_host: Count
    """Ranks of a host that compute at once: its GPUs, or on CPUs as many as were measured."""
    memory: MemorySpeed
    products: ProductSpeed
    attention: AttentionSpeed
    inside: Links
    """Links between the ranks of one host."""
    between: Links
    """Links between hosts."""
    hide: Fraction = 0.5
    """The reached share of the possible overlap of keys' transfers with attention; half by default:
    published runs show from a quarter to two thirds."""

    def missing(self, ranks: int) -> list[str]:
        """Return the figures that predictions for `ranks` ranks depend on and that were not
        measured."""
        unused = {"inside"} if self.ranks_per_host == 1 or ranks == 1 else set()
        unused |= {"between"} if ranks <= self.ranks_per_host else set()
        unused |= {"hide"} if ranks == 1 else set()
        known = self.measured.figures if self.measured else ()
        return [name for name in FIGURES if name not in {*known, *unused}]

    def error(self, ranks: int) -> float:
        """Return the relative error of the ratio of two layouts' predicted times."""
        return SHIPPED_ERROR if self.missing(ranks) else CALIBRATED_ERROR

    @property
    def peak(self) -> float:
        """The peak FLOP/s of its products."""
        return PEAK_BF16[self.device] if self.device else float(self.peak_flops or 0)

    def product_seconds(
        self, m: float, k: float, n: float, element_bytes: int = 2, *, added: bool = False
    ) -> float:
        """Return the seconds of a product [m, k] × [k, n].

        It is bound by its FLOPs, or by reading both matrices and writing the result. added: whether
        it is added to a float32 sum, which is read too.
        """
        flops = 2.0 * m * k * n / (self.products.share * self.peak)
        moved = self.memory_seconds(product_bytes(m, k, n, element_bytes, added=added))
        return self.products.launch_seconds + max(flops, moved)

    def attention_seconds(
        self, pairs: float, heads: float, dim: int, *, backward: bool = False
    ) -> float:
        """Return the seconds of attention for this many (query, key) pairs in each of `heads`
        heads, either of the forward or of the backward."""
        known = self.attention
        speed = known.backward_flops if backward else known.forward_flops
        return known.launch_seconds + PAIR_FLOPS[backward] * pairs * heads * dim / speed

    def memory_seconds(self, moved_bytes: float) -> float:
        """Return the seconds that the device's memory takes to read and write this many bytes in
        total."""
        return moved_bytes / self.memory.bytes_per_second

    def collective_seconds(self, kind: Collective, of_bytes: float, spread: Spread) -> float:
        """Return the seconds of one collective of a group.

        of_bytes: the size of an all-gather's result, or of the input of a reduce-scatter or an
        all-reduce; for an all-to-all and point to point, what one rank sends to the others.
        """
        if spread.ranks == 1:
            return 0.0
        links = self._links(spread)
        if kind == "all_reduce" and links.all_reduce is None:
            parts: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
            return sum(self.collective_seconds(part, of_bytes, spread) for part in parts)
        link, (steps, sent_bytes) = links.link(kind), in_turn(kind, spread.ranks, of_bytes)
        if kind in SUMS:
            moving = sent_bytes / self._ring_rate(kind, spread)
        else:
            moving = self._spread_out_seconds(kind, sent_bytes, spread)
        return link.launch_seconds + steps * link.hop_seconds + moving

    def by_host_seconds(self, kind: Collective, of_bytes: float, spread: Spread) -> float:
        """Return the seconds of an all-gather or reduce-scatter that overlaps with nothing
        (comm.gather_over, sum_parts), and so may have two steps, inside and between hosts.

        of_bytes: as in `collective_seconds`.
        """
        if not (parts := spread.by_host):
            return self.collective_seconds(kind, of_bytes, spread)
        inside, across = parts
        sent = self.collective_seconds(kind, of_bytes / inside.ranks, across)
        return sent + self.collective_seconds(kind, of_bytes, inside)

    def messages_seconds(
        self, sent_bytes: float, messages: int, spread: Spread, *, to_next: bool
    ) -> float:
        """Return the seconds of `messages` messages of one rank.

        to_next: whether all go to the next rank of a ring, each started when the one before has
        arrived; otherwise they go to all other ranks in equal parts, and messages that are started
        together share one launch.
        """
        if not messages or spread.ranks == 1:
            return 0.0
        link = self._links(spread).link("point_to_point")
        launches = messages if to_next else min(messages, POSTED)
        latency = launches * link.launch_seconds + messages * link.hop_seconds
        if not to_next:
            return latency + self._spread_out_seconds("point_to_point", sent_bytes, spread)
        rate = link.bytes_per_second
        if spread.spans_hosts:  # in each ring, one member per host sends to another host
            rate = self._across("point_to_point", spread.groups)
        return latency + sent_bytes / rate

    def _links(self, spread: Spread) -> Links:
        """Return the slowest links that a group uses."""
        return self.between if spread.spans_hosts else self.inside

    def _across(self, kind: Collective, senders: int) -> float:
        """Return the bytes per second to other hosts of one rank, while `senders` ranks of its host
        send."""
        links = self.between
        own, shared = links.link(kind).bytes_per_second, links.host_bytes_per_second
        return own if shared is None else min(own, shared / senders)

    def _ring_rate(self, kind: Collective, spread: Spread) -> float:
        """Return the bytes per second of a collective over a ring.

        With NCCL the ring has a channel through the network card of each member on a host; with one
        card per host (gloo) all share it. A known rate of a host (`host_by_members`) is divided
        among its groups, up to what each member can send alone.
        """
        inside = self.inside.link(kind).rate(min(spread.ranks, spread.per_host))
        if not spread.spans_hosts:
            return inside
        if spread.per_host == 1:  # nothing is sent inside a host
            inside = math.inf
        if known := self.between.of_host(kind, spread.per_host):
            alone = self.between.link(kind).bytes_per_second
            return min(inside, known / spread.groups, spread.per_host * alone)
        senders = spread.per_host * spread.groups
        return min(inside, spread.per_host * self._across(kind, senders))

    def _spread_out_seconds(self, kind: Collective, sent_bytes: float, spread: Spread) -> float:
        """Return the seconds in which a rank sends bytes to all others in equal parts.

        Bytes to ranks of its host and to other hosts are sent at the same time, the latter through
        its network card.
        """
        across = sent_bytes * spread.share_across
        stays = (sent_bytes - across) / self.inside.link(kind).rate(spread.per_host)
        if not across:
            return stays
        return max(stays, across / self._across(kind, spread.per_host * spread.groups))

    def on_hosts_of(self, ranks: int) -> Hardware:
        """Return the same cluster with `ranks` ranks per host.

        On CPUs, more ranks share the speed that the file's ranks had; a host of GPUs has at most as
        many ranks as GPUs.
        """
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
                elif name == "by_ranks" and value:
                    own[name] = {ranks: rate / crowd for ranks, rate in value.items()}
            return part.model_copy(update=own)

        parts = {name: divided(getattr(self, name)) for name in ("memory", "attention", "inside")}
        products = self.products.model_copy(update={"share": self.products.share / crowd})
        return self.model_copy(update={**parts, "products": products, "ranks_per_host": ranks})


def product_bytes(m: float, k: float, n: float, element_bytes: int, *, added: bool) -> float:
    """Return the bytes that a product [m, k] × [k, n] reads and writes: both matrices and the
    result once each, or the float32 sum to which it is added."""
    result_bytes = 2 * _SUM_BYTES if added else element_bytes
    return element_bytes * (m * k + k * n) + result_bytes * m * n


def read_hardware(file: Path) -> Hardware:
    """Read a hardware file as strictly as a recipe.

    Raises RecipeError with every problem, each with its line.
    """
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
        if not isinstance(value := bare(tree), dict):
            raise fault("is no hardware file", "write its keys: name, what, sources and so on")
        found: Hardware = validated(Hardware, value)
        if (found.device is None) == (found.peak_flops is None):
            what = "one of `device` and `peak_flops` says how fast its products are"
            raise Fault([("peak_flops", what, "write one of them, and null for the other")])
    except Fault as error:
        raise RecipeError(origins.problem(*finding) for finding in error.findings) from error
    return found
