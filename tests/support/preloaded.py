"""What ranks and commands of a test import, once: they are forked from a process that has.

Imports cost a rank four seconds of CPU. Frozen, what they made is not searched by the full garbage
collection of each ZeRO-3 engine, of which many are built in one process; nor is garbage looked for
while it is made, and rarely after: a run's is small.
"""

from __future__ import annotations

# ruff: noqa: E402 - no garbage is sought while imports are made
import gc
import os
from importlib import import_module

gc.disable()
os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}

from deepspeed.ops import __compatible_ops__  # noqa: F401 - found out with compilers, at first use

import uspft.assemble
import uspft.commands.train
import uspft.training.loop  # noqa: F401

LATE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "huggingface_hub.hf_file_system",
    "peft",
    "pytest",
    "setuptools.command.build_ext",
    "tests.support.models",
    "tests.support.runs",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "qwen2", "qwen3")),
    "uspft.commands.rank",
    "uspft.sequence.planned",
)
"""What a run imports only once it has begun, and tests do: three quarters of a second of CPU."""
for name in LATE:
    import_module(name)
gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 20)
gc.enable()
