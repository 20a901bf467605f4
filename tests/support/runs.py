"""Runs inside one spawn of ranks, through the project's own load, check, assemble and train."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import yaml

from tests.support.launch import records_in
from uspft.kernels import choose
from uspft.mesh import Groups
from uspft.planner.machine import read_hardware

VOCABULARY = 97
GROUPS = Groups(ranks_per_host=2)
"""Of this rank's process: tensor groups of four and more go by hosts."""
HARDWARE = cache(read_hardware)
"""Figures of clusters, each file of which one process reads once."""


def small_recipe(folder: Path, corpus: Path, row: int, /, **blocks: Any) -> dict[str, Any]:
    """A recipe for a tiny model in float32 on CPU; blocks are merged into it."""
    base: dict[str, Any] = {
        "model": {"name_or_path": str(folder), "dtype": "float32"},
        "data": {"train": str(corpus), "sequence_length": row, "packing": "none", "shuffle": False},
        "optimizer": {"learning_rate": 1e-3, "weight_decay": 1.0},
        "lr_schedule": {"type": "constant", "warmup_ratio": 0.0},
        "training": {"steps": 3, "global_batch_size": 1, "max_grad_norm": 0.5},
        "checkpoint": {"every_steps": None},
        "export": {"huggingface": False},
        "launch": {"device": "cpu"},
    }
    merged = {key: {**base.get(key, {}), **blocks.get(key, {})} for key in {**base, **blocks}}
    if "epochs" in merged["training"]:
        del merged["training"]["steps"]
    return merged


def prepared(
    recipe: dict[str, Any], output: Path, *, resume: bool = False, tensor_of_rows: int = 1
) -> Any:
    """A Run of this rank, ready to train into output; collective.

    tensor_of_rows: a tensor degree of rows that no strategy of the recipe has, and that parameters
    are stored for.
    """
    from uspft.assemble import assemble
    from uspft.model.parallel import shards_under

    def under(*args: Any, **given: Any) -> Any:
        most = max(tensor_of_rows, given["tensor_of_rows"])
        return shards_under(*args, **given | {"tensor_of_rows": most})

    choose.probe = _believe
    job = job_of(recipe, output, resume=resume)
    with patch("uspft.assemble.shards_under", under):
        return assemble(job, torch.device("cpu"), GROUPS)


def _believe(*_: Any) -> None:
    """A kernel is not probed, a tenth of a short run: what it computes is compared anyway."""


def job_of(recipe: dict[str, Any], output: Path, *, resume: bool = False) -> Any:
    """The Job of a recipe on these ranks, which rank 0 makes as a command would; collective."""
    from uspft.engine.quarantine import prepare_deepspeed

    prepare_deepspeed()
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made[0] = _made(recipe, output, resume=resume)
        except Exception as error:
            made[0] = error
    dist.broadcast_object_list(made)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _made(recipe: dict[str, Any], output: Path, *, resume: bool) -> Any:
    """A Job, its data prepared beside the output folder."""
    from uspft.checkpoint.folder import newest
    from uspft.data.corpus.prepare import prepare, prepare_sets
    from uspft.job import Job
    from uspft.prepare import known
    from uspft.prepare.examine import examine
    from uspft.prepare.make_plan import chunk_prices_of, course_of, prices_of

    known.read_hardware = HARDWARE
    output.mkdir(parents=True, exist_ok=True)
    path = output / "asked.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(output), **recipe}))
    examined = examine(path, [f"launch.processes={dist.get_world_size()}"], 1, None)
    path.unlink()
    found, cache = examined.recipe, output.parent / "cache"
    corpus = prepare(found.data, None, VOCABULARY, cache)
    checkpoint = newest(output).checkpoint if resume else None
    return Job(
        found,
        corpus,
        identity={},
        evaluation=prepare_sets(found.data, None, VOCABULARY, cache),
        resume_from=checkpoint.folder if checkpoint else None,
        prices=prices_of(examined),
        chunk_prices=chunk_prices_of(examined),
        **course_of(found, corpus),
    )


def run_recipe(
    recipe: dict[str, Any],
    output: Path,
    *,
    before: Callable[[Any], None] | None = None,
    resume: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]] | None:
    """Train; rank 0 gets (records of metrics.jsonl but for those of saves, final master weights).

    before: sees the Run.
    """
    from uspft.training.loop import train

    run = prepared(recipe, output, resume=resume)
    if before:
        before(run)
        run.loader.begin(run.first_step + 1)  # of what was begun before
    train(run, lambda: False)
    end = held(run.engine)
    close(run)
    if dist.get_rank():
        return None
    return records_in(output / "metrics.jsonl"), end


def held(engine: Any, kind: str = "weight", *, everywhere: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter's whole value, or moment, on the first rank, or on every one; collective."""
    from uspft.engine.state import Wanted, gather
    from uspft.tensor.parts import Part

    named = engine.module.named() if kind == "weight" else engine.trained()
    ranks = range(engine.holders.everyone.size if everywhere else 1)
    parts = {name: Part.whole(engine.part_of(name).shape) for name in named}
    wanted = [Wanted(kind, name, part, rank) for name, part in parts.items() for rank in ranks]
    return {one.name: value.clone() for one, value in gather(engine, wanted)}


def close(run: Any) -> None:
    """Give back what a run holds."""
    run.engine.close()


def save_checkpoint(
    engine: Any,
    output: Path,
    step: int,
    write_model: Callable[[Path], object],
    identity: dict[str, Any] | None = None,
) -> Path:
    """Write the checkpoint of a step, and return its folder; collective. write_model, identity: as
    of `Save.finish`."""
    from uspft.checkpoint.folder import folder_of
    from uspft.checkpoint.save import Save

    Save(engine, output, step).finish(identity or {}, write_model)
    return folder_of(output, step)
