"""What was measured on GPUs, as a table at the end of the run of the tests."""

from __future__ import annotations

import platform
import time
from typing import Any

import pytest
import torch

from tests.support.gpu import Row


@pytest.fixture
def row(record_property: Any) -> Row:
    """Add a line to the table."""
    return lambda what, much: record_property("row", f"| {what} | {much} |")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    rows = [text for r in reports for name, text in r.user_properties if name == "row"]
    if not rows or not torch.cuda.is_available():
        return
    write = terminalreporter.write_line
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    write("")
    write(f"{count} × {name}, torch {torch.__version__}, {platform.platform()}")
    write(time.strftime("%Y-%m-%d, to be sent in as it is:"))
    for line in ("| what | measured |", "| --- | --- |", *rows):
        write(line)
