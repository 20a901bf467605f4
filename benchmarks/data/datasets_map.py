"""The other side: `datasets.map` over all cores, as Hugging Face's examples tokenise.

    python -m benchmarks.data.datasets_map FILE TEMPLATE PROCESSES FOLDER

Without marks transformers knows no trained tokens, and the token ids are all that is made.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.case import TOKENIZER, digest_of


def main(file: Path, template: Path, processes: int, folder: Path) -> None:
    """This tokenises a file of conversations and writes FOLDER/measured.json."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = template.read_text()
    begin = time.perf_counter()
    kind = "parquet" if file.suffix == ".parquet" else "json"
    cache = str(folder / "datasets")
    loaded = load_dataset(kind, data_files=str(file), split="train", cache_dir=cache)
    work = tokens_of(tokenizer, "endgeneration" in tokenizer.chat_template)
    made = loaded.map(work, num_proc=processes, remove_columns=loaded.column_names)
    seconds = time.perf_counter() - begin
    ids = [np.asarray(chunk.flatten()) for chunk in made.data.column("input_ids").chunks]
    tokens = sum(map(len, ids))
    found = {"seconds": seconds, "tokens": tokens, "digest": digest_of(iter(ids))}
    (folder / "measured.json").write_text(json.dumps(found))


def tokens_of(tokenizer: Any, marked: bool) -> Callable[[dict[str, Any]], dict[str, list[int]]]:
    """This returns what makes ids of a conversation, and labels where the template is marked."""

    def work(record: dict[str, Any]) -> dict[str, list[int]]:
        found = tokenizer.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=marked
        )
        ids = found["input_ids"]
        if not marked:
            return {"input_ids": ids}
        trains = zip(ids, found["assistant_masks"], strict=True)
        return {"input_ids": ids, "labels": [i if mask else -100 for i, mask in trains]}

    return work


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
