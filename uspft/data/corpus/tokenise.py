"""A tokenizer's files, and the token ids and labels of samples; in a conversation, exactly the
tokens of the trained spans of text have labels."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Set
from dataclasses import dataclass, replace
from datetime import date
from hashlib import blake2b
from importlib.metadata import version
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np
from tokenizers.decoders import ByteLevel
from tokenizers.pre_tokenizers import ByteLevel as Alphabet

from uspft.config.problems import Finding, counted, said
from uspft.data.chat.rendering import EMPTY_ANSWER, render
from uspft.data.chat.spans import all_but
from uspft.data.chat.template import (
    ChatTemplate,
    own_template,
    template_notes,
    template_of,
    template_problems,
)
from uspft.data.faults import DataError, SampleFault, wrong_key
from uspft.data.samples import NOT_TRAINED, Record, Rendered, Sample, Spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.config.inputs import DataBlock

KEY = "model.tokenizer"
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
"""Files with a vocabulary; for a folder without any, transformers creates an empty tokenizer."""
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_POINTER = b"version https://git-lfs"


def holds_tokenizer(folder: Path) -> bool:
    """Tell whether a folder has a file with a tokenizer's vocabulary, whatever is in it."""
    return any(os.path.lexists(folder / name) for name in VOCABULARIES)


def read_tokenizer(place: str) -> Any:
    """Return transformers' tokenizer of a folder or a hub id. Raises DataError."""
    from transformers import AutoTokenizer

    folder = Path(place) if os.path.isdir(place) else None
    if folder:
        _require_files(folder)
    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:  # from_pretrained raises many kinds
        if folder and (damaged := _damaged(folder)):
            raise damaged from error
        remedy = "name a folder that holds a tokenizer.json, or a hub id"
        raise wrong_key(KEY, f"none can be loaded from {place}: {said(error)}", remedy) from error


def _require_files(folder: Path) -> None:
    """Check that a folder's tokenizer files exist and can be read. Raises DataError."""
    found = 0
    for name in VOCABULARIES + _BESIDE:
        file = folder / name
        try:
            os.lstat(file)
            with file.open("rb") as handle:
                start = handle.read(len(_POINTER))
        except FileNotFoundError:
            if not os.path.islink(file):
                continue
            raise _unread(file, "leads nowhere", "copy what it stands for") from None
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
            raise _unread(file, why, "let this user read it, or name another folder") from error
        if start == _POINTER:
            raise _unread(file, "is a pointer of Git LFS, not the file", "run `git lfs pull` there")
        found += name in VOCABULARIES
    if not found:
        what = f"the folder `{folder}` holds no tokenizer (no {', '.join(VOCABULARIES)})"
        remedy = "name a folder that holds the model's own, or its hub id"
        raise wrong_key(KEY, what, remedy)


def _damaged(folder: Path) -> DataError | None:
    """Return the error for the first tokenizer file that is not a JSON object, if there is one."""
    for name in VOCABULARIES + _BESIDE:
        file = folder / name
        if file.suffix != ".json" or not file.is_file():
            continue
        try:
            if isinstance(json.loads(file.read_bytes()), dict):
                continue
            why = "is no JSON object"
        except (ValueError, RecursionError) as error:
            why = f"is cut off or damaged ({said(error)})"
        return _unread(file, why, "copy or download it again, whole")
    return None


def _unread(file: Path, why: str, remedy: str) -> DataError:
    return wrong_key(KEY, f"`{file}` {why}", remedy)


