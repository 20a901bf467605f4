"""A step on a GPU under torch's sync debug mode: more layers do not wait for it more often."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu import Row, needs
from tests.support.models import Documents, make_documents, make_model
from tests.support.runs import small_recipe

DEPTHS = (1, 3)


def waits(folder: Path, data: Documents, depth: int) -> int:
    """How often the second step waits for the device, as torch sees it."""
    import torch.distributed as dist

    from tests.support.runs import GROUPS, job_of
    from uspft.assemble import assemble

    recipe = small_recipe(
        folder,
        data.path,
        512,
        model={
            "name_or_path": None,
            "config": str(folder / "model"),
            "dtype": "bfloat16",
            "overrides": {"num_hidden_layers": depth},
        },
        deepspeed={"zero_optimization": {"stage": 1}},
        training={"steps": 2, "global_batch_size": 2},
        launch={"device": "cuda", "processes": 1},
    )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        store = dist.TCPStore("127.0.0.1", 0, 1, True)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    run = assemble(job_of(recipe, folder / f"out-{depth}"), device, GROUPS)
    assert {buffer.device for buffer in run.model.buffers()} == {device}
    for batch in run.loader.on_host(2):
        assert batch.input_ids.is_pinned() and batch.labels.is_pinned()
    run.engine.step(run.loader.batches(1), 1e-3, False)
    batches = run.loader.batches(2)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run.engine.step(batches, 1e-3, False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.engine.close()
    return sum("synchroniz" in str(one.message) for one in found)


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=needs(1))])
def test_no_layer_waits_for_the_device(
    tmp_path: Path, gpus: int, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Any = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cuda"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    make_model(tmp_path / "model", "llama", heads=4, kv_heads=2, head_dim=64)
    data = make_documents(tmp_path / "d.jsonl", [500, 400, 500, 300], masked=[0.0])
    shallow, deep = (waits(tmp_path, data, depth) for depth in DEPTHS)
    row("waits for the device in a step", f"{shallow} with 1 layer, {deep} with 3")
    assert shallow == deep
