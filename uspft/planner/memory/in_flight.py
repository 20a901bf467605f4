"""The peak memory of attention's backward if a rank's tokens are several blocks or keys come from
other ranks, by replaying on a tape what sequence/passes.py and kernels/varlen.py allocate.

The row is one causal document, whose tokens the algorithm assigns to ranks. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from uspft.blocks import Block, Mask, in_calls, joined
from uspft.planner.memory.tape import Storage, Tape
from uspft.segments import Segments
from uspft.sequence.chunked import ChunkShares
from uspft.sequence.rows.balance import balanced
from uspft.sequence.rows.exchange import Exchange
from uspft.sequence.rows.share import Share, everyones
from uspft.sequence.rows.spans import tokens_in

CHUNK_TOKENS = 12
"""The tokens of a chunk in the short row that is simulated; the numbers of pieces divide it."""
PIECE_TOKENS = 1024
"""The smallest piece of an exchange in tokens (Planned.piece_tokens)."""


class Window(NamedTuple):
    """A sliding window shorter than the row."""

    keys: int
    row_tokens: int
    everywhere: bool
    """Whether all layers have it, so that tokens are assigned to ranks for it."""


class RowSharing(NamedTuple):
    """How ranks share a row, and how other ranks' keys reach a rank."""

    ulysses: int = 1
    ring: int = 1
    stages: int | None = None
    """The stages of an exchange; 0: each rank's keys arrive separately, in pieces if there are few
    ranks; None: keys go round a ring."""
    trimmed: bool = True
    """Whether only needed keys are sent."""
    behind: float = 0.0
    """The tokens of earlier chunks of the row per token of this chunk; attention sees their keys
    chunk by chunk, or with a ring all together (sequence/chunk_attention.py)."""
    window: Window | None = None
    rows: int = 1
    """The rows of a micro-batch, at most ROWS_WALKED."""
    keeps: bool = False
    """Whether received keys are saved for the backward; otherwise they are sent again."""

    @property
    def fetches(self) -> int:
        """How often keys are sent, for which tokens are assigned to ranks: once more in the
        backward if only needed keys are sent and not saved."""
        return 2 if self.stages is not None and self.trimmed and not self.keeps else 1

    def of_row(self, tokens: int) -> RowSharing:
        """Return the same with another row length, if there is a window."""
        return self._replace(window=self.window and self.window._replace(row_tokens=tokens))


class BytesPerToken(NamedTuple):
    """The bytes of one token's query, key with value, and log-sum-exp."""

    query: float
    pair: float
    """The bytes of its key and value together."""
    lse: float
    wide: int
    """The size of a float32 element divided by that of the compute dtype."""
    sinks: bool = False
    calls: tuple[BytesPerToken, ...] = ()
    """The bytes of each range of heads if a kernel call takes only some, whose results are then
    concatenated (kernels/kernel.py, Grouped); empty: one call takes all heads."""

    @property
    def results(self) -> float:
        """The bytes of the gradients of a token's query, key and value."""
        return self.query + self.pair

    @property
    def of_sinks(self) -> float:
        """The bytes per token for the gradient of sinks (kernels/merge.py): the output and its
        gradient in float32, and their product."""
        return 3 * self.wide * self.query + self.lse if self.sinks else 0.0


WINDOWS_WALKED = 32
"""A rank with many windows is extrapolated from simulations with this many and twice as many."""


ROWS_WALKED = 4
"""The rows that are simulated where a micro-batch has more, which change the bytes of a token
little."""


SHORT = (8, 12)
"""The two rings from which longer ones are extrapolated: beyond the first, each rank adds the same,
and a simulation takes time cubic in the number of ranks."""


@lru_cache(maxsize=256)
def _shares(how: RowSharing) -> Sequence[Share]:
    """Return the share of each ring rank, for a row of one document or for a chunk of one with
    `how.behind` earlier tokens per token."""
    ulysses, ring, window = how.ulysses, how.ring, how.window
    tokens = window.row_tokens if window else 2 * ring * ulysses * CHUNK_TOKENS
    row, seen = Segments.single(tokens), window.keys if window else None
    everywhere = seen if window and window.everywhere else None
    order = balanced(row, ulysses, ring, fetches=how.fetches, window=everywhere)
    if window or not how.behind:
        return everyones(row, order, ulysses, seen, how.rows)
    unit = 2 * ring * ulysses
    first = max(1, round(how.behind * tokens / unit)) * unit
    earlier = balanced(Segments.single(first), ulysses, ring)
    later = [tuple((first + a, first + b) for a, b in spans) for spans in order]
    whole, parts = [Segments.single(first + tokens)], [[earlier], [later]]
    places = [(ulysses, index * ulysses) for index in range(ring)]
    return [ChunkShares(whole, parts, place).every[1] for place in places]


