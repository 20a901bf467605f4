"""What the tests of overlap share: ranks as threads, between which transfers are written down."""

from __future__ import annotations

import pytest

from tests.support.wire import TORCH_DISTRIBUTED
from uspft import comm


@pytest.fixture
def on_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "dist", TORCH_DISTRIBUTED)
