"""DeepSpeed 0.19 on a machine without a compiler, and without its chatter.

Why: on CPU its init compiles a shared-memory collective that training never uses (40 s, and a crash
where there is no compiler), and it logs at INFO. Upstream range: deepspeed >= 0.19, < 0.20.
tests/unit/test_quarantine.py fails when upstream changes.
"""

from __future__ import annotations

import logging
import warnings


def prepare_deepspeed(*, talks: bool = False) -> None:
    """Call once before DeepSpeed's first use in a process, after torch.distributed is up.

    talks: keep what its own loggers say, where a recipe asks for it.
    """
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.INFO if talks else logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch 2.13 warns on every call of collectives that DeepSpeed uses under their older names.
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"torch\.distributed.*|deepspeed.*"
    )
    warnings.filterwarnings("ignore", category=UserWarning, module=r"deepspeed.*")
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
