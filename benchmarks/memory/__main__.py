"""The live bytes of Llama-3.1-8B beside transformers and ALST, and what is predicted of ours.

    .venv/bin/python -m benchmarks.memory [--case 1048576-8 …] [--out DIR]

A case is the tokens of a row of one document and the ranks that share it; tensors are meta ones.
One layer is counted, or two where they are offloaded: each of 32 keeps what the last of them adds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.lab.results import RESULTS, ROOT, read, write
from benchmarks.memory.count import count
from benchmarks.memory.measured import Counted
from benchmarks.memory.options import LAYOUTS, MODEL, ways
from benchmarks.memory.peers import count_alst, count_plain
from benchmarks.memory.predicted import predicted
from benchmarks.memory.report import ALST, ALST_OFFLOADED, CASES, OFFLOADED, figures
from uspft.config import load
from uspft.config.inputs import ModelBlock
from uspft.families import ModelShape, read_shape
from uspft.planner.memory.formula import memory_of
from uspft.planner.options import options_of
from uspft.planner.trained import counts_of
from uspft.prepare.host import CONFIGS

RECIPE = ROOT / "recipes" / "llama3.1-8b-text-ring-8m.yaml"
"""Whose buckets and ZeRO stage all contenders have."""
CPU = {"device": "cpu"}


def main() -> None:
    """Count each case that is asked for, write it, and print the tables of all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    parser.add_argument("--case", nargs="+", default=CASES, choices=CASES, metavar="CASE")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    asked = parser.parse_args()
    shape = read_shape(ModelBlock(name_or_path=MODEL), CONFIGS)
    assert isinstance(shape, ModelShape)
    for case in asked.case:
        tokens, ranks = map(int, case.split("-"))
        found = measured(shape, tokens, ranks)
        path = write(asked.out, "memory", {**read(asked.out, "memory"), case: found})
    print("\n\n".join(figures(read(asked.out, "memory")).values()))
    print(path)


def measured(shape: ModelShape, tokens: int, ranks: int) -> dict[str, Any]:
    """Count each contender, and say what ZeRO adds."""
    found: dict[str, Any] = {}
    beside = 0  # what is alive after a forward beside what layers keep

    def add(name: str, counted: Callable[[Any], Counted], gradient_bytes: int) -> None:
        offloads = name in OFFLOADED
        layers = 2 if offloads else 1  # the one at work, and the input of that below it
        said = counted(config_of(layers))
        nonlocal beside
        kept = said.layer_bytes[0]
        if offloads:
            kept = (said.kept_bytes - beside) // layers
        else:
            beside = said.kept_bytes - kept
        found[name] = {
            "layer_input_bytes": tokens // ranks * shape.hidden_size * 2,
            "layers": shape.layers,
            "kept_bytes": kept,
            "host_bytes": said.layer_bytes[1],
            "peak_bytes": said.most_bytes["all"] + (shape.layers - layers) * kept,
            **state(shape, ranks, offloads=offloads, gradient_bytes=gradient_bytes),
        }

    if ranks == 1:
        add("transformers", partial(count_plain, tokens=tokens), 2)
    for name in (ALST, ALST_OFFLOADED):
        offload = name == ALST_OFFLOADED
        add(name, partial(count_alst, tokens=tokens, ranks=ranks, offload=offload), 2)
    for name, (algorithm, layout, memory) in ways(shape, ranks).items():
        how = partial(
            count,
            tokens=tokens,
            memory=memory,
            layout=layout,
            algorithm=algorithm,
            every_tile=False,
        )
        add(name, how, 4)
        need = predicted(shape, layout, tokens, memory, algorithm)
        found[name]["predicted_bytes"] = need.activation_bytes
    return found


def state(shape: ModelShape, ranks: int, *, offloads: bool, gradient_bytes: int) -> dict[str, Any]:
    """Return the bytes of weights, gradients, optimizer and buckets under ZeRO-3.

    offloads: whether the optimizer's state is on the host, with gradients; on one rank it always
    is, and weights are too. gradient_bytes: of one element as it is summed and reduced.
    """
    zero: dict[str, Any] = {"stage": 3, "reduce_bucket_size": 50_000_000}
    if offloads or ranks == 1:
        zero["offload_optimizer"] = CPU
    if ranks == 1:
        zero["offload_param"] = CPU
    recipe = load(RECIPE).recipe
    block = recipe.deepspeed.model_copy(update={"zero_optimization": zero})
    layout = LAYOUTS[ranks][1]
    options = options_of(recipe.model_copy(update={"deepspeed": block}), layout)
    need = memory_of(shape, layout, 1024, options=replace(options, offload_activations=False))
    device, host = float(need.state_bytes), float(need.host_bytes)
    every, less = counts_of(shape).every, 4 - gradient_bytes
    sums = less * every / ranks
    device -= less * zero["reduce_bucket_size"] + (0 if "offload_optimizer" in zero else sums)
    host -= sums if "offload_optimizer" in zero else 0
    return {"state_bytes": device, "state_host_bytes": host}


def config_of(layers: int) -> LlamaConfig:
    """Return the model's config with so many layers."""
    raw = json.loads((CONFIGS / "models" / f"{MODEL.replace('/', '--')}.json").read_text())
    config = LlamaConfig(**{k: v for k, v in raw.items() if k not in ("model_type", "torch_dtype")})
    config.num_hidden_layers, config.dtype = layers, torch.bfloat16
    return config


if __name__ == "__main__":
    main()
