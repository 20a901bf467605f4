"""The live bytes of Llama-3.1-8B's layers with each option, beside what is predicted.

    .venv/bin/python -m benchmarks.memory [--tokens 131072] [--ranks 8] [--out DIR]

A row of one document is shared by as many ranks under Ulysses; tensors are fake. Two layers and
three are counted: what the third adds is what each keeps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import LlamaConfig

from benchmarks.lab.results import RESULTS, read, write
from benchmarks.memory.count import Counted, count
from benchmarks.memory.report import table
from uspft.config.algorithms import row_of
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.model.loss import tile_tokens
from uspft.planner.activations import activations
from uspft.prepare.invocation import CONFIGS

MODEL = "meta-llama/Llama-3.1-8B"
TILE = {"mlp_tile_tokens": 2340}
OPTIONS: dict[str, dict[str, object]] = {
    "recompute: nothing": {"recompute": "nothing"},
    "recompute: exchange": {"recompute": "exchange"},
    "recompute: attention": {"recompute": "attention"},
    "attention, tiles": {"recompute": "attention", **TILE},
    "attention, tiles, offloaded": {
        "recompute": "attention",
        "offload_activations": "cpu",
        **TILE,
    },
}


def main() -> None:
    """Print a line for each option, and write what was counted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    parser.add_argument("--tokens", type=int, default=1 << 17, help="of the whole row")
    parser.add_argument("--ranks", type=int, default=8, choices=(1, 2, 4, 8))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    asked = parser.parse_args()
    shape = read_shape(ModelBlock(name_or_path=MODEL), CONFIGS)
    assert isinstance(shape, ModelShape)
    layout = Layout(ulysses=asked.ranks)
    unit = asked.tokens // asked.ranks * shape.hidden_size * 2
    row = row_of("ulysses_cp", layout.context)
    print(f"{MODEL}, {asked.tokens:,} tokens on {asked.ranks} ranks; u = {unit / 2**30:.3g} GiB")
    found = {}
    for name, options in OPTIONS.items():
        if options["recompute"] == "exchange" and asked.ranks == 1:
            continue
        tile = tile_tokens("auto", shape.vocab_size)
        memory = MemoryBlock.model_validate({**options, "loss_tile_tokens": tile})
        two, three = (counted(layers, asked.tokens, memory, layout) for layers in (2, 3))
        whole = activations(shape, layout, asked.tokens // asked.ranks, memory, row)
        assert whole
        few = whole.of_layers(2)
        kept = three.kept_bytes + three.host_bytes - two.kept_bytes - two.host_bytes
        found[name] = {
            "layer_input_bytes": unit,
            "kept_by_a_layer_bytes": kept,
            "peak_of_two_layers_bytes": two.most_bytes["all"],
            "predicted_of_two_layers_bytes": few.peak_bytes,
            "predicted_bytes": whole.peak_bytes,
            "predicted_host_bytes": whole.host_bytes,
        }
    print(table(found))
    case = f"{asked.tokens}-{asked.ranks}"
    print(write(asked.out, "memory", {**read(asked.out, "memory"), case: found}))


def counted(layers: int, tokens: int, memory: MemoryBlock, layout: Layout) -> Counted:
    """Count so many layers of the model."""
    raw = json.loads((CONFIGS / "models" / f"{MODEL.replace('/', '--')}.json").read_text())
    config = LlamaConfig(**{k: v for k, v in raw.items() if k not in ("model_type", "torch_dtype")})
    config.num_hidden_layers, config.dtype = layers, torch.bfloat16
    algorithm = "ulysses_cp" if layout.ranks > 1 else "whole"
    return count(config, tokens, memory, layout, algorithm)


if __name__ == "__main__":
    main()
