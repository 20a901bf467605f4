"""A machine with Python and a shell, and neither a compiler, nor ninja, nor git."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.launch import records, start
from tests.support.models import make_documents, make_model

NEEDED = ("bash", "cat", "dirname", "env", "readlink", "sha256sum")
HIDDEN = ("c++", "g++", "gcc", "cc", "clang", "ninja", "git", "nvcc")


def test_a_run_needs_no_compiler_and_no_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found, name
        (tools / name).symlink_to(found)
    for name in ("CC", "CXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    built = tmp_path / "built"
    built.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(built))
    monkeypatch.setenv("PATH", str(tools))
    assert [name for name in HIDDEN if shutil.which(name)] == []
    make_model(tmp_path / "model", "qwen2", heads=4, kv_heads=2)
    documents = make_documents(tmp_path / "d.jsonl", [60, 36, 96], masked=[0.0])
    recipe = {
        "model": {"name_or_path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(documents.path), "sequence_length": 96},
        "parallel_config": {"context_parallel": 2, "context_parallel_algo": "ring_cp"},
        "deepspeed": {"zero_optimization": {"stage": 3}},
        "training": {"steps": 2, "global_batch_size": 1},
        "checkpoint": {"every_steps": 2},
        "launch": {"device": "cpu"},
    }
    out, err = (process := start(recipe, tmp_path)).communicate(timeout=250)
    assert process.returncode == 0, err
    assert err == ""
    assert "each row shared by 2" in out and "done: loss" in out
    assert [record["step"] for record in records(tmp_path)] == [1, 2]
    assert (tmp_path / "out/hf/config.json").exists()
    assert json.loads((tmp_path / "out/environment.json").read_text())["git_commit"] is None
    assert list(built.iterdir()) == []