class TextTokeniser:
    """A Hugging Face tokenizer with the project's rules for special tokens; threads may share it.

    It calls the Rust tokenizer underneath: the Python class changes shared state as it encodes.
    """

    def __init__(self, tokenizer: Any, template: str | None, train_on: str) -> None:
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.eos: int | None = tokenizer.eos_token_id
        self.train_on = "assistant" if train_on == "completion" else train_on
        self._special = {
            name: str(token)
            for name, token in tokenizer.special_tokens_map.items()
            # a template can only name single tokens: bos_token, eos_token
            if not isinstance(token, list)
        }
        added = tokenizer.added_tokens_decoder.values()
        ends = tuple(sorted({token.content for token in added if token.special}))
        self.template = ChatTemplate(template, self._special, ends) if template else None
        self._own = template == own_template(tokenizer)
        self._bytes, self._added = TokenBytes.of(self.backend), AddedTokens.of(self.backend)
        apart = self._ids("a", special=False) + self._ids("b", special=False)
        self._prefixes = self.backend.decode(apart) != "ab"  # a space begins every text
        probe = self.backend.encode("a").ids
        self._adds_eos = bool(probe) and probe[-1] == self.eos
        self._adds_bos = bool(probe) and probe[0] == tokenizer.bos_token_id

    def identity(self) -> str:
        """Return a hash of everything here that decides how a text is tokenised."""
        versions = f"{version('tokenizers')} {version('transformers')}"
        template = (self.template.marked_copy or self.template).source if self.template else None
        parts = (self.backend.to_str(), str(template), str(self.eos), versions)
        # "True" and "False" keep the names of data that was tokenised by an earlier version.
        trains = {"all": "True", "assistant": "False"}.get(self.train_on, self.train_on)
        named = [*parts, str(sorted(self._special.items())), trains]
        if self.template and self.template.writes_today:
            named.append(date.today().isoformat())
        return blake2b("\0".join(named).encode(), digest_size=16).hexdigest()

    def problems(self, formats: Set[str], vocab_size: int) -> list[Finding]:
        """Return a finding for each reason why these formats cannot be tokenised for the model.

        vocab_size: how many tokens the model's vocabulary has.
        """
        found = []
        own = self.backend.get_vocab_size(with_added_tokens=False)
        if own > vocab_size:
            # Added tokens may exceed it: a padding token that no sample has does no harm.
            what = f"the tokenizer has {own:,} tokens, the model's vocabulary {vocab_size:,}"
            found.append(("model.tokenizer", what, "name the model's own"))
        if self.eos is None and formats & {"text", "prompt_completion"}:
            what = "it has no EOS token, which text and completions end in"
            found.append(("model.tokenizer", what, "set eos_token in its tokenizer_config.json"))
        if "messages" in formats:
            found += template_problems(self.template, self.backend, own=self._own)
        return found

    def notes(self, formats: Set[str]) -> list[str]:
        """Return a line for each thing that a user should know about the chat template."""
        if not self.template or "messages" not in formats:
            return []
        return template_notes(self.template, self.backend)

    def sample(self, record: Record) -> Sample:
        """Return a record of text as ids and labels. Raises SampleFault."""
        fields, unused, lost = record.fields, record.unused, ""
        if record.format == "messages":
            assert self.template  # `problems` requires one
            rendered = render(record, self.template, self.train_on)
            unused, lost = rendered.unused, rendered.lost
            if self.train_on == "all" and rendered.spans == [(0, len(rendered.text))]:
                ids = self._ids(rendered.text, special=False)
                ranges = [(0, len(ids))]
            else:
                ids, ranges = tokenise_spans(self.backend, rendered, self._bytes, self._added)
        elif record.format == "text":
            ids = self._closed(self._opened(fields["text"]))
            ranges = [(0, len(ids))]
        else:  # prompt and completion separately, as inference tokenises the prompt alone
            prompt, completion = self._opened(fields["prompt"]), fields["completion"]
            if self._prefixes:
                before = self._added.as_read(Rendered(fields["prompt"], [])).text
                behind = _encode_piece(self.backend, completion, before, self._added)
            else:
                behind = self._ids(completion, special=False)
            ids = [*prompt, *self._closed(behind)]
            ranges = [(0 if self.train_on == "all" else len(prompt), len(ids))]
            lost = "" if completion.strip() else EMPTY_ANSWER
        found = np.array(ids, np.int32)
        labels = np.full_like(found, NOT_TRAINED)
        for first, stop in ranges:
            labels[first:stop] = found[first:stop]
        return _begun(Sample(found, labels, record.origin, unused, lost))

    def _opened(self, text: str) -> list[Any]:
        """Return a text's ids with the tokenizer's BOS, unless the text has one, and no EOS."""
        ids = self._ids(text, special=True)
        ids = ids[:-1] if self._adds_eos else ids
        return ids[1:] if self._adds_bos and ids[1:2] == ids[:1] else ids

    def _closed(self, ids: list[Any]) -> list[Any]:
        """Return ids that end with one EOS."""
        return ids if ids[-1:] == [self.eos] else [*ids, self.eos]

    def _ids(self, text: str, special: bool) -> list[Any]:
        # A batch of one: unlike `encode`, it releases the GIL.
        return self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids


