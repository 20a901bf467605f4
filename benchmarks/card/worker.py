"""One case on one GPU: python -m benchmarks.card.worker CASE FOLDER DEVICE.

It imports and prepares beside the others, and takes the GPU when FOLDER/turn is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from benchmarks.card.cases import Case
from uspft.checkpoint.weights import weights_of
from uspft.commands.rank import ranks_environment
from uspft.config import ModelBlock, Recipe
from uspft.parameters.source import Weights
from uspft.prepare.examine import examine
from uspft.tensor.parts import Part

RATE = 1e-5
MINUTES = 5.0
KERNELS = 40
"""Of a profile, how many are kept."""
TURN = "turn"
"""The file that says that the GPU is this case's."""


def measured(case: Case, folder: Path, device: str) -> dict[str, Any]:
    """Return seconds, losses and bytes of the steps of a case.

    `held_bytes` is what is allocated between steps, `peak_bytes` the most that tensors took,
    `reserved_bytes` what the allocator had from the device for it.
    """
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= ranks_environment(device, os.environ)
    torch.set_num_threads(4)
    from uspft.engine.quarantine import prepare_deepspeed

    store = dist.FileStore(str(folder / "store"), 1)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    limit = timedelta(minutes=MINUTES)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    prepare_deepspeed()
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    make = _plain if case.plain else _ours
    begin = make(case, folder, place)
    while not (folder / TURN).exists():
        time.sleep(0.05)
    if device == "cuda":
        torch.cuda.set_device(place)
    began = time.perf_counter()
    step, kernel = begin()
    ready = time.perf_counter() - began
    seconds, losses, peaks = list[float](), list[float](), list[int]()
    for number in range(1, case.steps + 1):
        taken = _timed(step, number, place)
        seconds.append(taken[0])
        losses.append(taken[1])
        peaks.append(taken[2])
    memory = {"peak_bytes": peaks[-1], "first_peak_bytes": peaks[0]}
    if device == "cuda":
        memory["held_bytes"] = torch.cuda.memory_allocated()
        memory["reserved_bytes"] = torch.cuda.max_memory_reserved()
    more = {"kernels": _profile(step, case.steps + 1)} if case.profiled else {}
    return {
        **more,
        "kernel": kernel,
        "ready_seconds": ready,
        "seconds": seconds,
        "losses": losses,
        **memory,
    }


Step = Callable[[int], float]
"""Takes the step of a number, and returns its loss."""


def _timed(step: Step, number: int, device: torch.device) -> tuple[float, float, int]:
    """Return a step's seconds, loss and peak bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = step(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    return took, loss, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _recipe(case: Case, folder: Path, device: torch.device) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(case.recipe(folder, device.type)))
    return examine(path, [], 1, None).recipe


def _profile(step: Step, number: int) -> dict[str, tuple[float, int]]:
    """Return milliseconds and calls of the GPU's kernels in a step, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step(number)
        torch.cuda.synchronize()
    every = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    return {one.key[:160]: (one.self_device_time_total / 1e3, one.count) for one in every[:KERNELS]}


def _ours(case: Case, folder: Path, device: torch.device) -> Callable[[], tuple[Step, str]]:
    from uspft.assemble import assemble
    from uspft.data.corpus.prepare import prepare
    from uspft.job import Job
    from uspft.mesh import Groups

    recipe = _recipe(case, folder, device)
    corpus = prepare(recipe.data, None, case.vocabulary(), folder / "cache")
    job = Job(recipe, corpus, recipe.training.steps or 0, {})

    def begin() -> tuple[Step, str]:
        run = assemble(job, device, Groups(timedelta(minutes=MINUTES)), _quick_weights)

        def step(number: int) -> float:
            return float(run.engine.step(run.loader.batches(number), RATE, stop=False).loss)

        return step, run.world.kernel.name

    return begin


class QuickWeights:
    """Random weights, of which a large matrix is one block repeated."""

    def __init__(self, source: Weights) -> None:
        self._source = source
        self._block = (0.02 * torch.randn(1 << 20)).bfloat16()

    def draws(self, name: str) -> bool:
        return False

    def read(self, name: str, part: Part) -> Tensor:
        if part.count < self._block.numel():
            return self._source.read(name, part)
        times = -(-part.count // self._block.numel())
        return self._block.repeat(times)[: part.count].view(part.size)


def _quick_weights(block: ModelBlock, seed: int, model: Any, checkpoint: Any = None) -> Weights:
    return QuickWeights(weights_of(block, seed, model, checkpoint))


def _plain(case: Case, folder: Path, device: torch.device) -> Callable[[], tuple[Step, str]]:
    """Return plain transformers: bfloat16 under DeepSpeed's ZeRO-1, attention by torch (SDPA),
    every layer checkpointed."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    from uspft.model.hf_config import model_config

    config = model_config(_recipe(case, folder, device).model, case.tokens)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]

    def begin() -> tuple[Step, str]:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
        model.train()
        fused = device.type == "cuda"
        adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=fused)
        asked = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=asked)

        def step(number: int) -> float:
            ids = torch.tensor([rows[number - 1]["input_ids"]], device=device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return float(loss.detach())

        return step, "transformers, sdpa"

    return begin


def main(words: list[str]) -> None:
    case, folder, device = json.loads(words[0]), Path(words[1]), words[2]
    try:
        found = measured(Case.of(case), folder, device)
    except torch.OutOfMemoryError as error:
        found = {"out_of_memory": str(error).split(". ")[0]}
    (folder / "found.json").write_text(json.dumps(found))
    os._exit(0)  # DeepSpeed's threads would wait for a device that nobody needs


if __name__ == "__main__":
    main(sys.argv[1:])
