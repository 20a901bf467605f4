"""The writing of a checkpoint: on the disk aside and then renamed, so it is complete or absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from uspft.checkpoint.checksums import Written, checksum_of, sealed, write_part
from uspft.checkpoint.folder import (
    FORMAT,
    LATEST,
    STATE,
    CheckpointError,
    delete_older,
    folder_of,
)
from uspft.durable import partial_of, publish, start_partial, sync, write_text
from uspft.engine.state import KINDS, Wanted, adam_steps, gather

if TYPE_CHECKING:
    from uspft.engine.step import Engine
    from uspft.parameters.part import Part

Describe = Callable[[Path], dict[str, Any]]

PART_BYTES = 1 << 30
"""A rank writes the tensors that it holds as a file once they come to this many bytes."""


class _Parts:
    """The tensors of one checkpoint that this rank writes, and their files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._held: dict[str, Tensor] = {}
        self._bytes, self._count = 0, 0
        self.files: dict[str, str] = {}
        """The file that holds each key's tensor."""
        self.written: dict[str, Written] = {}
        """What was written of each file."""

    def add(self, key: str, value: Tensor) -> None:
        self._held[key] = value.detach().float().cpu().contiguous().clone()
        self._bytes += value.numel() * 4
        if self._bytes >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        name = f"part-{self._rank:05d}-{self._count:05d}.safetensors"
        self.written[name] = write_part(self._held, self._folder / name)
        self.files |= dict.fromkeys(self._held, name)
        self._held, self._bytes, self._count = {}, 0, self._count + 1


def save_checkpoint(
    engine: Engine,
    output: Path,
    step: int,
    keep_last: int,
    describe: Describe,
    *,
    best: int | None = None,
) -> Path:
    """Write weights and Adam moments of what trains, by name, as the checkpoint of a step.

    Collective; returns the checkpoint's folder. output: must be one folder for all hosts.
    keep_last: how many checkpoints stay, besides that of the step `best`. describe: called on rank
    0 with the folder; writes the model's own files there and returns what a resumed run must agree
    with. Raises CheckpointError where a host's files cannot be seen from rank 0's, and OSError
    where one cannot be written: the checkpoints before are then as they were.
    """
    rank, world = (dist.get_rank(), dist.get_world_size())
    final = folder_of(output, step)
    aside = partial_of(final)
    if rank == 0:
        start_partial(final)
    dist.barrier()
    parts = _Parts(aside, rank)
    wanted, split = _dealt_out(engine)
    for one, value in gather(engine, wanted):
        parts.add(_key(one, split), value)
    parts.flush()
    every_rank: list[Any] = [None] * world
    dist.all_gather_object(every_rank, (parts.files, parts.written))
    if rank == 0:
        every = {key: file for found, _ in every_rank for key, file in found.items()}
        files = {key: every[key] for key in (_key(one, split) for one in wanted)}
        written = {name: one for _, found in every_rank for name, one in found.items()}
        state: dict[str, Any] = {"format": FORMAT, "step": step, "adam_steps": adam_steps(engine)}
        state["parts"] = {
            name: {"shape": held[0].shape, "ranges": [part.ranges for part in held]}
            for name, held in split.items()
        }
        _publish(aside, final, {**state, "identity": describe(aside), "files": files}, written)
        delete_older(output, keep_last, best)
    dist.barrier()
    return final


def _dealt_out(engine: Engine) -> tuple[list[Wanted], dict[str, list[Part]]]:
    """Return which rank writes which part of everything, and the parts of what is held in several.

    Each rank writes some of what it holds, and all write about as much.
    """
    shards, load = engine.holders.shards, [0] * engine.holders.everyone.size
    wanted, split = [], {}
    for name in engine.trained():
        parts = shards.parts(name, engine.part_of(name).shape)
        if len(parts) > 1:
            split[name] = list(parts)
        for kind in KINDS:
            for part, ranks in parts.items():
                owner = min(ranks, key=lambda rank: (load[rank], rank))
                load[owner] += part.count
                wanted.append(Wanted(kind, name, part, owner))
    return wanted, split


def _key(one: Wanted, split: Mapping[str, list[Part]]) -> str:
    number = f"#{split[one.name].index(one.part)}" if one.name in split else ""
    return f"{one.kind}/{one.name}{number}"


def _publish(
    aside: Path, final: Path, state: dict[str, Any], written: Mapping[str, Written]
) -> None:
    """Write state.json, and give a checkpoint that is complete its name. Raises CheckpointError.

    written: the files that ranks have written; this host wrote what else is there.
    """
    missing = [name for name in written if not (aside / name).exists()]
    if missing:
        raise CheckpointError(
            f"{aside} lacks {', '.join(sorted(missing))}: output_dir must lie on a file system "
            "that all hosts share"
        )
    beside = {
        str(file.relative_to(aside)): Written(file.stat().st_size, checksum_of(file))
        for file in (aside / "model").rglob("*")
        if file.is_file()
    }
    every = {**written, **beside}
    sizes = {name: one.size for name, one in every.items()}
    checksums = {name: one.checksum for name, one in every.items()}
    whole = sealed({**state, "sizes": sizes, "checksums": checksums})
    (aside / STATE).write_text(whole, encoding="utf-8")
    publish(aside, final)
    sync(final.parent.parent)  # where checkpoints/ itself may be new
    write_text(final.parent / LATEST, final.name + "\n")
