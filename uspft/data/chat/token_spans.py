"""The tokens of a conversation, and which of them are exactly the spans of text that train."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter
from typing import Any
from unicodedata import normalize

from tokenizers.decoders import ByteLevel
from tokenizers.pre_tokenizers import ByteLevel as Alphabet

from uspft.data.faults import SampleFault
from uspft.data.samples import Rendered, Spans

_LEADS = ("\n", ".", "a")


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer by id, found when first asked for.

    The tokens' own characters are GPT-2's printable stand-ins for bytes; added ones are as they
    decode.
    """

    @classmethod
    def of(cls, backend: Any) -> TokenBytes | None:
        """Return an empty one for a tokenizers.Tokenizer, None where it is not byte-level."""
        return cls(backend) if isinstance(backend.decoder, ByteLevel) else None

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend
        self._added = set(backend.get_added_tokens_decoder())

    def __missing__(self, token: int) -> bytes:
        if token in self._added:
            text = self._backend.decode([token], skip_special_tokens=False)
            self[token] = text.encode()
            return self[token]
        name = self._backend.id_to_token(token)
        known = all(letter in _BYTES for letter in name)
        self[token] = bytes(map(_BYTES.__getitem__, name)) if known else name.encode()
        return self[token]


def _stand_ins() -> dict[str, int]:
    """Return the byte that each character stands for: itself in printable Latin-1; the other bytes
    have characters from U+0100 on."""
    found = {letter: ord(letter) for letter in Alphabet.alphabet() if ord(letter) < 0x100}
    others = sorted(set(range(0x100)) - set(found.values()))
    return found | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES = _stand_ins()


def tokenise_spans(
    backend: Any, rendered: Rendered, known: TokenBytes | None = None
) -> tuple[list[int], Spans]:
    """Return the text's token ids, and the token ranges that decode to exactly the marked spans.

    The text is tokenised as a whole where its tokens respect the bounds of the spans: these are the
    tokens that inference sees. Where a token holds characters of both sides (a template without
    special tokens around the answer, an answer that starts with the prompt's last character), the
    text is cut at the bounds and the pieces are tokenised apart, as inference does too: the prompt
    first, the answer after it. backend: a tokenizers.Tokenizer; known: the bytes of its tokens,
    which tell the ranges in half the time where they are those of the text. Raises SampleFault
    where neither way decodes to the text, because the tokenizer loses something.
    """
    if known is not None:
        ids = backend.encode_batch_fast([rendered.text], add_special_tokens=False)[0].ids
        found = _ranges_by_bytes([known[token] for token in ids], rendered)
        if found is not None:
            return ids, found
    whole = backend.encode_batch([rendered.text], add_special_tokens=False)[0]
    ids = whole.ids  # a copy, each time that it is asked for
    ranges = _ranges(whole.offsets, rendered.spans)
    if _decodes(backend, ids, ranges, rendered):
        return ids, ranges
    ids, ranges = _encode_pieces(backend, rendered)
    if _decodes(backend, ids, ranges, rendered):
        return ids, ranges
    remedy = "use a tokenizer that can write this text (model.tokenizer)"
    raise SampleFault(f"the trained tokens do not decode to the assistant's text; {remedy}")


def _ranges_by_bytes(pieces: list[bytes], rendered: Rendered) -> Spans | None:
    """Return each span's range of tokens, given their bytes; None where these are not the text's,
    where a token holds bytes of both sides of a bound, or where a bound is behind the text."""
    text = rendered.text
    if b"".join(pieces) != text.encode():
        return None
    ends = [0, *accumulate(map(len, pieces))]
    plain, ranges = text.isascii(), []
    for span in rendered.spans:
        bounds = span if plain else [len(text[:bound].encode()) for bound in span]
        places = [bisect_left(ends, bound) for bound in bounds]
        if bounds[1] > ends[-1]:
            return None
        if any(ends[place] != bound for place, bound in zip(places, bounds, strict=True)):
            return None
        ranges.append((places[0], places[1]))
    return ranges


def _ranges(offsets: list[tuple[int, int]], spans: Spans) -> Spans:
    """Return each span's range of tokens; a token is in the span that its last character is in.

    Ends decide and not starts, because the byte tokens of one character share its offsets, and
    byte-level post-processors trim leading spaces off a token's start. `_decodes` refuses a token
    that straddles a bound.
    """
    ranges: Spans = []
    end, stop = itemgetter(1), 0
    for start, until in spans:
        first = bisect_right(offsets, start, stop, key=end)
        stop = bisect_right(offsets, until, first, key=end)
        ranges.append((first, stop))
    return ranges


def _encode_pieces(backend: Any, rendered: Rendered) -> tuple[list[int], Spans]:
    ids: list[int] = []
    ranges: Spans = []
    for start, stop, trained in _pieces(rendered):
        piece = _encode_piece(backend, rendered.text[start:stop], start == 0)
        if trained:
            ranges.append((len(ids), len(ids) + len(piece)))
        ids += piece
    return ids, ranges


def _pieces(rendered: Rendered) -> Iterator[tuple[int, int, bool]]:
    at = 0
    for start, stop in rendered.spans:
        if at < start:
            yield at, start, False
        yield start, stop, True
        at = stop
    if at < len(rendered.text):
        yield at, len(rendered.text), False


def _encode_piece(backend: Any, text: str, first: bool) -> list[int]:
    """Return the token ids of a piece as it stands inside a text; `first`: it begins the text.

    Metaspace tokenizers (Llama 2) begin every text with a space that is not there. Their pieces are
    tokenised behind a lead, whose tokens are then taken off; there are several leads, since one may
    merge with the piece.
    """
    alone: list[int] = backend.encode_batch([text], add_special_tokens=False)[0].ids
    if first:
        return alone
    for lead in _LEADS:
        before, both = backend.encode_batch([lead, lead + text], add_special_tokens=False)
        if backend.decode(before.ids + alone, skip_special_tokens=False) == lead + text:
            return alone
        if both.ids[: len(before.ids)] == before.ids:
            return list(both.ids[len(before.ids) :])
    return alone


def _decodes(backend: Any, ids: list[int], ranges: Spans, rendered: Rendered) -> bool:
    """Tell whether each range decodes to its span, read behind the tokens that precede it.

    A range is never decoded alone, because a decoder strips the first token's space. The tokens
    before it go back to the end of the last span, where a character ends for certain.
    """
    back = 0
    for (first, stop), (start, end) in zip(ranges, rendered.spans, strict=True):
        before = backend.decode(ids[back:first], skip_special_tokens=False)
        through = backend.decode(ids[back:stop], skip_special_tokens=False)
        got, want = through[len(before) :], rendered.text[start:end]
        # Qwen's tokenizers compose characters (NFC) before they tokenise.
        same = got == want or normalize("NFKC", got) == normalize("NFKC", want)
        if not through.startswith(before) or not same:
            return False
        back = stop
    return True
