"""The live bytes of real runs of a small model on two processes, beside fake ones and the formula.

    .venv/bin/python -m benchmarks.memory.real [--tokens 4096,16384,65536] [--out DIR]

Heads are exchanged and MLPs computed; attention's kernel computes nothing and allocates what it
returns, as in the fake runs.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.lab.machine import circumstances
from benchmarks.lab.processes import Ranks, records_of
from benchmarks.lab.results import RESULTS, read, write
from benchmarks.memory.count import count
from benchmarks.memory.options import MODEL, ours
from benchmarks.memory.peers import count_alst
from benchmarks.memory.predicted import predicted
from benchmarks.memory.real_rank import Setting
from benchmarks.memory.report import ALST, ALST_OFFLOADED, REAL, real_table
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.prepare.host import CONFIGS

RANKS = 2
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1024,
}
PEERS = {ALST: False, ALST_OFFLOADED: True}


def main() -> None:
    """Count each row, write it, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.real")
    parser.add_argument("--tokens", type=_numbers, default=(4096, 16_384, 65_536), metavar="A,B")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    asked = parser.parse_args()
    shape = read_shape(ModelBlock(name_or_path=MODEL, overrides=SIZES), CONFIGS)
    assert isinstance(shape, ModelShape)
    options = ours(shape, RANKS)
    told = {name: block.model_dump() for name, block in options.items()}
    setting, about = Setting(asked.tokens, SIZES, told, PEERS), circumstances()
    ranks = Ranks("benchmarks.memory.real_rank", RANKS, [()])
    real = records_of(ranks, asdict(setting), lambda line: print(line, flush=True))
    found: dict[str, Any] = {**about, "sizes": SIZES, "counted": {}}
    for tokens in asked.tokens:
        here = found["counted"][str(tokens)] = _faked(shape, tokens, options)
        for name, one in real[str(tokens)].items():
            here[name]["real_bytes"] = one["most_bytes"]["all"]
    path = write(asked.out, "memory", {**read(asked.out, "memory"), REAL: found})
    print(real_table(found))
    print(path)


def _faked(
    shape: ModelShape, tokens: int, options: dict[str, MemoryBlock]
) -> dict[str, dict[str, int]]:
    """Return what fake runs have alive, and what is predicted of ours."""
    found, layout = dict[str, dict[str, int]](), Layout(ulysses=RANKS)
    config = LlamaConfig(**SIZES, dtype=torch.bfloat16)
    for name, offload in PEERS.items():
        fake = count_alst(config, tokens, RANKS, offload=offload)
        found[name] = {"fake_bytes": fake.most_bytes["all"]}
    for name, memory in options.items():
        fake = count(config, tokens, memory, layout)
        need = predicted(shape, layout, tokens, memory, "ulysses_cp")
        found[name] = {
            "fake_bytes": fake.most_bytes["all"],
            "predicted_bytes": need.activation_bytes,
        }
    return found


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(","))


if __name__ == "__main__":
    main()
