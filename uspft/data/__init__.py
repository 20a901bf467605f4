"""Training and evaluation data: files are found, tokenised, packed into rows, and streamed.

Reading order: sources (which files) → opened (their bytes) → objects (what is in them: arrays,
separated, tables) → samples (what each is from here on: Record, Rendered, Sample) → known_fields
(every name that is known, and what becomes of it) → shapes, other_fields, misnamed, conversations
(what is made of them, what is refused) → records, values (a Record: checked) → rendering (Rendered:
its text; of conversations by chat_template, turns, left_out) → tokenise, chat (a Sample: ids
and labels) → reading, workers (all of it, on threads or in processes) → cache_key, cache (once, in
a folder; evaluation: each set in its own; holdout; required: what all must have) → corpus → packing
→ stream (rows) → loader (each rank's share; eval_rows: those of evaluation sets). serving: the
template that goes with the trained model.
"""

from uspft.data.cache import (
    CacheSize,
    corpora_in,
    empty,
    formats_of,
    holding,
    prepare,
    prepared,
)
from uspft.data.corpus import Corpus, read_report
from uspft.data.counts import fates
from uspft.data.evaluation import prepare_sets
from uspft.data.faults import DataError
from uspft.data.first_look import first_look
from uspft.data.holdout import HELD_OUT, hold_out
from uspft.data.serving import turn_ends, without_marks
from uspft.data.sources import not_checked, source_problems
from uspft.data.stream import Row, RowStream, training_rows
from uspft.data.tokenise import load_tokeniser

__all__ = [
    "HELD_OUT",
    "CacheSize",
    "Corpus",
    "DataError",
    "Row",
    "RowStream",
    "corpora_in",
    "empty",
    "fates",
    "first_look",
    "formats_of",
    "hold_out",
    "holding",
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
