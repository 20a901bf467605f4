"""What holds for every test, however the suite was started."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job, and what is started from here would be deaf to Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Who is woken waits for a core, here and in all that is started from here. gloo's thread, woken by
# what arrives, else takes the core of the rank that has yet to ask for it, and polls until it does.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let no collection of garbage search what imports make, which stays: now, nor ever after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that mostly wait among those that compute, since files run side by side."""
    files = list(dict.fromkeys(item.path for item in items))
    waiting = [file for file in files if "faults" in file.parts]
    computing = [file for file in files if "faults" not in file.parts]
    places = {file: 2 * n for n, file in enumerate(computing)}
    places |= {file: 4 * n + 1 for n, file in enumerate(waiting)}
    items.sort(key=lambda item: places[item.path])
