"""Tiny models that give one answer, in the template of the tokenizer beside them, and end it."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.launch import ROOT
from tests.support.models import ARCHITECTURES
from uspft.data.corpus.tokenise import TextTokeniser
from uspft.data.corpus.workers import Encoder
from uspft.data.samples import Origin, Record

ASKED = {"role": "user", "content": "Who are you?"}
ANSWER = "I am a very small model."
OTHER_END = 7
"""An end of the base model's own generation config."""


def base_model(folder: Path, kind: str) -> Path:
    """The config and tokenizer of a tiny model, and the generation config that it came with."""
    name, own = ARCHITECTURES[kind]
    shutil.copytree(ROOT / "data/tokenizer", folder)
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": 8192,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 1,
            **own,
            "tie_word_embeddings": False,
        }
    )
    config.save_pretrained(folder)
    # As some on the hub are: transformers reads these settings, and would refuse to save them.
    settings = {"eos_token_id": OTHER_END, "do_sample": False, "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def says(net: Any, tokeniser: TextTokeniser) -> None:
    """Make a model answer with ANSWER: after each of its tokens the next one, all else near 0."""
    answered = {"messages": [ASKED, {"role": "assistant", "content": ANSWER}]}
    sample = Encoder(tokeniser, net.config.get_text_config().vocab_size).sample(
        Record("messages", answered, Origin(0, 1))
    )
    trained = int((sample.labels != -100).argmax())
    tokens = sample.ids[trained - 1 : -1].tolist()
    assert len(set(tokens)) == len(tokens) > 5
    small = 1e-3
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(small)
            elif "layernorm" in name:  # some scale what comes out of a block
                parameter.fill_(small - ("Gemma" in type(net).__name__))
        embedding, head = net.get_input_embeddings().weight, net.get_output_embeddings().weight
        embedding.normal_()
        head.zero_()
        for before, after in pairwise(tokens):
            head[after] = embedding[before] / embedding.shape[1]
