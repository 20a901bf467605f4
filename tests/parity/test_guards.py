"""Guards see what they are for, and nothing where all is well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.models import Documents, make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, small_recipe
from uspft.batch import Batch
from uspft.config.problems import RunFailed
from uspft.training.guards import Guards

RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}


def other_token(run: Any, batch: Batch) -> None:
    """Rank 1 trains another token than the row holds."""
    if torch.distributed.get_rank() == 1:
        batch.input_ids[0, 3] += 1


def other_label(run: Any, batch: Batch) -> None:
    if torch.distributed.get_rank() == 1:
        batch.labels[3] = -100


def shard_positions(run: Any, batch: Batch) -> None:
    """A rank counts positions in its shard, not in the row."""
    if torch.distributed.get_rank() == 1:
        batch.position_ids[0] = torch.arange(batch.position_ids.shape[1])


def exchanged_shares(run: Any, batch: Batch) -> None:
    """Each rank holds what the other one should."""
    batch.share.held = batch.share.held[::-1]


def other_rows(run: Any, batch: Batch) -> None:
    """Ranks of one row read different ones."""
    if torch.distributed.get_rank() == 1:
        object.__setattr__(batch, "rows", (batch.rows[0] + 1,))


FAULTS: dict[str, tuple[Callable[[Any, Batch], None], str]] = {
    "token": (other_token, "do not hold each of their tokens once"),
    "label": (other_label, "do not hold each of their tokens once"),
    "positions": (shard_positions, "do not hold each of their tokens once"),
    "shares": (exchanged_shares, "do not hold each of their tokens once"),
    "rows": (other_rows, "read different rows"),
}


ALL_TOKENS = {"pipeline_stage": " (stage {})", "model_parallel": ""}


def of_all_tokens(folder: Path, data: Documents, divides: str) -> str | None:
    """What is said where two ranks that see all tokens read different rows. divides: the key of
    what they divide."""
    alike = small_recipe(folder / "model", data.path, 64, parallel_config={divides: 2})
    run = prepared(alike, folder / divides)
    (batch,) = run.loader.batches(1)
    guards = Guards(run, lambda line: None)
    guards.rows(1, [batch])
    other_rows(run, batch)
    try:
        guards.rows(1, [batch])
    except RunFailed as error:
        return str(error)
    finally:
        close(run)
    return None


def work(rank: int, folder: Path, data: Documents) -> dict[str, Any]:
    found: dict[str, Any] = {key: of_all_tokens(folder, data, key) for key in ALL_TOKENS}
    recipe = small_recipe(
        folder / "states",
        data.path,
        64,
        parallel_config=RING,
        deepspeed={
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
        },
    )
    run = prepared(recipe, folder / "out")
    lines: list[str] = []
    guards = Guards(run, lines.append)
    for name, (break_it, _) in FAULTS.items():
        (batch,) = run.loader.batches(1)
        guards.rows(1, [batch])
        break_it(run, batch)
        try:
            guards.rows(1, [batch])
            found[name] = None
        except (RuntimeError, RunFailed) as error:
            found[name] = str(error)
        guards.rows(99, [batch])  # later steps are let through, unless asked for
    found["sizes"] = lines
    name, parameter = max(run.engine.module.named().items(), key=lambda item: item[1].ds_numel)
    parameter.data = torch.zeros(parameter.ds_numel)  # as if it had never been taken apart
    try:
        Guards(run, lines.append)
    except RuntimeError as error:
        found["whole"] = name, str(error)
    return found


def test_every_fault_is_seen_on_every_rank(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    make_model(tmp_path / "states", "qwen3_5_text", kv_heads=2)
    data = make_documents(tmp_path / "d.jsonl", [64, 60, 31], masked=[0.0, 0.4])
    for rank, found in enumerate(spawn(2, work, tmp_path, data)):
        for key, where in ALL_TOKENS.items():
            assert f"read different rows (rank {rank}{where.format(rank)}: " in found[key]
        for name, (_, said) in FAULTS.items():
            assert found[name] and said in found[name], (name, found[name])
        assert len(found["sizes"]) == 1 and "on each of 2 ranks" in found["sizes"][0]
        name, error = found["whole"]
        assert f"{name} is whole on rank" in error
