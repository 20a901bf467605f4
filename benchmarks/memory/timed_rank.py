"""One rank of the timed steps: python -m benchmarks.memory.timed_rank FOLDER RANK."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.lab.processes import Tell, as_rank
from benchmarks.memory.count import module_of, world_of
from benchmarks.memory.peers import alst_model, tiled_loss, tiled_mlps
from benchmarks.memory.report import ALL_HEADS
from uspft.batch import Batch
from uspft.config.recipe import MemoryBlock
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.segments import Segments

VOCABULARY, HEADS, KV_HEADS, LAYERS = 4096, 4, 2, 1
SAME = 1e-4
"""Relative differences of losses and gradient norms that are those of another computation."""
OURS, AGAIN = "uspft", "uspft again"
GROUPED_HEADS, GROUPED_KV_HEADS = 8, 4
"""Of the model whose attention works in groups: two for each of two Ulysses ranks."""


@dataclass(frozen=True)
class Setting:
    """A row of one document, the hidden size of the model, and how often all take turns."""

    tokens: int
    hidden: int
    rounds: int
    groups_under: str | None = None
    """The algorithm under which groups of heads take turns with all heads; None: ours with
    ALST's."""

    def layout(self, ranks: int) -> tuple[str, Layout]:
        """Return by which algorithm so many ranks share the row, and their layout."""
        name = self.groups_under or "ulysses_cp"
        return name, Layout(ulysses=ranks) if name == "ulysses_cp" else Layout(ring=ranks)


@dataclass(frozen=True)
class Racer:
    """A model, and its summed loss for this rank's part of the row."""

    module: nn.Module
    loss: Callable[[], Tensor]
    tiles: Callable[[], Any] = nullcontext
    """The `with` block in which its MLPs work tile by tile."""

    def step(self) -> tuple[float, float]:
        """Take a step of AdamW on the mean over the row; return its loss and gradient's norm."""
        parameters = list(self.module.parameters())
        with self.tiles():
            loss = self.loss()
            loss.backward()
        whole = loss.detach().double()
        dist.all_reduce(whole)
        gradients = [one.grad for one in parameters if one.grad is not None]
        assert len(gradients) == len(parameters)
        flat = torch.cat([one.flatten() for one in gradients])
        dist.all_reduce(flat)
        norm = float(flat.double().norm())
        for one, mean in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            one.grad = mean.view_as(one)
        torch.optim.AdamW(parameters, lr=0.0).step()
        self.module.zero_grad(set_to_none=True)
        return float(whole), norm


def measured(record: dict[str, Any], tell: Tell) -> dict[str, list[float]]:
    """Return the seconds of each contender's steps, of the slowest rank; collective."""
    setting = Setting(**record)
    racers = _grouped(setting) if setting.groups_under else _racers(setting)
    found = dict[str, list[float]]()
    for number in range(setting.rounds + 1):
        turn, names, said = number % len(racers), list(racers), {}
        for name in names[turn:] + names[:turn]:
            gc.collect()
            dist.barrier()
            began = time.perf_counter()
            said[name] = racers[name].step()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number:  # the first warms up
                found.setdefault(name, []).append(float(took))
        _require_same(said)
        tell(f"round {number}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in found.items()))
    return found


def _require_same(said: dict[str, tuple[float, float]]) -> None:
    """Raises RuntimeError where a contender's loss or norm is not the first one's."""
    first, *others = said.values()
    for other in others:
        if any(abs(a - b) > SAME * abs(b) for a, b in zip(other, first, strict=True)):
            raise RuntimeError(f"losses and norms differ: {said}")


def _config(setting: Setting, heads: int, kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setting.hidden,
        intermediate_size=11 * setting.hidden // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=setting.tokens,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )


def _ids(setting: Setting) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (setting.tokens + 1,))


def _grouped(setting: Setting) -> dict[str, Racer]:
    """Return ours with all heads at once, the same again, and with groups of all query heads of a
    KV head."""
    config = _config(setting, GROUPED_HEADS, GROUPED_KV_HEADS)
    ids, per_kv = _ids(setting), GROUPED_HEADS // GROUPED_KV_HEADS
    parts: Any = module_of(deepcopy(config), MemoryBlock()).parts
    weights = parts.model.state_dict()
    wanted: dict[str, int | str] = {ALL_HEADS: "all", f"{ALL_HEADS} again": "all"}
    wanted[f"{per_kv} of {GROUPED_HEADS} heads"] = per_kv
    return {name: _ours(config, setting, ids, weights, heads) for name, heads in wanted.items()}


def _racers(setting: Setting) -> dict[str, Racer]:
    config, ids = _config(setting, HEADS, KV_HEADS), _ids(setting)
    with tiled_mlps():
        theirs = alst_model(config, sdpa_attention_forward)
    part = setting.tokens // dist.get_world_size()
    mine = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    batch = {
        "input_ids": ids[None, :-1][:, mine],
        "position_ids": torch.arange(setting.tokens)[None, mine],
        "labels": ids[None, 1:][:, mine],
        "use_cache": False,
    }
    weights = theirs.state_dict()
    return {
        "ALST": Racer(theirs, lambda: tiled_loss(theirs, batch, 1 / setting.tokens), tiled_mlps),
        OURS: _ours(config, setting, ids, weights),
        AGAIN: _ours(config, setting, ids, weights),
    }


def _ours(
    config: Any,
    setting: Setting,
    ids: Tensor,
    weights: dict[str, Tensor],
    heads_at_once: int | str = "all",
) -> Racer:
    """Return ours with ALST's choices: tiles of as many tokens as the hidden size, and the loss of
    a rank in one."""
    ranks = dist.get_world_size()
    options = {
        "recompute": "attention",
        "mlp_tile_tokens": setting.hidden,
        "loss_tile_tokens": setting.tokens // ranks,
        "attention_heads": heads_at_once,
    }
    module = module_of(deepcopy(config), MemoryBlock.model_validate(options))
    parts: Any = module.parts
    parts.model.load_state_dict(weights)
    algorithm, layout = setting.layout(ranks)
    world = world_of(layout, algorithm, torch.device("cpu"), TorchCpu())
    share = world.share([Segments.single(setting.tokens)])
    held = torch.cat([torch.arange(start, stop) for start, stop in share.held])
    every = torch.arange(len(held))
    batch = Batch(
        world,
        share,
        ids[:-1][held][None],
        held[None],
        ids[1:][held],
        every,
        held,
        torch.zeros_like(held),
        len(held),
        (0,),
    )
    return Racer(module, lambda: module(batch, (1 / setting.tokens,)).sum())


if __name__ == "__main__":
    as_rank(sys.argv[1:], measured)
