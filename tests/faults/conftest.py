"""Where wrong input is tried: a good recipe in a folder, and no rank that could start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_documents, make_model
from tests.support.refused import Ground


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of 4 query and 2 KV heads, and tokenized data of up to 32 tokens a sample."""
    folder = tmp_path_factory.mktemp("good")
    make_model(folder / "model", "llama", heads=4, kv_heads=2)
    return folder / "model", make_documents(folder / "d.jsonl", [32, 20], masked=[0.0]).path


@pytest.fixture
def ground(good: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """The program in a folder of its own; a rank that starts is noted instead."""
    from uspft.commands import rank

    model, data = good
    folder = tmp_path / "here"
    folder.mkdir()
    recipe: dict[str, Any] = {
        "seed": 42,
        "output_dir": str(folder / "out"),
        "model": {"name_or_path": str(model), "dtype": "float32"},
        "data": {"train": str(data), "sequence_length": 32},
        "training": {"steps": 2, "global_batch_size": 2},
        "launch": {"device": "cpu"},
    }
    found = Ground(folder, recipe)
    found.write({})
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def instead(*job: Any, **more: Any) -> int:
        found.started.append(job)
        return 1

    monkeypatch.setattr(rank, "run_ranks", instead)
    return found
