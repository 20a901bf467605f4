"""What ranks and commands of a test import, once: they are forked from a process that has.

Imports cost a rank four seconds of CPU. Frozen, what they made is not searched by the full garbage
collection of each ZeRO-3 engine, of which many are built in one process.
"""

from __future__ import annotations

import gc
import os

os.environ |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}

import uspft.assemble
import uspft.commands.train
import uspft.training.loop  # noqa: F401

gc.collect()
gc.freeze()
