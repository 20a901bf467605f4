"""Trains the small byte-level BPE tokenizer of this folder on Python's standard library.

    python data/train_tokenizer.py [FOLDER]          # FOLDER: data/tokenizer

The result depends on the standard library's text and the tokenizers version alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
VOCABULARY = 8192
SPECIAL = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]


def library_texts() -> Iterator[str]:
    """The files that `python:stdlib` names, in its order."""
    from uspft.data.files.sources import STDLIB, list_files

    for file in list_files(STDLIB, "text"):
        try:
            yield file.path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def train() -> Tokenizer:
    """A byte-level BPE tokenizer of exactly VOCABULARY tokens: any UTF-8 text, and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"{tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the marked ChatML template: AutoTokenizer's."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[1],
        "additional_special_tokens": SPECIAL[2:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    template = (HERE / "templates" / "chatml.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    save(train(), Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "tokenizer")