def given(record: Record, vocab_size: int) -> Sample:
    """Return the sample of a tokenized record; labels default to the ids.

    Ids are a list, or an array of an index. Raises SampleFault where one of them is outside the
    vocabulary.
    """
    ids = record.fields["input_ids"]
    labels = record.fields.get("labels", ids)
    allowed = f"0 … {vocab_size - 1}"
    ends = (ids.min(), ids.max()) if isinstance(ids, np.ndarray) else (min(ids), max(ids))
    if bad := [i for i in ends if not 0 <= i < vocab_size]:
        remedy = "tokenise with the model's tokenizer"
        raise SampleFault(f"input_ids holds {bad[0]}, the vocabulary is {allowed}; {remedy}")
    for label in labels if labels is not ids else ():
        if label != NOT_TRAINED and not 0 <= label < vocab_size:
            raise SampleFault(f"labels holds {label}; write -100 or an id in {allowed}")
    arrays = np.array(ids, np.int32), np.array(labels, np.int32)
    lost = _others(*arrays) if labels is not ids else ""
    return _begun(Sample(*arrays, record.origin, record.unused, lost))


def _others(ids: NDArray[np.int32], labels: NDArray[np.int32]) -> str:
    """Return a phrase that counts the labels that are another token's; empty without any.

    Raises SampleFault where each is the next token's: they are shifted when rows are made.
    """
    others = np.count_nonzero((labels != NOT_TRAINED) & (labels != ids))
    trained = np.flatnonzero(labels[:-1] != NOT_TRAINED)
    if others and len(trained) and (labels[trained] == ids[trained + 1]).all():
        remedy = "write each at its own token, since they are shifted here"
        raise SampleFault(f"labels are shifted: each is the token behind it; {remedy}")
    return f"{counted(int(others), 'label')} other than the token's own id" if others else ""


def _begun(sample: Sample) -> Sample:
    """Return a sample with its first label masked, since nothing predicts a document's first token.
    Raises SampleFault where it has no tokens."""
    if not len(sample.ids):
        raise SampleFault("an empty sample (no tokens); remove the record")
    sample.labels[0] = NOT_TRAINED
    return sample


def load_tokeniser(path: str | None, data: DataBlock) -> TextTokeniser:
    """Load the tokenizer at path, a folder or a hub id, with the template and train_on of `data`.

    Raises DataError.
    """
    if path is None:
        what = "no tokenizer, which every format but tokenized needs"
        raise wrong_key("model.tokenizer", what, "name a folder or a hub id")
    tokenizer = read_tokenizer(path)
    if not tokenizer.is_fast:
        what = f"{path} is a slow tokenizer, which knows no offsets"
        raise wrong_key("model.tokenizer", what, "save it as tokenizer.json first")
    return TextTokeniser(tokenizer, template_of(data, tokenizer), data.train_on)


# The tokens of a conversation.

