"""The means to use DeepSpeed 0.19 on a machine without a compiler, and without its chatter.

On CPU its init compiles a shared-memory collective that training never uses (40 s, and a crash
where there is no compiler). Every ZeRO engine imports its Muon optimizer, which no recipe can name,
and with it torch's whole compiler (2 s of CPU a rank). It also logs at INFO. Upstream range:
deepspeed >= 0.19, < 0.20. tests/unit/engine/test_quarantine.py fails when upstream changes.
"""

from __future__ import annotations

import logging
import warnings


def prepare_deepspeed(*, talks: bool = False) -> None:
    """Make DeepSpeed ready: call once before its first use, after torch.distributed is up.

    talks: whether its own loggers stay at INFO, where a recipe asks for what they say.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    logger.setLevel(logging.INFO if talks else logging.ERROR)
    # Reading this table probes how every op would be built: not on GPUs, which have no such op.
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _import_muon_uncompiled()
    # torch 2.13 warns on every call of collectives that DeepSpeed uses under their older names.
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"torch\.distributed.*|deepspeed.*"
    )
    warnings.filterwarnings("ignore", category=UserWarning, module=r"deepspeed.*")
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer without compiling its kernels.

    Any other use of DeepSpeed's compiler is as before.
    """
    from deepspeed.runtime import compiler

    decorate, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = decorate


def forget_mpu() -> None:
    """Take back the `mpu` that DeepSpeed keeps for the whole process.

    Otherwise the next engine, which may have none of its own, would be given it.
    """
    from deepspeed.utils import groups

    groups.mpu = None
