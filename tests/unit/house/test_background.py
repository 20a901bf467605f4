"""The suite as a shell's background job, which starts with SIGINT ignored."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.launch import ROOT

# As pytest does: what the tests start after their conftest is imported.
PROGRAM = """
import subprocess, sys
import tests.conftest
child = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def deaf() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("start", ["", "import tests.conftest"])
def test_what_tests_start_there_hears_ctrl_c(start: str) -> None:
    program = PROGRAM.replace("import tests.conftest", start)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        preexec_fn=deaf,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == f"{bool(start)}\n"
