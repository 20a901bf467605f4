"""A run that loses a stage of its pipeline while the others wait for what it makes."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from tests.support.launch import living, write_recipe
from tests.support.models import make_documents
from tests.support.pipelines import LENGTHS, Case, make, recipe

CASE = Case("llama", 4, rows=2)
AT_STEP = 2


def loses_the_second_stage(mark: Path) -> None:
    """Have the second of four ranks die when a micro-batch has come to it, before it goes on."""
    from uspft.engine.mail import Mail
    from uspft.engine.zero import ZeroEngine

    step, send = ZeroEngine.step, Mail.send
    steps = 0

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(*given, **more)

    def dies(*given: object) -> None:
        if steps == AT_STEP and os.environ["RANK"] == "1":
            time.sleep(1.0)  # the others have come to wait, or to the end of what they can do
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        send(*given)  # type: ignore[arg-type]

    ZeroEngine.step = counted  # type: ignore[method-assign, assignment]
    Mail.send = dies  # type: ignore[method-assign, assignment]


def test_a_killed_stage_ends_the_run_of_those_that_wait_for_it(tmp_path: Path) -> None:
    make(tmp_path, CASE)
    data = make_documents(tmp_path / "d.jsonl", [n for row in LENGTHS for n in row], masked=[0.0])
    asked = recipe(CASE, tmp_path, data.path)
    del asked["data"]["eval"]
    mark, path = tmp_path / "died", write_recipe(asked, tmp_path)
    process = Forked([str(path)], tmp_path, before=partial(loses_the_second_stage, mark))
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1 and mark.exists(), err
    assert time.time() - mark.stat().st_mtime < 30 and not living(tmp_path)
    assert "rank 1 failed: killed (SIGKILL)" in err and err.count(" failed: ") == 1