_LEADS = ("\n", ".", "a")
_LONGEST = 256
"""Most characters of an added token."""


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer by id, computed at first use.

    A token's name has GPT-2's printable characters in place of bytes; added tokens are decoded.
    """

    @classmethod
    def of(cls, backend: Any) -> TokenBytes | None:
        """Return an empty TokenBytes for a byte-level tokenizers.Tokenizer, else None."""
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
    """Return the byte of each character in GPT-2's alphabet: printable Latin-1 characters are
    themselves, and the other bytes are characters from U+0100 on."""
    found = {letter: ord(letter) for letter in Alphabet.alphabet() if ord(letter) < 0x100}
    others = sorted(set(range(0x100)) - set(found.values()))
    return found | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES = _stand_ins()


@dataclass(frozen=True)
class AddedTokens:
    """A tokenizer's added tokens, and the white space that it removes or inserts beside them."""

    texts: tuple[str, ...]
    absorbed: re.Pattern[str] | None
    """White space, as the last group, that a token takes in (`lstrip`, `rstrip`: Phi-3's)."""
    spaced: re.Pattern[str]
    """A token, and the spaces behind it."""

    @classmethod
    def of(cls, backend: Any) -> AddedTokens:
        """Return those of a tokenizers.Tokenizer."""
        tokens = [token for token in backend.get_added_tokens_decoder().values() if token.content]

        def either(texts: list[str]) -> str:
            return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)"

        right = either([token.content for token in tokens if token.rstrip])
        left = either([token.content for token in tokens if token.lstrip])
        texts = [token.content for token in tokens]
        strips = any(token.rstrip or token.lstrip for token in tokens)
        # Possessive, and from a run's start alone, so that long runs take linear time.
        white = rf"(?:{right})(\s+)|(?<!\s)(\s++)(?={left})"
        absorbed = re.compile(white) if strips else None
        return cls(tuple(texts), absorbed, re.compile(f"({either(texts)}) +"))

    def as_read(self, rendered: Rendered) -> Rendered:
        """Return a text without the white space that the tokens take in, which gives the same
        ids."""
        if self.absorbed is None:
            return rendered
        text = rendered.text
        cuts = [found.span(found.lastindex or 0) for found in self.absorbed.finditer(text)]
        starts = [start for start, _ in cuts]
        gone = [0, *accumulate(stop - start for start, stop in cuts)]

        def moved(bound: int) -> int:
            before = bisect_left(starts, bound)
            inside = max(0, cuts[before - 1][1] - bound) if before else 0
            return bound - gone[before] + inside

        kept = "".join(text[a:b] for a, b in all_but(cuts, text))
        return replace(rendered, text=kept, spans=[(moved(a), moved(b)) for a, b in rendered.spans])

    def at_end(self, text: str) -> str:
        """Return the token with which a text ends, or an empty text."""
        return max((token for token in self.texts if text.endswith(token)), default="", key=len)

    def same(self, got: str, want: str, lead: str) -> bool:
        """Tell whether two texts are equal except for spaces behind the tokens, where a tokenizer
        like Llama 2's puts one more.

        lead: the token before the texts, or nothing.
        """
        return self.spaced.sub(r"\1", lead + got) == self.spaced.sub(r"\1", lead + want)


def tokenise_spans(
    backend: Any,
    rendered: Rendered,
    known: TokenBytes | None = None,
    added: AddedTokens | None = None,
) -> tuple[list[int], Spans]:
    """Return the text's token ids, and the token ranges that decode to exactly the marked spans.

    The text is tokenised as a whole if no token crosses a bound of a span; these are the tokens
    that inference sees. If one does (with a template without special tokens around the answer, or
    an answer that begins with the prompt's last character), the text is cut at the bounds and the
    pieces are tokenised by themselves, as in inference: first the prompt, then the answer. backend:
    a tokenizers.Tokenizer. known: the bytes of each of its tokens, from which ranges follow in half
    the time; None: they are not known. added: its added tokens, found here if None. Raises
    SampleFault if neither way decodes to the text, because the tokenizer is lossy.
    """
    if known is not None:
        ids = backend.encode_batch_fast([rendered.text], add_special_tokens=False)[0].ids
        found = _ranges_by_bytes([known[token] for token in ids], rendered)
        if found is not None:
            return ids, found
    added = added or AddedTokens.of(backend)
    rendered = added.as_read(rendered)
    whole = backend.encode_batch([rendered.text], add_special_tokens=False)[0]
    ids, offsets = whole.ids, whole.offsets  # the attributes copy them at each access
    ranges = _ranges(offsets, rendered.spans)
    crossed = _crossed(offsets, rendered.spans)
    if not crossed and _decodes(backend, ids, ranges, rendered, added):
        return ids, ranges
    ids, ranges = _encode_pieces(backend, rendered, added)
    if _decodes(backend, ids, ranges, rendered, added):
        return ids, ranges
    remedy = "use a tokenizer that can write this text (model.tokenizer)"
    raise SampleFault(f"the trained tokens do not decode to the assistant's text; {remedy}")


