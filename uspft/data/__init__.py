"""Training and evaluation data: files become records, tokens in a corpus, and rows of a step.

The folders in the order in which data passes: files (what is on disk) → records (checked, under
our names) → chat (conversations as text) → corpus (tokens, kept in a folder) → rows (packed, a
share for each rank). samples: the forms of a sample on the way; faults: what is wrong, as messages.
"""

from uspft.data.chat.template import turn_ends, without_marks
from uspft.data.corpus.corpus import (
    CacheSize,
    Corpus,
    corpora_in,
    empty,
    holding,
    read_report,
)
from uspft.data.corpus.counts import kept_and_dropped
from uspft.data.corpus.prepare import (
    HELD_OUT,
    first_look,
    formats_of,
    hold_out,
    prepare,
    prepare_sets,
    prepared,
)
from uspft.data.corpus.tokenise import load_tokeniser
from uspft.data.faults import DataError
from uspft.data.files.sources import not_checked, source_problems
from uspft.data.rows.stream import Row, RowStream, training_rows

__all__ = [
    "HELD_OUT",
    "CacheSize",
    "Corpus",
    "DataError",
    "Row",
    "RowStream",
    "corpora_in",
    "empty",
    "first_look",
    "formats_of",
    "hold_out",
    "holding",
    "kept_and_dropped",
    "load_tokeniser",
    "not_checked",
    "prepare",
    "prepare_sets",
    "prepared",
    "read_report",
    "source_problems",
    "training_rows",
    "turn_ends",
    "without_marks",
]
