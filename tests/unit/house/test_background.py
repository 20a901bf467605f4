"""The suite as a shell's background job, which starts with SIGINT ignored."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.support.launch import ROOT

INTERRUPTS = "tests/unit/house/test_install.py::test_an_interrupted_installation_says_so"


def deaf() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_what_interrupts_passes_there_too() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", INTERRUPTS]
    done = subprocess.run(
        command, cwd=ROOT, preexec_fn=deaf, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
