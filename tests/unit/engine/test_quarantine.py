"""What uspft/engine/quarantine.py counts on in DeepSpeed; fails when upstream changes."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]

# One process and one group. "deaf": what is set has no effect, and the loader notes that it was
# called instead of compiling. "gpu": the accelerator says it is one, and has no such op, as CUDA's.
PROGRAM = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
if sys.argv[1] == "gpu":
    deepspeed.ops._probe_compatible_ops = lambda: print("PROBED") or {}
    get_accelerator().device_name = lambda index=None: "cuda"
    get_accelerator().create_op_builder = lambda name: None
else:
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    assert ShareMemCommBuilder.NAME == "deepspeed_shm_comm"

class Deaf(dict):
    def __setitem__(self, key, value):
        pass

if sys.argv[1] == "deaf":
    deepspeed.ops.__compatible_ops__ = Deaf(deepspeed.ops.__compatible_ops__)
    ShareMemCommBuilder.load = lambda self: print("LOADED")
    import deepspeed.runtime.compiler
    deepspeed.runtime.compiler.dummy_decorator = deepspeed.runtime.compiler.compile()

from uspft.engine.quarantine import prepare_deepspeed
prepare_deepspeed()
assert deepspeed.comm.is_initialized()

import torch
from deepspeed.runtime.compiler import compile
from deepspeed.runtime.zero.utils import is_zero_supported_optimizer
assert is_zero_supported_optimizer(torch.optim.AdamW([torch.zeros(1)]))
assert compile() is torch.compile
if "torch._inductor.compile_fx" in sys.modules:
    print("COMPILER")
print("READY")
dist.destroy_process_group()
"""


def prepare(folder: Path, switch: str) -> subprocess.CompletedProcess[str]:
    """Prepare DeepSpeed where no program is on PATH; what it compiled would be in folder/built."""
    (folder / "nothing").mkdir()
    (folder / "built").mkdir()
    dropped = ("CC", "CXX", "TORCH_", "DS_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    own = {
        "PATH": str(folder / "nothing"),
        "TORCH_EXTENSIONS_DIR": str(folder / "built"),
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, switch],
        cwd=folder,
        env={**kept, **own},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_installed_version_is_in_the_range_that_the_quarantine_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "deepspeed"]
    assert "0.20" not in wanted.specifier and "0.18.9" not in wanted.specifier
    assert version("deepspeed") in wanted.specifier


def test_nothing_is_compiled(tmp_path: Path) -> None:
    done = prepare(tmp_path, "set")
    assert done.returncode == 0, done.stderr
    assert "READY" in done.stdout and "COMPILER" not in done.stdout
    assert list((tmp_path / "built").iterdir()) == []


def test_no_op_is_probed_for_a_gpu(tmp_path: Path) -> None:
    done = prepare(tmp_path, "gpu")
    assert done.returncode == 0, done.stderr
    assert "READY" in done.stdout and "PROBED" not in done.stdout


def test_without_the_switch_it_would_be(tmp_path: Path) -> None:
    done = prepare(tmp_path, "deaf")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("LOADED") == done.stdout.count("COMPILER") == 1
