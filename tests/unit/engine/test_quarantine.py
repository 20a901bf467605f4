"""What uspft/engine/quarantine.py counts on in DeepSpeed; fails when upstream changes."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

from tests.support.hangs import HANG_SECONDS
from uspft.engine import quarantine

ROOT = Path(__file__).parents[3]

# A process and a group for each switch, forked from one with the imports made. "deaf": what is set
# has no effect, and the loader notes that it was called instead of compiling. "gpu": DeepSpeed
# sees one, and has no such op, as on CUDA.
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

class Deaf(dict):
    def __setitem__(self, key, value):
        pass

def prepared(switch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if switch == "gpu":
        deepspeed.ops._probe_compatible_ops = lambda: print("PROBED") or {}
        get_accelerator().device_name = lambda index=None: "cuda"
        get_accelerator().create_op_builder = lambda name: None
    else:
        assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
        assert ShareMemCommBuilder.NAME == "deepspeed_shm_comm"
    if switch == "deaf":
        deepspeed.ops.__compatible_ops__ = Deaf(deepspeed.ops.__compatible_ops__)
        ShareMemCommBuilder.load = lambda self: print("LOADED")
        from deepspeed.runtime import compiler
        compiler.dummy_decorator = compiler.compile()

    from uspft.engine.quarantine import prepare_deepspeed
    prepare_deepspeed()
    assert deepspeed.comm.is_initialized()

    from deepspeed.runtime.compiler import compile
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer
    assert is_zero_supported_optimizer(torch.optim.AdamW([torch.zeros(1)]))
    assert compile() is torch.compile
    if "torch._inductor.compile_fx" in sys.modules:
        print("COMPILER")
    print("READY", flush=True)
    dist.destroy_process_group()

for switch in sys.argv[1:]:
    if not os.fork():
        shown = os.open(f"{switch}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(shown, 1), os.dup2(shown, 2)
        os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(os.getcwd(), f"{switch}-built")
        prepared(switch)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What preparing DeepSpeed shows by switch, where no program is on PATH; whatever it compiled
    is shown too."""
    folder, switches = tmp_path_factory.mktemp("quarantine"), ("set", "gpu", "deaf")
    (folder / "nothing").mkdir()
    for switch in switches:
        (folder / f"{switch}-built").mkdir()
    dropped = ("CC", "CXX", "TORCH_", "DS_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    own = {
        "PATH": str(folder / "nothing"),
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *switches],
        cwd=folder,
        env={**kept, **own},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        switch: (folder / f"{switch}.txt").read_text()
        + "".join(f"BUILT {path}" for path in (folder / f"{switch}-built").iterdir())
        for switch in switches
    }


def test_the_installed_version_is_in_the_range_that_the_quarantine_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "deepspeed"]
    assert "0.20" not in wanted.specifier and "0.18.9" not in wanted.specifier
    assert version("deepspeed") in wanted.specifier


def test_nothing_is_compiled(shown: dict[str, str]) -> None:
    assert "READY" in shown["set"], shown
    assert "COMPILER" not in shown["set"] and "BUILT" not in shown["set"]


def test_no_op_is_probed_for_a_gpu(shown: dict[str, str]) -> None:
    assert "READY" in shown["gpu"], shown
    assert "PROBED" not in shown["gpu"]


def test_without_the_switch_it_would_be(shown: dict[str, str]) -> None:
    assert "READY" in shown["deaf"], shown
    assert shown["deaf"].count("LOADED") == shown["deaf"].count("COMPILER") == 1


class Buckets:
    """An optimizer that puts gradients into buckets as they come."""

    def __init__(self) -> None:
        self.put: list[Any] = []

    def process_gradients(self, parameter: nn.Parameter, group: int) -> None:
        self.put.append((parameter, group))

    def independent_gradient_partition_epilogue(self) -> None:
        self.put.append("end")


@pytest.mark.parametrize("ends", [1, 2])
def test_gradients_that_come_together_are_summed_in_one_order(ends: int) -> None:
    a, b, c, d, e = (nn.Parameter(torch.zeros(1)) for _ in range(5))
    orders = [[a, b, c, d, e], [b, a, c, e, d]], [[d, a, b, c], [d, b, a, c]]
    for first, second in orders:
        found = []
        for order in (first, second):
            optimizer = Buckets()
            quarantine.reduce_in_one_order(optimizer, [[a, b], [d, e]])
            for _ in range(ends):
                for parameter in order:
                    optimizer.process_gradients(parameter, 3)
                optimizer.independent_gradient_partition_epilogue()
            assert len(optimizer.put) == ends * (len(order) + 1)
            assert {id(p) for p, _ in optimizer.put[: len(order)]} == {id(p) for p in order}
            found.append([one if one == "end" else (id(one[0]), one[1]) for one in optimizer.put])
        assert found[0] == found[1]
    plain = object()
    quarantine.reduce_in_one_order(plain, [[a, b]])  # of a stage without buckets