def _ranges_by_bytes(pieces: list[bytes], rendered: Rendered) -> Spans | None:
    """Return each span's range of tokens, from the tokens' bytes; None if these bytes are not the
    text's, if a token crosses a bound, or if a bound is beyond the text."""
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


def _crossed(offsets: list[tuple[int, int]], spans: Spans) -> bool:
    """Tell whether a token has characters on both sides of a bound of a span."""
    ends = [end for _, end in offsets]
    for bound in (bound for span in spans for bound in span):
        at = bisect_right(ends, bound)  # the first token that ends behind it
        if at < len(offsets) and offsets[at][0] < bound:
            return True
    return False


def _encode_pieces(backend: Any, rendered: Rendered, added: AddedTokens) -> tuple[list[int], Spans]:
    text, ids, ranges, at = rendered.text, list[int](), Spans(), 0

    def before(place: int) -> str:
        return text[max(0, place - _LONGEST) : place]

    for start, stop in rendered.spans:
        if at < start:
            ids += _encode_piece(backend, text[at:start], before(at), added)
        first = len(ids)
        ids += _encode_piece(backend, text[start:stop], before(start), added)
        ranges.append((first, len(ids)))
        at = stop
    if at < len(text):
        ids += _encode_piece(backend, text[at:], before(at), added)
    return ids, ranges


def _encode_piece(backend: Any, text: str, before: str, added: AddedTokens) -> list[int]:
    """Return the token ids of a piece of a text. before: the end of the text in front of it.

    Tokenizers like Llama 2's put a space in front of every text, and in one behind every added
    token. So a piece is tokenised after the added token before it, or else after another short
    text, and the tokens of that are removed; several such texts are tried, since one may merge with
    the piece.
    """
    alone: list[int] = backend.encode_batch([text], add_special_tokens=False)[0].ids
    if not before:
        return alone
    mark = added.at_end(before)
    for lead in (mark,) if mark else _LEADS:
        ahead, both = backend.encode_batch([lead, lead + text], add_special_tokens=False)
        if backend.decode(ahead.ids + alone, skip_special_tokens=False) == lead + text:
            return alone
        if both.ids[: len(ahead.ids)] == ahead.ids:
            return list(both.ids[len(ahead.ids) :])
    return alone


def _decodes(
    backend: Any, ids: list[int], ranges: Spans, rendered: Rendered, added: AddedTokens
) -> bool:
    """Tell whether each range of tokens decodes to its span.

    A range is decoded together with the tokens since the end of the span before, where a character
    is sure to end, because decoders strip the space of the first token.
    """
    back, text = 0, rendered.text
    for (first, stop), (start, end) in zip(ranges, rendered.spans, strict=True):
        before = backend.decode(ids[back:first], skip_special_tokens=False)
        through = backend.decode(ids[back:stop], skip_special_tokens=False)
        got, want = through[len(before) :], text[start:end]
        if not through.startswith(before):
            return False
        if got != want:
            lead = added.at_end(text[max(0, start - _LONGEST) : start])
            # Qwen's tokenizers compose characters (NFC) before they tokenise.
            if not added.same(normalize("NFKC", got), normalize("NFKC", want), lead):
                return False
        back = stop
    return True
