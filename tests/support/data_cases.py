"""Data blocks and files for the data room's tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from uspft.data.corpus.prepare import prepare
from uspft.data.faults import DataError

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "data" / "tokenizer"
TEMPLATES = ROOT / "data" / "templates"
SAMPLES = ROOT / "data" / "samples"
LIMITS = ("max_samples", "max_tokens")
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def source(path: Any, **fields: Any) -> Any:
    """A source as the recipe's block has it."""
    off = dict.fromkeys(("name", "split", "format", "fields", "eod", "weight", *LIMITS))
    given = {**off, "title": str(path), **fields}
    return SimpleNamespace(path=str(path), **given)


def block(*sources: Any, **fields: Any) -> Any:
    """A data block with the contract's defaults; a path stands for a source."""
    train = tuple(s if isinstance(s, SimpleNamespace) else source(s) for s in sources)
    defaults: dict[str, Any] = {
        "train": train,
        "eval": None,
        "format": "auto",
        "fields": {},
        "sequence_length": 4096,
        "packing": "best_fit",
        "overlong": "error",
        "train_on": "assistant",
        "on_bad_sample": "error",
        "unused_fields": "list",
        "chat_template": None,
        "prompt_template": None,
        "shuffle": True,
        "workers": 2,
        "cache_dir": None,
    }
    return SimpleNamespace(**{**defaults, **fields})


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """JSON Lines; a string is written as it stands."""
    lines = (r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_lengths(path: Path, lengths: Iterable[int]) -> Path:
    """Tokenized samples of these lengths; sample i's tokens are 1000·(i + 1) + 0, 1, 2 …"""
    samples = ([1000 * (i + 1) + t for t in range(n)] for i, n in enumerate(lengths))
    return write_lines(path, ({"input_ids": ids} for ids in samples))


def faults_of(tmp_path: Path, data: Any, tokenizer: Any = TOKENIZER, size: int = 8192) -> list[str]:
    """The lines of the DataError that preparing raises; tokenizer None is none."""
    with pytest.raises(DataError) as caught:
        prepare(data, tokenizer and str(tokenizer), size, tmp_path / "cache")
    return caught.value.lines


def changed_tokenizer(folder: Path, template: str | None = None, **tokens: Any) -> Path:
    """The shipped tokenizer with a BOS and EOS written by a post-processor, or other tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    if "single" in tokens:
        marks = [("<|im_start|>", 2), ("<|endoftext|>", 0)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=tokens.pop("single"), special_tokens=marks
        )
    for name, value in tokens.items():
        setattr(tokenizer, name, value)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