@lru_cache(maxsize=256)
def backward_bytes(how: RowSharing, token: BytesPerToken) -> float:
    """Return the peak bytes of attention's backward per token of the fullest rank, apart from saved
    tensors and the output's gradient; 0 if a rank's attention is a single block."""
    if how.ring == 1 and how.window is None:
        most = max(token.of_sinks, token.results if token.calls else 0.0)
        return token.results + most if most else 0.0
    return _with_saved_keys(how, token) - kept_bytes(how, token)


@lru_cache(maxsize=256)
def _with_saved_keys(how: RowSharing, token: BytesPerToken) -> float:
    """Return the same with kept_bytes, of which ranks have different numbers."""
    return _of_a_token(_with_saved_keys, _back, how, token)


@lru_cache(maxsize=256)
def forward_bytes(how: RowSharing, token: BytesPerToken) -> float:
    """Return the peak bytes of other ranks' keys and values in the forward, per token of the
    fullest rank: those in use and those in transfer, or all that an exchange posts."""
    if how.ring == 1:
        return 0.0
    if how.stages is None and not how.behind:
        return 2 * token.pair
    return _of_a_token(forward_bytes, _forth, how, token)


@lru_cache(maxsize=256)
def kept_bytes(how: RowSharing, token: BytesPerToken) -> float:
    """Return the bytes of other ranks' keys and values that are saved for the backward, per token
    of the fullest rank."""
    return _of_a_token(kept_bytes, _saved, how, token) if how.keeps and how.ring > 1 else 0.0


BytesFound = Callable[[RowSharing, BytesPerToken], float]
"""_with_saved_keys, forward_bytes or kept_bytes."""
Walk = Callable[[Tape, Share, BytesPerToken, RowSharing], float]


