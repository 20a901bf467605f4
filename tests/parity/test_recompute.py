"""Gradient checkpointing changes no gradient, and on the wire what `memory.recompute` says."""

from __future__ import annotations

import gc
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.algorithms import ALGORITHMS
from tests.support.models import Documents, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, run_recipe, small_recipe
from uspft.sequence.planned import Planned

LAYOUTS: dict[str, dict[str, Any]] = {
    "ulysses": {"context_parallel": 2, "context_parallel_algo": "ulysses_cp"},
    "ring": {"context_parallel": 2, "context_parallel_algo": "ring_cp"},
    "allgather": {"context_parallel": 2, "context_parallel_algo": "allgather_cp"},
    "planned": {
        "context_parallel": 2,
        "context_parallel_algo": "planned_cp",
        "ulysses_degree_in_cp": 1,
    },
    "whole": {},
}


def forgetful(rank: int, folder: Path, data: Documents) -> dict[str, Any]:
    """As if layers that are recomputed attended again."""
    hook = import_module("uspft.model.attention")
    hook.attend_once = lambda _memory, _layer, attend, inputs, **_more: attend(inputs)  # type: ignore[attr-defined]
    return choosing(rank, folder, data, [("ring", "nothing"), ("planned", "nothing")])


def letting_go(rank: int, folder: Path, data: Documents, keeps: bool) -> dict[str, list[bool]]:
    """Of each layout, whether the memory of what attention was given is gone before the backward.

    keeps: as if a graph held on to its inputs.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    hook, room = (import_module(f"uspft.model.{name}") for name in ("attention", "recompute"))
    inputs: list[Any] = []
    attend_once = room.attend_once

    def watched(
        memory: Any, layer: int, attend: Any, given: tuple[torch.Tensor, ...], **more: Any
    ) -> Any:
        if layer not in memory:
            inputs.extend(StorageWeakRef(x.untyped_storage()) for x in given)
        return attend_once(memory, layer, attend, given, **more)

    hook.attend_once = watched  # type: ignore[attr-defined]
    if keeps:
        room.hooks = lambda *given: (torch.Tensor.detach, lambda x: x)  # type: ignore[attr-defined]
    found = {}
    for name, parallel in LAYOUTS.items():
        recipe = small_recipe(folder / "model", data.path, 64, parallel_config=parallel)
        run = prepared(recipe, folder / f"{name}-{keeps}-inputs")
        inputs.clear()
        (batch,) = run.loader.batches(1)
        loss = run.engine.deepspeed(batch, (1.0,))
        gc.collect()
        found[name] = [bool(storage.expired()) for storage in inputs]
        del loss
        close(run)
    return found


CHOSEN = [
    *((name, "nothing") for name in LAYOUTS),
    ("ulysses", "exchange"),
    *((name, "attention") for name in LAYOUTS),
    ("whole", "attention of the first"),
    ("ring", "nothing of the first"),
]
"""Layouts, and what of attention is made again; of both layers, or of one alone."""


def choosing(
    rank: int, folder: Path, data: Documents, chosen: list[tuple[str, str]]
) -> dict[Any, Any]:
    """By what is made again, `none` where layers are not: records, weights, calls of the kernel.

    What layers keep waits on the host.
    """
    found = {}
    for name, again in [*dict.fromkeys((name, "none") for name, _ in chosen), *chosen]:
        memory: dict[str, Any] = {"gradient_checkpointing": False}
        if again != "none":
            memory = {"recompute": again.split()[0], "offload_activations": "cpu"}
            memory |= {"gradient_checkpointing": 1} if again.endswith("of the first") else {}
        recipe = small_recipe(
            folder / "model",
            data.path,
            64,
            parallel_config=LAYOUTS[name],
            deepspeed={"zero_optimization": {"stage": 3}},
            training={"steps": 1, "global_batch_size": 2},
            memory=memory,
        )
        calls: list[int] = []
        got = run_recipe(recipe, folder / f"{name}-{again}", before=_counting(calls))
        found[name, again] = got, len(calls)
    return found


def _counting(calls: list[int]) -> Any:
    """Counts the kernel's forward calls. Without recomputation a planned exchange would keep what
    it fetched: here it fetches again in both."""

    def before(run: Any) -> None:
        if isinstance(run.world.algorithm, Planned):
            fetching = replace(run.world.algorithm, keep=False)
            object.__setattr__(run.world, "algorithm", fetching)
        kernel = run.world.kernel
        forward = kernel.forward

        def counted(*args: Any) -> Any:
            calls.append(1)
            return forward(*args)

        kernel.forward = counted

    return before


def made(folder: Path) -> Documents:
    make_model(folder / "model", "qwen3", heads=4, kv_heads=2)
    return make_documents(folder / "d.jsonl", [64, 60, 31, 17], masked=[0.0, 0.4])


def test_what_is_made_again_is_sent_again_and_changes_nothing(tmp_path: Path) -> None:
    tried = {parallel.get("context_parallel_algo", "whole") for parallel in LAYOUTS.values()}
    assert tried == set(ALGORITHMS) - {"hybrid_cp"}  # which on two ranks is Ulysses or a ring
    answers = spawn(2, choosing, tmp_path, made(tmp_path), CHOSEN)[0]
    for name, again in CHOSEN:
        (plain, ends), plain_calls = answers[name, "none"]
        (records, other), calls = answers[name, again]
        # Of a layer's three products with keys, forward and backward, one is made again.
        first = 0.5 if again.endswith("of the first") else 1
        assert calls == plain_calls * (1 + first * again.startswith("attention"))
        for one, two in zip(plain, records, strict=True):
            assert two["loss"] == one["loss"] and two["grad_norm"] == one["grad_norm"]
            for kind, sent in one["comm_bytes"].items():
                factor = two["comm_bytes"][kind] / sent
                # Of heads, there and back are equal; gradients of keys go home once.
                if again.startswith("nothing"):
                    assert factor == 1
                elif kind == "all_to_all":
                    assert factor == 1.5
                else:
                    assert 1.25 < factor <= 1.5
            assert bool(one["comm_bytes"]) == (name != "whole")
        assert all(torch.equal(ends[key], other[key]) for key in ends), (name, again)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_attention_was_given_is_let_go_of(tmp_path: Path, keeps: bool) -> None:
    """Three inputs of each of two layers: the second run makes them again. An all-to-all keeps what
    it brought, and not what it was given, whatever the graph does."""
    for answer in spawn(2, letting_go, tmp_path, made(tmp_path), keeps):
        assert answer.keys() == LAYOUTS.keys()
        for name, gone in answer.items():
            assert len(gone) == 6, name
            assert all(gone) == (not keeps or name == "ulysses"), (name, gone)


def test_attention_computed_and_sent_twice_is_seen(tmp_path: Path) -> None:
    answers = spawn(2, forgetful, tmp_path, made(tmp_path))[0]
    for name in ("ring", "planned"):
        (plain, _), plain_calls = answers[name, "none"]
        (again, _), calls = answers[name, "nothing"]
        assert calls > plain_calls
        for one, other in zip(plain, again, strict=True):
            assert sum(other["comm_bytes"].values()) > sum(one["comm_bytes"].values())
