"""The forms of a sample between a file and a corpus: entry, record, text and tokens.

files/readers returns an Entry, as in its file; records/reader a Record, checked and under our
names; chat/rendering a Rendered conversation, its text with the spans that train; corpus/tokenise a
Sample, ids and labels, which a corpus stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from uspft.data.faults import place

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Spans = list[tuple[int, int]]
"""Ranges [start, stop) of characters or of tokens."""
NOT_TRAINED = -100
"""The label of a token that does not train."""


class Origin(NamedTuple):
    """The place where a sample was read, as a corpus stores it."""

    file: int
    """The number of its file or split among all that are read."""
    line: int
    """The line, counted from 1; in a table, the number of the record."""
    number: int = 0
    """The index in a JSON array, counted from 1; 0 elsewhere."""

    def place(self, shown: str) -> str:
        """Return the place as messages name it. shown: the file's or split's name."""
        return place(shown, self.line, self.number)


@dataclass(frozen=True)
class Entry:
    """A sample as in its file: an object, with its line and number as in Origin."""

    line: int
    content: dict[str, Any] | bytes
    """The object, or a line of JSON that is parsed only when it is tokenised."""
    size: int
    """About how many bytes of the file it takes, for progress; 1 in a hub data set."""
    number: int = 0


@dataclass(frozen=True)
class Record:
    """A sample as it was read, with names and types of its fields checked, but not token ids."""

    format: str
    fields: dict[str, Any]
    """The fields of its format, under our names."""
    origin: Origin
    shape: str = ""
    """A phrase for the shape, on the first record of a file; else empty."""
    system_added: bool = False
    """Whether its first turn comes from a field `system`; messages count turns without it."""
    unused: tuple[str, ...] = ()
    """Fields that nothing uses; on a table's first record, also the columns that are not read."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the spans that train: characters [start, stop), sorted and not
    adjacent."""

    text: str
    spans: Spans
    unused: tuple[str, ...] = ()
    """Fields of its record and of its turns that nothing uses."""
    lost: str = ""
    """What the chat template leaves out of it; empty for nothing."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample as tokens: ids and labels, int32 arrays of one length.

    labels are not shifted; -100 marks a token that is not trained, which the first never is.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    origin: Origin
    unused: tuple[str, ...] = ()
    """As in Rendered. Neither this nor `lost` is stored in the corpus, only in its report."""
    lost: str = ""
