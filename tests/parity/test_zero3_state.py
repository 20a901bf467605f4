"""What a rank holds at its most under ZeRO-3, counted in a run's own engine over forward, backward
and to where the optimizer begins, beside what is predicted."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models import VOCABULARY, make_documents
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from uspft.config.recipe import MemoryBlock, Recipe
from uspft.engine.zero import ZeroEngine
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.planner.memory import memory_of, options_of
from uspft.prepare.invocation import CONFIGS

ROW = 4  # few tokens: activations are hardly seen
BUCKET = {"reduce_bucket_size": 160_300}
"""Of 320,384 elements: what the gradients of the head and of a layer just fill."""
LAYERS = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 34_000,
    "stage3_max_reuse_distance": 400_000,
    "stage3_max_live_parameters": 300_000,
}
"""Of a layer's 147,712: as much as DeepSpeed's own bounds are of a layer of 7B."""
WHOLE = {**BUCKET, **LAYERS}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LORA = {"adapter": {"type": "lora", "rank": 64}}


class Case(NamedTuple):
    zero: dict[str, Any]
    reduction: str = "float32"
    dtype: str = "bfloat16"
    trained: dict[str, Any] | None = None


CASES = {
    "some": Case(WHOLE),
    "wide": Case(WHOLE, dtype="float32"),
    "halves": Case(WHOLE, "bfloat16"),
    "one bucket, lora": Case(LAYERS, trained=LORA),
    "one bucket, lora, wide": Case(LAYERS, dtype="float32", trained=LORA),
}


class Live(TorchDispatchMode):
    """The bytes of all storages that operations have made, and the most of them in a step.

    What a collective of this backend makes for itself is not the program's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._now = 0
        self.most = 0
        self._in_step = self._in_collective = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made) if not self._in_collective else ():
            if isinstance(one, torch.Tensor) and not one.is_meta:
                self._see(one.untyped_storage())
        return made

    def _see(self, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._sizes or not size:
            return
        self._sizes[key] = size
        self._now += size
        weakref.finalize(storage, self._gone, key)
        if self._in_step:
            self.most = max(self.most, self._now)

    def _gone(self, key: int) -> None:
        self._now -= self._sizes.pop(key)

    @contextmanager
    def of_steps(self) -> Iterator[None]:
        """Look at forward and backward, and where the optimizer begins."""
        from deepspeed.runtime.comm import coalesced_collectives

        with ExitStack() as stack:
            update = torch.optim.AdamW.step

            def begins(*args: Any, **kwargs: Any) -> Any:
                self.most = max(self.most, self._now)
                return update(*args, **kwargs)

            stack.enter_context(patch.object(torch.optim.AdamW, "step", begins))
            for name in ("forward", "backward"):
                stack.enter_context(self._inside(ZeroEngine, name, "_in_step"))
            inside = coalesced_collectives, "_torch_reduce_scatter_fn", "_in_collective"
            stack.enter_context(self._inside(*inside))
            stack.enter_context(self)
            yield

    def _inside(self, owner: Any, method: str, flag: str) -> Any:
        plain = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            before = getattr(self, flag)
            setattr(self, flag, True)
            try:
                return plain(*args, **kwargs)
            finally:
                setattr(self, flag, before)

        return patch.object(owner, method, call)


def work(rank: int, cases: dict[str, Case], folder: Path, corpus: Path) -> dict[str, int]:
    found = {}
    for name, case in cases.items():
        recipe = small_recipe(
            folder / "model",
            corpus,
            ROW,
            model={"dtype": case.dtype, **(case.trained or {})},
            memory={"gradient_reduction": case.reduction},
            deepspeed={"zero_optimization": case.zero},
            training={"steps": 2, "global_batch_size": 2},
        )
        live = Live()
        with live.of_steps():
            run_recipe(recipe, folder / name)
        found[name] = live.most
    return found


def test_the_most_of_stage_3_is_predicted_within_two_percent(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    corpus = make_documents(tmp_path / "d.jsonl", [ROW] * 8, masked=[0.0]).path
    counted = spawn(2, work, CASES, tmp_path, corpus)[0]
    off = {}
    for name, case in CASES.items():
        recipe = Recipe.model_validate(
            small_recipe(
                tmp_path / "model",
                corpus,
                ROW,
                model={"dtype": case.dtype, **(case.trained or {})},
                deepspeed={"zero_optimization": case.zero},
            )
        )
        memory = MemoryBlock.model_validate({"gradient_reduction": case.reduction})
        recipe = recipe.model_copy(update={"memory": memory})
        shape = read_shape(recipe.model, CONFIGS)
        assert isinstance(shape, ModelShape)
        layout = Layout(data=2)
        need = memory_of(shape, layout, ROW, options=options_of(recipe, layout))
        predicted = need.peak_bytes + need.host_bytes
        if not counted[name] or abs(predicted / counted[name] - 1) > 0.02:
            off[name] = predicted, counted[name]
    assert off == {}
