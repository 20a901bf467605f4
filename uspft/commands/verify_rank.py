"""The command `rank FOLDER verify`: one process of `verify`, which starts it and nobody by hand."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from uspft.commands.imports import keep_imports
from uspft.commands.joining import joined
from uspft.commands.shared import ranks_of_host, require_shared
from uspft.launcher import Waiting
from uspft.prepare.invocation import Invocation


def rank(folder: Path, place: Invocation, waiting: Waiting) -> int:
    """Be one rank of the job that `verify` left in `folder`. Raises what the run raises."""
    from uspft.verify.work import VerifyJob

    work = VerifyJob.read(folder)
    with joined(work.job.recipe.launch, place.environment) as device:
        waiting.close()
        from uspft.verify.ranks import run_layouts, run_reference

        keep_imports()
        if work.is_reference:
            run_reference(work, device)
        else:
            require_shared(work.folder, place.environment)
            say = _say if dist.get_rank() == 0 else _silent
            run_layouts(work, device, say, ranks_of_host(place.environment))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    """Print nothing, since only the first rank speaks."""
