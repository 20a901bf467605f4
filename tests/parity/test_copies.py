"""Blocks of split matrices that take copies of their tokens by turns, beside those that take all at
once: gradients in float64, bytes, and the order in which transfers begin and are awaited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.support.held_rows import apart, batches_of, targets, wide
from tests.support.models import make_model
from tests.support.ranks import spawn
from tests.support.runs import GROUPS
from uspft.checkpoint.weights import weights_of
from uspft.comm import Books
from uspft.config.algorithms import WHOLE
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import make_mesh
from uspft.model.build import choose_trained, empty_model
from uspft.model.causal import CausalModel
from uspft.model.copies import LayerInCopies
from uspft.model.divided import PartLinear
from uspft.model.parallel import shards_under
from uspft.model.parallelise import divide_matrices, save_memory
from uspft.objective.causal import Causal
from uspft.parameters.fill import fill
from uspft.parameters.names import places, shapes_of
from uspft.parameters.shards import Holders
from uspft.sequence import make_algorithm
from uspft.tensor.interleaved import Crossing, GradientSum
from uspft.tensor.megatron import Megatron
from uspft.world import World

EXACT, TENSOR = 1e-12, 2
LORA = ModelBlock(adapter={"type": "lora", "rank": 3, "alpha": 6.0, "dropout": 0.3})
MODELS = {
    "llama": {"kind": "llama", "kv_heads": 2},
    "phi3": {"kind": "phi3", "kv_heads": 1},
    "gemma3": {"kind": "gemma3_text", "kv_heads": 2},
}
"""With biases, with one matrix for q, k and v whose rows ranks share, with norms behind blocks."""
KEPT = MemoryBlock(gradient_checkpointing=False)
AGAIN = MemoryBlock(gradient_checkpointing=True, recompute="attention")
CASES = [
    *(("llama", tokens, copies, KEPT) for tokens in (True, False) for copies in (2, 3, 100)),
    ("llama", True, 2, AGAIN),
    ("llama", False, 3, AGAIN),
    ("phi3", True, 3, KEPT),
    ("gemma3", True, 2, AGAIN),
    ("llama lora", True, 2, AGAIN),
    ("llama lora", False, 3, KEPT),
    ("phi3 lora", True, 5, KEPT),
]
"""Model, with an adapter or without, whether tokens are split, copies, memory; 48 tokens, of which
ranks have 24, are no multiple of 5 and fewer than 100."""


def step(
    folder: Path, tokens: bool, copies: int, memory: MemoryBlock, lora: bool
) -> tuple[Any, int, list[tuple[str, int]]]:
    """Loss with gradients, bytes of tensor parallelism, and what came when."""
    with logged() as log:
        return *_step(folder, tokens, copies, memory, log, lora), log


def _step(
    folder: Path,
    tokens: bool,
    copies: int,
    memory: MemoryBlock,
    log: list[tuple[str, int]],
    lora: bool,
) -> tuple[Any, int]:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = empty_model(config, torch.float64)
    if lora:
        choose_trained(model, LORA, 0)
    named = WHOLE, make_algorithm(WHOLE, 1, 1), Megatron(TENSOR, tokens, copies)
    world = World(
        make_mesh(Layout(TENSOR), GROUPS, Books()), *named, TorchCpu(), torch.device("cpu")
    )
    shards = shards_under(model, places(model), world, tensor_of_rows=1)
    holders = Holders.of(shards, dist.get_rank(), GROUPS, shapes_of(places(model)))
    block = LORA if lora else ModelBlock()
    source = weights_of(block.model_copy(update={"name_or_path": str(folder)}), 0, model)
    fill(model, places(model), torch.float64, source, holders)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:  # which begins as zeros, and would hide what goes in
            parameter.data += torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter)
    divide_matrices(model, [world], holders)
    for buffer in model.buffers():
        buffer.data = buffer.data.double() if buffer.is_floating_point() else buffer.data
    recompute, _ = save_memory(model.train(), memory)
    parts, objective = CausalModel(model, None, world.layout, recompute), Causal(config)
    (batch,) = batches_of(world, 1)
    log.clear()
    with wide(model):
        loss = objective(parts, batch, (1 / targets(1),)).sum()
        log.append(("back", 0))
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    sent = world.books.bytes["tensor"]
    world.books.close()  # which nothing that is not awaited lets pass
    return (float(loss.detach()), gradients), sent


@contextmanager
def logged() -> Iterator[list[tuple[str, int]]]:
    """A log of transfers of copies, begun and awaited, of products forward and backward, and of
    those whose gradients of weights were put off."""
    log: list[tuple[str, int]] = []
    numbers: dict[tuple[int, int], int] = {}
    start, finish, product = Crossing.start, Crossing.finish, PartLinear.forward
    make = GradientSum.make

    def started(self: Crossing, x: Any, copy: int, *, backward: bool) -> None:
        log.append(("begin", numbers.setdefault((id(self), copy), len(numbers))))
        keep.append(self)
        start(self, x, copy, backward=backward)

    def finished(self: Crossing, copy: int, *, backward: bool) -> Any:
        found = finish(self, copy, backward=backward)
        log.append(("await", numbers[id(self), copy]))
        return found

    def made(self: GradientSum, rows: Any, x: Any) -> None:
        log.append(("put off", 0))
        make(self, rows, x)

    def computed(self: PartLinear, x: Any) -> Any:
        out = product(self, x)
        log.append(("compute", 0))
        if out.requires_grad:
            out.register_hook(lambda _: log.append(("compute", 0)))
        return out

    keep: list[Any] = []
    with (
        mock.patch.object(PartLinear, "forward", computed),
        mock.patch.object(Crossing, "start", started),
        mock.patch.object(GradientSum, "make", made),
        mock.patch.object(Crossing, "finish", finished),
    ):
        yield log


def work(rank: int, folder: Path) -> list[Any]:
    """Of each case how far gradients are from those of one copy, the bytes of both, and the log; of
    the first with an adapter then how far where dropouts take each copy for the first."""
    found = []
    for name, tokens, copies, memory in CASES:
        model, lora = folder / name.split()[0], "lora" in name
        want, plain_bytes, none = step(model, tokens, 1, memory, lora)
        got, sent, log = step(model, tokens, copies, memory, lora)
        assert not [one for one in none if one[0] in ("begin", "await")]
        found.append((apart(got, want), (sent, plain_bytes), log))
    (case,) = (one for one in CASES if one[0] == "llama lora" and one[1])
    want, *_ = step(folder / "llama", *case[1:2], 1, case[3], True)
    with mock.patch.object(LayerInCopies, "told", first_of_all(LayerInCopies.told)):
        got, *_ = step(folder / "llama", *case[1:], True)
    return [*found, apart(got, want)]


def first_of_all(told: Any) -> Any:
    """What tells dropouts of the first copy whatever the copy."""
    return lambda layer, ways, sizes, _: told(layer, ways, sizes, 0)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    folder = tmp_path_factory.mktemp("copies")
    for name, how in MODELS.items():
        make_model(folder / name, **how)
    return spawn(TENSOR, work, folder)


def test_gradients_and_bytes_are_those_of_one_copy(answers: list[list[Any]]) -> None:
    for *rank, control in answers:
        for case, (far, (sent, plain), _) in zip(CASES, rank, strict=True):
            assert far < EXACT, case
            assert sent == plain > 0, case
        assert control > 1e-3


def hidden(log: list[tuple[str, int]]) -> tuple[int, int]:
    """How many transfers had products between their begin and their await, and how many there
    were."""
    begun: dict[int, int] = {}
    over = count = 0
    for at, (what, number) in enumerate(log):
        if what == "begin":
            begun[number] = at
        elif what == "await":
            count += 1
            over += any(what in ("compute", "put off") for what, _ in log[begun.pop(number) : at])
    assert not begun, "all that begins is awaited"
    return over, count


def test_transfers_of_a_copy_pass_while_another_is_computed_with(answers: list[list[Any]]) -> None:
    log = answers[0][0][2]
    assert log == answers[1][0][2], "ranks go in step"
    cut = log.index(("back", 0))
    forward, backward = log[:cut], log[cut + 1 :]
    # 2 layers × 2 blocks × in and out × 2 copies, of which the first in and the last out wait.
    assert hidden(forward) == (8, 16)
    # Gradients of weights are made behind all but the first that each layer awaits.
    assert hidden(backward) == (14, 16)
    # Into the first attention both begin before anything is computed.
    assert log[:4] == [("begin", 0), ("begin", 1), ("await", 0), ("compute", 0)]
    # The first copy goes from attention into the MLP before the second has left attention.
    assert forward.index(("begin", 4)) < forward.index(("await", 3))
    assert backward.index(("begin", 3)) < backward.index(("await", 4))
    # 7 projections of 2 copies in 2 layers; what a layer has left, it makes when it ends.
    assert backward.count(("put off", 0)) == 2 * 2 * 7
    assert backward[-1] == ("put off", 0)


def test_a_layer_that_is_recomputed_begins_its_first_run_as_one_that_is_kept(
    answers: list[list[Any]],
) -> None:
    kept, again = ([*takewhile(("back", 0).__ne__, answers[0][n][2])] for n in (0, 6))
    assert CASES[6][-1] is AGAIN and CASES[0][:3] == CASES[6][:3]
    assert kept == again
