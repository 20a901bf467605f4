"""The command `check` of a checkpoint: every file is compared with its checksum, none is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from uspft.checkpoint.folder import Checkpoint, CheckpointError, folders_of
from uspft.config.problems import COMMAND_LINE, UsageError
from uspft.metrics import as_size
from uspft.prepare.invocation import Invocation


def check_checkpoint(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Print for each checkpoint that a folder holds whether it is whole.

    target: a checkpoint, `checkpoints/` or the folder of a run. Raises CheckpointError, with a line
    for each checkpoint that is damaged, and UsageError for what else was said.
    """
    if overrides or place.ranks:
        more = overrides[0] if overrides else "--ranks"
        raise UsageError(more, "a checkpoint is checked, and not a recipe", "leave it out")
    damaged = []
    try:
        folders = folders_of(target)
    except CheckpointError as error:
        remedy = "name a recipe, a checkpoint or the output folder of a run"
        what = str(error).removeprefix(f"{target} ")
        raise CheckpointError(f"{COMMAND_LINE}: {target}: {what}; {remedy}") from error
    for folder in folders:
        try:
            found = Checkpoint.open(folder)
        except CheckpointError as error:
            damaged.append(f"{COMMAND_LINE}: {target}: {error}; go on from another checkpoint")
            continue
        files = f"{folder}: step {found.step}, {len(found.state['sizes'])} files"
        if found.has_checksums:
            print(f"{files}, {as_size(found.size)}: every checksum is right")
        else:
            print(f"{files}: whole by their lengths and headers, and written without checksums")
    if damaged:
        raise CheckpointError("\n".join(damaged))
    return 0
