"""What a rank holds at its most under ZeRO-3, counted in a run's own engine over forward, backward
and to where the optimizer begins, beside what is predicted."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.ranks import spawn
from tests.support.runs import run_recipe
from tests.support.zero_state import BUCKET, LORA, Case, apart, make_inputs
from uspft.engine.zero import ZeroEngine

LAYERS = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 34_000,
    "stage3_max_reuse_distance": 400_000,
    "stage3_max_live_parameters": 300_000,
}
LAYER = 147_712
"""The elements of a layer, of which these bounds are as much as DeepSpeed's are of one of 7B."""
WHOLE = {**BUCKET, **LAYERS}
CASES = {
    "some": Case(WHOLE),
    "wide": Case(WHOLE, dtype="float32"),
    "halves": Case(WHOLE, "bfloat16"),
    "one bucket, lora": Case(LAYERS, trained=LORA),
    "one bucket, lora, wide": Case(LAYERS, dtype="float32", trained=LORA),
}


MORE = Case({**WHOLE, "stage3_max_live_parameters": 690_000})
"""As "some", with as many times a layer as DeepSpeed's own bound is of one of 8B."""


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


def work(rank: int, folder: Path) -> dict[str, tuple[int, int]]:
    """By case: the most bytes, and how many elements of weights ranks gathered in all."""
    from deepspeed.comm.torch import TorchBackend

    found, plain = {}, TorchBackend.all_gather_into_tensor
    for name, case in {**CASES, "more": MORE}.items():
        live, gathered = Live(), list[int]()

        def counting(backend: Any, output_tensor: Any, *args: Any, to: Any = gathered, **how: Any):  # type: ignore[no-untyped-def]
            to.append(output_tensor.numel())
            return plain(backend, output_tensor, *args, **how)

        with live.of_steps(), patch.object(TorchBackend, "all_gather_into_tensor", counting):
            run_recipe(case.recipe(folder), folder / name)
        found[name] = live.most, sum(gathered)
    return found


def test_the_most_of_stage_3_is_predicted_within_two_percent(tmp_path: Path) -> None:
    make_inputs(tmp_path, layers=6)
    needs = {name: case.predicted(tmp_path) for name, case in CASES.items()}
    predicted = {name: need.peak_bytes + need.host_bytes for name, need in needs.items()}
    found = spawn(2, work, tmp_path)[0]
    _, of_more = found.pop("more")
    assert apart({name: most for name, (most, _) in found.items()}, predicted) == {}
    assert found["some"][1] - of_more == 3 * LAYER  # gathered once more where fewer stay
