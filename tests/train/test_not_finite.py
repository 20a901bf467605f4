"""A gradient norm that is not finite stops the run at every stage, and no parameter has moved."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.rows import ROW
from tests.support.runs import held, prepared, small_recipe
from tests.support.stages import ZERO


def work(rank: int, folder: Path, data: Path) -> dict[str, tuple[str, bool]]:
    from uspft.engine.step import NotFinite
    from uspft.training.loop import train

    answers = {}
    for name, zero in ZERO.items():
        parallel = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}
        deepspeed = {"zero_optimization": zero}
        recipe = small_recipe(
            folder / "model", data, ROW, parallel_config=parallel, deepspeed=deepspeed
        )
        run = prepared(recipe, folder / name)
        parameters = run.engine.module.named()
        before = held(run.engine)
        if rank == 1:  # one rank's gradient of one parameter is enough
            bias = next(p for n, p in parameters.items() if n.endswith("layers.1.mlp.up_proj.bias"))
            bias.register_hook(lambda grad: grad * torch.inf)
        said = ""
        try:
            train(run, lambda: False)
        except NotFinite as error:
            said = str(error)
        same = all(torch.equal(x, before[name]) for name, x in held(run.engine).items())
        answers[name] = said, same
        run.engine.close()
    return answers


def test_no_parameter_moves(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    data = make_documents(tmp_path / "d.jsonl", [48, 40], masked=[0.2])
    for answer in spawn(2, work, tmp_path, data.path):
        assert answer.keys() == ZERO.keys()
        for name, (said, same) in answer.items():
            assert "step 1, rows 0 to 0" in said and "gradient norm" in said, f"{name}: {said}"
            assert same, f"{name}: parameters moved"
