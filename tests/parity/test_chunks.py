"""Rows that go through stages chunk by chunk, in one process, beside plain transformers on each
document by itself: the loss and every gradient in float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.held_rows import Found, Rows, apart, batches_of, loaded, plain, targets, wide
from tests.support.models import make_model
from tests.support.pairwise import pairwise
from uspft.batch import Batch
from uspft.comm import Books
from uspft.config.algorithms import WHOLE
from uspft.config.recipe import MemoryBlock
from uspft.engine.pipelined import KeysUnderWay
from uspft.kernels.torch_cpu import TorchCpu
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.model.attention import NAME
from uspft.model.causal import CausalModel
from uspft.model.linear import bind_linear_layers
from uspft.model.parallelise import save_memory
from uspft.model.staged import StagedModel
from uspft.objective.causal import Causal
from uspft.pipeline.schedules import Action, forward_alone, forward_and_backward
from uspft.pipeline.simulator import simulate
from uspft.pipeline.stages import Stages, dealt_out
from uspft.sequence import make_algorithm
from uspft.sequence.chunked import Chunked, Cut
from uspft.sequence.kept_keys import KeptKeys, LayerKeys
from uspft.tensor.megatron import Megatron
from uspft.world import World

LAYERS, EXACT = 8, 1e-10
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"kv_heads": 2}),
    "qwen2 tied": ("qwen2", {"kv_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"kv_heads": 2, "tie_word_embeddings": False}),
    "windowed": ("mistral", {"kv_heads": 2, "sliding_window": 9}),
    "mixed windows": (
        "gemma3_text",
        {
            "kv_heads": 2,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
    ),
}
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "states": ("qwen3_5_text", {"kv_heads": 2}),
    "states, next": ("qwen3_next", {"kv_heads": 2, "mlp_only_layers": [*range(LAYERS)]}),
}
RECOMPUTED = {
    "kept": MemoryBlock(gradient_checkpointing=False),
    "nothing": MemoryBlock(gradient_checkpointing=True, recompute="nothing"),
    "attention": MemoryBlock(gradient_checkpointing=True, recompute="attention"),
    "some": MemoryBlock(gradient_checkpointing=1, recompute="attention"),
}
TIME = Cut(4, 1, 1.0, ((None, 0.05), (9, 0.01)))
"""Chunks of unequal tokens, and of other bounds in each row."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_model(folder / name, kind, num_hidden_layers=LAYERS, **extra)
        for name, (kind, extra) in (MODELS | STATES).items()
    }


def world_of(cut: Cut | None) -> World:
    whole = make_algorithm(WHOLE, 1, 1, keep=False)
    algorithm = Chunked(whole, cut) if cut else whole
    named = WHOLE, algorithm, Megatron(1, splits_tokens=False)
    return World(make_mesh(Layout(), Groups(), Books()), *named, TorchCpu(), torch.device("cpu"))


def staged(
    folder: Path,
    batches: Sequence[Batch],
    lists: Sequence[Sequence[Action]],
    chunks: int,
    virtual: int,
    memory: MemoryBlock,
    rows: int,
) -> Found:
    """What stages of one process give, whose actions are taken in an order that lists allow."""
    model = loaded(folder, NAME)
    bind_linear_layers(model)
    ranks = len(lists)
    stages: Stages = dealt_out([1.0] * LAYERS, ranks, virtual)
    recompute, _ = save_memory(model, memory, stages)
    parts = CausalModel(model, None, Layout(), recompute)
    objective, scales = Causal(model.config), (1 / targets(rows),)
    modules = [StagedModel(parts, objective, stages, place) for place in range(ranks)]
    order = sorted(
        chain(*simulate(lists, lambda _: 1).ranks), key=lambda one: (one.end, one.action.stage)
    )
    last, keys = stages.count - 1, KeysUnderWay(chunks)
    made: dict[Action, Any] = {}
    loss = 0.0
    with wide(model):
        for action, *_ in order:
            kind, stage, index, chunk = action
            batch = keys.part(batches[index], action)
            if kind == "forward":
                x = None
                if stage:
                    before = made[action._replace(stage=stage - 1)][1]
                    x = before.detach().requires_grad_()
                out = modules[stages.rank_of(stage)](batch, scales, stage, x)
                made[action] = x, out
                loss += float(out.detach().sum()) if stage == last else 0.0
                if not torch.is_grad_enabled():
                    keys.forget(action, chunk + 1 == chunks)
                continue
            x, out = made[action._replace(kind="forward")]
            if stage == last:
                out.sum().backward()
            else:
                after = made[action._replace(stage=stage + 1, kind="forward")][0]
                torch.autograd.backward(out, after.grad)
            keys.forget(action, chunk == 0)
    assert not torch.is_grad_enabled() or not any(one.layers for one in keys.by_pass.values())
    return loss, {name: p.grad for name, p in model.named_parameters()}


CASES = pairwise((*MODELS,), (1, 2, 4), (1, 2), (1, 4), (1, 3, 4), (*RECOMPUTED,))
CASES += [
    ("states", 1, 1, 4, 1, "kept"),
    ("states", 2, 2, 4, 3, "nothing"),
    ("states, next", 4, 1, 4, 3, "some"),
    ("states, next", 2, 1, 4, 1, "attention"),
]


