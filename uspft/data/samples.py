"""What a sample is on its way from a file to a corpus: an object, a record, text, and tokens.

files/readers makes an Entry, as its file holds it; records/reader a Record, checked and under our
names; chat/rendering, of a conversation, a Rendered, its text with what trains; corpus/tokenise a
Sample, ids and labels, which a corpus keeps.
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
    """Where a sample was read, as a corpus keeps it."""

    file: int
    """The number of its file or split, among all that are read."""
    line: int
    """The line, counted from 1; in a table, the number of the record."""
    number: int = 0
    """Which element of a JSON array it is, counted from 1; 0 elsewhere."""

    def place(self, shown: str) -> str:
        """Return the place as faults name it. shown: the file's or split's name."""
        return place(shown, self.line, self.number)


@dataclass(frozen=True)
class Entry:
    """A sample as its file holds it: an object, with its line and number as of Origin."""

    line: int
    content: dict[str, Any] | bytes
    """The object, or a line of JSON that is parsed only where it is tokenised."""
    size: int
    """About how many bytes of the file it takes; 1 in a hub data set. For progress."""
    number: int = 0


@dataclass(frozen=True)
class Record:
    """A sample as it was read: fields are checked for names and types, not yet for token ids."""

    format: str
    fields: dict[str, Any]
    """The fields of its format, under our names."""
    origin: Origin
    shape: str = ""
    """What the first record of a file looks like, in words; empty for the others."""
    system_added: bool = False
    """Whether its first turn was made of a field `system`: faults count turns without it."""
    unused: tuple[str, ...] = ()
    """Its fields that nothing uses; on a table's first record, also the columns that are not
    read."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with the spans of it that train: characters [start, stop), which rise
    and do not touch."""

    text: str
    spans: Spans
    unused: tuple[str, ...] = ()
    """Fields that nothing uses, of its record and of its turns."""
    lost: str = ""
    """What the chat template leaves out of it; empty where that is nothing."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample as tokens: ids and labels, int32 arrays of one length.

    labels are not shifted; -100 marks a token that is not trained, which the first never is.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    origin: Origin
    unused: tuple[str, ...] = ()
    """As in Rendered. Neither this nor `lost` is in the corpus; its report tells of them."""
    lost: str = ""
