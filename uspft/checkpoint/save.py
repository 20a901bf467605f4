"""Writing a checkpoint, and loading one into an engine.

A checkpoint is written under a temporary name and then renamed, so that it is complete or absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from uspft.checkpoint.checksums import Written, checksum_of, sealed, write_part
from uspft.checkpoint.folder import (
    FORMAT,
    LATEST,
    MODEL_FILES,
    STATE,
    CheckpointError,
    folder_of,
)
from uspft.durable import partial_of, publish, start_partial, sync, write_text
from uspft.engine.state import KINDS, Wanted, adam_steps, gather, set_adam_steps

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.checkpoint.folder import Checkpoint
    from uspft.engine.step import Engine


PART_BYTES = 1 << 30
"""A rank starts a new file when its tensors reach this many bytes."""


class Save:
    """A checkpoint being written: its contents are fixed, and this rank writes its own files."""

    def __init__(
        self,
        engine: Engine,
        output: Path,
        step: int,
        *,
        course: Mapping[str, Any] | None = None,
        beside: bool = False,
    ) -> None:
        """Take weights and Adam moments of what trains, by name; collective.

        output: must be the same folder for all hosts. course: the run's other state to resume.
        beside: whether everything is first copied to host memory and then written by a thread while
        training continues; otherwise each file is written as soon as it is full. Raises OSError.
        """
        self.step, self._rank, self._final = step, dist.get_rank(), folder_of(output, step)
        self._aside = partial_of(self._final)
        if self._rank == 0:
            start_partial(self._final)
        dist.barrier()
        self._files: dict[str, str] = {}
        """The file of each key's tensor."""
        self._written: dict[str, Future[Written]] = {}
        """The pending writes, by file, which run one after another."""
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._keys, self._parts = _dealt_out(engine)
        self._adam_steps, self._course = adam_steps(engine), dict(course or {})
        held, size = dict[str, Tensor](), 0
        for one, value in gather(engine, list(self._keys)):
            held[self._keys[one]] = value.detach().cpu()  # float32, and this rank's own copy
            size += 4 * value.numel()
            if size >= PART_BYTES:
                self._fill(held, beside=beside)
                held, size = {}, 0
        self._fill(held, beside=beside)
        self._writer.shutdown(wait=False)

    def _fill(self, held: dict[str, Tensor], *, beside: bool) -> None:
        """Write tensors as a file of this rank, and wait for it unless `beside`."""
        if held:
            name = f"part-{self._rank:05d}-{len(self._written):05d}.safetensors"
            self._files |= dict.fromkeys(held, name)
            self._written[name] = self._writer.submit(write_part, held, self._aside / name)
            if not beside:
                self._written[name].result()

    def is_written(self) -> bool:
        """Return whether this rank's files are on the disk, or writing them has failed."""
        return all(one.done() for one in self._written.values())

    def finish(self, identity: Mapping[str, Any], write_model: Callable[[Path], object]) -> int:
        """Wait for the files of all ranks, and rename the checkpoint to its final name; collective.

        identity: the settings that a resumed run must share. write_model: called on rank 0 with the
        folder for the model's own files, into which it writes them. Returns on rank 0 how many
        bytes were written, 0 on the others. Raises CheckpointError where rank 0 cannot see a host's
        files, and OSError where one cannot be written: earlier checkpoints are then unchanged.
        """
        mine = {name: one.result() for name, one in self._written.items()}
        every_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every_rank, (self._files, mine))
        size = 0
        if self._rank == 0:
            every = {key: file for found, _ in every_rank for key, file in found.items()}
            write_model(self._aside / MODEL_FILES)
            written = {name: one for _, found in every_rank for name, one in found.items()}
            state: dict[str, Any] = {
                "format": FORMAT,
                "step": self.step,
                "adam_steps": self._adam_steps,
                "course": self._course,
                "parts": self._parts,
                "identity": identity,
                "files": {key: every[key] for key in self._keys.values()},
            }
            size = _publish(self._aside, self._final, state, written)
        dist.barrier()
        return size


def _dealt_out(engine: Engine) -> tuple[dict[Wanted, str], dict[str, dict[str, Any]]]:
    """Return the requests for all weights and moments, each addressed to the rank that writes it,
    with its key; and the shapes and ranges of tensors stored in parts, as in state.json.

    A rank writes only parts that it has, and all ranks write about as many bytes.
    """
    shards, load = engine.holders.shards, [0] * engine.holders.everyone.size
    keys, split = dict[Wanted, str](), dict[str, dict[str, Any]]()
    for name in engine.trained():
        shape = engine.part_of(name).shape
        parts = shards.parts(name, shape)
        if len(parts) > 1:
            split[name] = {"shape": shape, "ranges": [part.ranges for part in parts]}
        for kind in KINDS:
            for number, (part, ranks) in enumerate(parts.items()):
                owner = min(ranks, key=lambda rank: (load[rank], rank))
                load[owner] += part.count
                key = f"{kind}/{name}" + (f"#{number}" if name in split else "")
                keys[Wanted(kind, name, part, owner)] = key
    return keys, split


def _publish(
    aside: Path, final: Path, state: dict[str, Any], written: Mapping[str, Written]
) -> int:
    """Write state.json, rename a complete checkpoint to its final name, and return its bytes.

    Raises CheckpointError. written: the files of all ranks; this host wrote the others.
    """
    missing = [
        name
        for name, one in written.items()
        if not (aside / name).exists() or (aside / name).stat().st_size != one.size
    ]
    if missing:
        raise CheckpointError(
            f"{aside} lacks {', '.join(sorted(missing))}, or some of it: output_dir must lie on a "
            "file system that all hosts share"
        )
    beside = {
        str(file.relative_to(aside)): Written(file.stat().st_size, checksum_of(file))
        for file in (aside / MODEL_FILES).rglob("*")
        if file.is_file()
    }
    every = {**written, **beside}
    sizes = {name: one.size for name, one in every.items()}
    checksums = {name: one.checksum for name, one in every.items()}
    whole = sealed({**state, "sizes": sizes, "checksums": checksums})
    (aside / STATE).write_text(whole, encoding="utf-8")
    publish(aside, final)
    sync(final.parent.parent)  # checkpoints/ itself may be new
    write_text(final.parent / LATEST, final.name + "\n")
    return sum(sizes.values()) + len(whole)


def load_state(engine: Engine, checkpoint: Checkpoint, empty: Batch) -> None:
    """Load master weights, Adam moments and Adam's step count into an engine; collective.

    The engine may have any layout and ZeRO stage; each rank reads only its own values. The model
    must have been built from the same checkpoint. empty: a batch without targets.
    """
    engine.make_moments(empty)
    for name in engine.trained():
        part = engine.part_of(name)
        for kind in KINDS:
            read = partial(checkpoint.read_flat, kind, name, part)
            engine.write_fragment(name, kind, read)
    set_adam_steps(engine, int(checkpoint.state["adam_steps"]))