def _of_a_token(found: BytesFound, walk: Walk, how: RowSharing, token: BytesPerToken) -> float:
    """Return the peak that a simulation (`walk`) finds on any ring rank, per token of the rank with
    fewest tokens.

    A ring longer than SHORT is extrapolated from two rings with equal tokens per rank. A rank with
    many windows is extrapolated from two with fewer: the bytes in transfer are linear in its
    tokens, with a constant for the keys before each of its spans.
    """
    ring, window = how.ring, how.window
    if window is None and how.ulysses > 1:  # Ulysses only divides the tokens of a ring rank
        return found(how._replace(ulysses=1), token)
    if ring > SHORT[1] and (how.stages or 0) < SHORT[0]:
        each = window.row_tokens // ring if window else 0
        # the window covers nearly the whole row of a short ring
        if window and window.keys > SHORT[0] * each:
            how = how._replace(window=None)
        less, more = (found(how._replace(ring=n).of_row(each * n), token) for n in SHORT)
        return less + (ring - SHORT[0]) * (more - less) / (SHORT[1] - SHORT[0])

    def most(how: RowSharing) -> tuple[float, int]:
        shares = _shares(how)
        tokens = min(share.holdings[share.ring_index].tokens for share in shares)
        return max(walk(Tape(), share, token, how) for share in shares), tokens

    unit = 2 * ring * how.ulysses
    short = -(-WINDOWS_WALKED * window.keys * ring // unit) * unit if window else 0
    if window is None or window.row_tokens <= 2 * short:
        whole, tokens = most(how)
        return whole / tokens
    (less, few), (more, many) = (most(how.of_row(tokens)) for tokens in (short, 2 * short))
    here = how.rows * window.row_tokens / ring
    return (more + (more - less) / (many - few) * (here - many)) / here


def _forth(tape: Tape, share: Share, token: BytesPerToken, how: RowSharing) -> float:
    """Return the bytes of other ranks' keys in the forward."""
    own = _up_to_end(tape, share, token)
    if how.stages is None:
        return own.size + 2 * token.pair * share.keys[share.ring_index].tokens
    under_way = _arriving(tape, _exchange_of(share, how), token)
    found = tape.live
    del under_way, own
    return found


def _saved(tape: Tape, share: Share, token: BytesPerToken, how: RowSharing) -> float:
    """Return the bytes of other ranks' keys that are saved."""
    arrivals = _exchange_of(share, how).arrivals
    return token.pair * sum(size for arrival in arrivals for size in arrival.sizes)


def _back(tape: Tape, share: Share, token: BytesPerToken, how: RowSharing) -> float:
    """Return the peak bytes of a rank's backward."""
    me, own = share.ring_index, _up_to_end(tape, share, token)
    saved = tape.new(_saved(tape, share, token, how) if how.keeps else 0.0)
    tokens, keys = share.holdings[me].tokens, share.keys[me].tokens
    dq = _Sum(tape, tokens, token.query, token.wide)
    dkv = _Sum(tape, keys, token.pair, token.wide)
    rings = how.stages is None or share.ring == 1
    come = _round(tape, share, token) if rings else _exchanged(tape, share, how, token)
    pending: list[tuple[Storage, Storage]] = []
    """Gradients that leave, and the buffers of those that come."""
    for here in come:
        queries, partials = _kernel(tape, here.blocks, here.tokens, tokens, token)
        here.held.clear()
        dq.add(queries)
        del queries
        if not here.homes:
            dkv.add(partials)
            partials = partials if rings else []
            continue
        total = _Sum(tape, sum(here.sizes), token.pair, token.wide)
        total.add(partials)
        partials = []
        parts = [total.result(stacked=True)]
        if rings and pending:
            dkv.open()
            pending.clear()
        if len(here.sizes) > 1:
            parts[:] = [tape.new(token.pair * size) for size in here.sizes]
        coming = (tape.new(token.pair * home) for home in here.homes)
        pending += zip(parts, coming, strict=True)
        del parts, coming
    if pending:
        dkv.open()
    pending.clear()
    # The sums are rounded, first the keys' and then the queries'; between them comes the sinks'
    # gradient.
    rounded = dkv.result()
    tape.new(token.of_sinks * tokens)
    queries_rounded = dq.result()
    del rounded, queries_rounded, own, partials, saved
    return tape.most


def _up_to_end(tape: Tape, share: Share, token: BytesPerToken) -> Storage:
    """Return the storage of a rank's keys up to a chunk's end, which are concatenated."""
    keys, own = share.keys[share.ring_index].tokens, share.holdings[share.ring_index].tokens
    return tape.new(token.pair * keys * (keys > own))


def _exchange_of(share: Share, how: RowSharing) -> Exchange:
    assert how.stages is not None  # otherwise keys go round a ring
    least = None if how.stages else 1 if how.window is None else PIECE_TOKENS
    return Exchange(share, how.stages, trimmed=how.trimmed, keep=how.keeps, least=least)


RangeGradients = list[tuple[int, Storage]]
"""Gradients of ranges: (tokens, storage), which several ranges may share."""


class _Sum:
    """A sum of gradients as kernels/merge.py computes it: one that covers all tokens is not copied
    as long as it is the only one."""

    def __init__(self, tape: Tape, tokens: int, size: float, wide: int) -> None:
        """size: the bytes of a token."""
        self._tape, self._tokens, self._size, self._wide = tape, tokens, size * tokens, wide
        self._whole: Storage | None = None
        self._sum: Storage | None = None

    def add(self, gradients: RangeGradients) -> None:
        covers = [tokens for tokens, _ in gradients] == [self._tokens]
        if self._sum is None and self._whole is None and covers:
            self._whole = gradients[0][1]
        else:
            self.open()

    def open(self) -> None:
        if self._sum is None:
            self._sum = self._tape.new(self._wide * self._size)
            self._whole = None

    def result(self, *, stacked: bool = False) -> Storage:
        """Return the sum in the compute dtype. stacked: whether several tensors are returned as
        one."""
        if self._whole is not None:
            found = self._tape.new(self._size) if stacked else self._whole
        else:
            self.open()
            assert self._sum
            found = self._sum if self._wide == 1 else self._tape.new(self._size)
        self._whole = self._sum = None
        return found


def _kernel(
    tape: Tape, blocks: Sequence[Block], keys: int, queries: int, token: BytesPerToken
) -> tuple[RangeGradients, RangeGradients]:
    """Return the gradients of blocks' queries, and of their keys and values, as
    VarlenKernel.backward and Grouped.backward allocate them.

    keys, queries: their numbers of tokens.
    """
    if token.calls:
        parts = [_kernel(tape, blocks, keys, queries, some) for some in token.calls]
        each = zip(parts[0], (token.query, token.pair), strict=True)
        whole = [[(n, tape.new(n * size)) for n, _ in some] for some, size in each]
        return whole[0], whole[1]
    given = rows = tape.new(0.0)
    of_queries: RangeGradients = []
    of_keys: RangeGradients = []
    for call in in_calls(blocks, keys):
        turned = call[0].mask is Mask.FLIPPED
        q_runs, k_runs = joined((b.q0, b.q1) for b in call), joined((b.k0, b.k1) for b in call)
        q_tokens, k_tokens = tokens_in(q_runs), tokens_in(k_runs)
        q_copied, k_copied = turned or len(q_runs) > 1, turned or len(k_runs) > 1
        given = tape.new(token.pair * k_tokens * k_copied + token.query * q_tokens * q_copied)
        lse = token.lse * q_tokens * (q_copied or q_tokens < queries)
        rows = tape.new(2 * token.query * q_tokens * q_copied + lse)
        dq, dkv = tape.new(token.query * q_tokens), tape.new(token.pair * k_tokens)
        if turned:
            flipped = tape.new(token.query * q_tokens), tape.new(token.pair * k_tokens)
            dq, dkv = flipped
            del flipped
        of_queries += [(stop - start, dq) for start, stop in q_runs]
        of_keys += [(stop - start, dkv) for start, stop in k_runs]
        del dq, dkv
    del given, rows
    return of_queries, of_keys


class _KeysAtHand(NamedTuple):
    """Keys that are present, and where their gradients go."""

    blocks: Sequence[Block]
    tokens: int
    sizes: Sequence[int] = ()
    """The tokens from each rank, to which gradients go; empty: the keys are the rank's own."""
    homes: Sequence[int] = ()
    """Of the gradients of own keys that each transfer brings, the tokens."""
    held: list[Storage] = []  # noqa: RUF012
    """What is freed as soon as their gradients are computed."""


def _round(tape: Tape, share: Share, token: BytesPerToken) -> Iterator[_KeysAtHand]:
    """Yield keys as they go round a ring, while the next ones come."""
    me, ring = share.ring_index, share.ring
    hand = tape.new(token.pair * share.keys[me].tokens * (ring > 1))
    for step in range(ring):
        source, following = ((me - s) % ring for s in (step, step + 1))
        comes = step + 1 < ring and share.hops[following] > step
        coming = tape.new(token.pair * share.keys[following].tokens * comes)
        of, to = [], []
        if step:
            of = [tokens_in(share.places(me, source))]
            to = [tokens_in(share.places((me + step) % ring, me))]
        yield _KeysAtHand(share.blocks[source], share.keys[source].tokens, of, to)
        hand = coming
        del coming
    del hand


Parcels = dict[object, list[tuple[Storage, Storage]]]
"""For each leg of an exchange: (what is sent, what is received)."""


def _arriving(tape: Tape, exchange: Exchange, token: BytesPerToken) -> Parcels:
    """Return the transfers once all are posted."""
    copies: dict[object, Storage] = {}
    parcels: Parcels = {}
    for arrival in exchange.arrivals:
        parcels[arrival.leg] = []
        for distance, size in zip(arrival.leg.distances, arrival.sizes, strict=True):
            cuts = exchange.leaving(distance, arrival.leg)
            if cuts not in copies:
                pair = tape.new(token.pair * tokens_in(cuts))
                copies[cuts] = tape.new(token.pair * tokens_in(cuts))
                del pair
            parcels[arrival.leg].append((copies[cuts], tape.new(token.pair * size)))
    return parcels


def _exchanged(
    tape: Tape, share: Share, how: RowSharing, token: BytesPerToken
) -> Iterator[_KeysAtHand]:
    """Yield keys as an exchange brings them; own keys first, or last if the others were saved."""
    exchange = _exchange_of(share, how)
    own = _KeysAtHand(exchange.blocks_here, share.keys[share.ring_index].tokens)
    parcels = {} if exchange.keep else _arriving(tape, exchange, token)
    if not exchange.keep:
        yield own
    for arrival in exchange.arrivals:
        arrived, here = sum(arrival.sizes), parcels.pop(arrival.leg, [])
        held = [tape.new(token.pair * arrived)] if len(here) > 1 else [got for _, got in here]
        del here
        homes = [exchange.leaving(distance, arrival.leg) for distance in arrival.leg.distances]
        to = [*map(tokens_in, homes)]
        yield _KeysAtHand(arrival.blocks, arrived, arrival.sizes, to, held)
    if exchange.keep:  # while others' gradients are sent
        yield own