def one_step(folder: Path, p: int, v: int, s: int, m: int, memory: MemoryBlock) -> Found:
    batches = batches_of(world_of(replace(TIME, chunks=s) if s > 1 else None), m)
    return staged(folder, batches, forward_and_backward("seqpipe", p, m, v, s), s, v, memory, m)


def test_every_case_is_transformers_own(models: dict[str, Path]) -> None:
    assert len({TIME.bounds(Rows().row(number).segments) for number in range(4)}) == 4
    want: dict[tuple[str, int], Found] = {}
    for name, p, v, s, m, recompute in CASES:
        if (name, m) not in want:
            want[name, m] = plain(models[name], m)
        found = one_step(models[name], p, v, s, m, RECOMPUTED[recompute])
        assert apart(found, want[name, m]) < EXACT, (name, p, v, s, m, recompute)


def test_rows_of_one_micro_batch_and_rows_of_padding_alone(models: dict[str, Path]) -> None:
    for name, rows, each in (("windowed", 4, 2), ("states", 3, 2)):
        batches = batches_of(world_of(TIME), rows, each)
        lists = forward_and_backward("seqpipe", 2, len(batches), 1, TIME.chunks)
        found = staged(models[name], batches, lists, TIME.chunks, 1, RECOMPUTED["kept"], rows)
        assert apart(found, plain(models[name], rows)) < EXACT, name


class Held(dict[int, KeptKeys]):
    """Of which nothing is let go."""

    def pop(self, key: int, *_: Any) -> KeptKeys:
        return self[key]


class Everywhere(defaultdict[int, LayerKeys]):
    """What every pass has in its layers, and which looks empty."""

    def __bool__(self) -> bool:
        return False


def test_chunks_that_go_back_in_forward_order_are_wrong(models: dict[str, Path]) -> None:
    folder, batches = models["llama"], batches_of(world_of(TIME), 1)
    lists = forward_alone(1, 1, 1, TIME.chunks)
    lists[0] += [one._replace(kind="backward") for one in lists[0]]
    args = batches, lists, TIME.chunks, 1, RECOMPUTED["kept"], 1
    by_layer = Everywhere(Held)
    with ExitStack() as stack:
        stack.enter_context(mock.patch("uspft.pipeline.simulator.needs", lambda *_: []))
        with pytest.raises(KeyError):  # what was kept of the first chunk is gone
            staged(folder, *args)
        stack.enter_context(
            mock.patch(
                "uspft.engine.pipelined.RowKeys",
                lambda: SimpleNamespace(layers=by_layer, states=defaultdict(dict)),
            )
        )
        found = staged(folder, *args)
    want = plain(folder, 1)
    assert found[0] == pytest.approx(want[0], rel=EXACT)
    assert apart(found, want) > 0.3


@pytest.mark.parametrize("kind", ["rule", "taps"])
def test_a_state_that_does_not_arrive_or_has_no_gradient_shows(
    kind: str, models: dict[str, Path]
) -> None:
    from uspft.sequence.kept_keys import Carried, leave

    def nothing(states: Any, key: tuple[str, int, int], value: torch.Tensor) -> None:
        leave(states, key, value * (key[0] != kind))

    def lost(states: Any, key: tuple[str, int, int], value: torch.Tensor) -> None:
        made = Blind if key[0] == kind else Carried
        states.setdefault(key, made(value))

    class Blind(Carried):
        @property
        def gradient(self) -> torch.Tensor:
            return torch.zeros_like(self.value)

    want = plain(models["states"], 1)
    for fault in (nothing, lost):
        with mock.patch("uspft.sequence.chunk_states.leave", fault):
            found = one_step(models["states"], 2, 1, 4, 1, RECOMPUTED["kept"])
        assert apart(found, want) > 1e-3
        assert (found[0] == pytest.approx(want[0], rel=EXACT)) is (fault is lost)


def test_an_evaluation_gives_the_same_loss_and_keeps_nothing(models: dict[str, Path]) -> None:
    batches = batches_of(world_of(TIME), 4)
    lists = forward_alone(4, 4, 2, TIME.chunks)
    with torch.no_grad():
        found = staged(models["mixed windows"], batches, lists, 4, 2, RECOMPUTED["nothing"], 4)
    assert found[0] == pytest.approx(plain(models["mixed windows"], 4)[0], rel=EXACT)


def test_what_is_kept_is_what_later_chunks_see() -> None:
    (batch,) = batches_of(world_of(replace(TIME, pairs=())), 1)
    assert batch.share.chunks
    every = batch.share.chunks.every
    assert [share.held for share in every] == [((0, 12),), ((12, 24),), ((24, 36),), ((36, 48),)]
    # Documents end at 31 and 48.
    assert [share.kept.spans for share in every] == [[(0, 12)], [(12, 24)], [(31, 36)], []]
    near = [share.with_window(3) for share in every]
    assert [share.kept.spans for share in near] == [[(10, 12)], [(22, 24)], [(34, 36)], []]
