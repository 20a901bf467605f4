"""The check of a single value: what passes, and exactly what is said about what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, Strict, create_model

from uspft.config import Fault, RecipeError, load
from uspft.config.deepspeed_fields import ZeroKeys
from uspft.config.messages import LARGEST
from uspft.config.types import (
    As,
    BelowOne,
    Count,
    CountOrShare,
    FilePath,
    Free,
    Natural,
    NotNegative,
    OneOf,
    Positive,
    RecipeBlock,
    Tokens,
    elsewhere,
    validated,
)

MESH = Annotated[tuple[Count, Count], Strict(False), Field(title="[rows, cols]")]
DEVICES = elsewhere({"tpu": "CUDA and CPUs alone are run on"})


def read(kind: Any, value: Any) -> Any:
    """A value as a key of this type has it."""
    block = create_model("Of", __base__=RecipeBlock, key=(kind, ...))
    return validated(block, {"key": value}).key  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Count, "10", 'expected a whole number of at least 1, got the string "10"; '
         "write 10 without quotes"),
        (Count, "10k", 'expected a whole number of at least 1, got the string "10k"; '
         "write 10000 or 10240"),
        (Count, "010", 'expected a whole number of at least 1, got the string "010"; write 10'),
        (Count, True, "expected a whole number of at least 1, got true; "
         "write a whole number of at least 1"),
        (Count, 4.0, "expected a whole number, got 4.0; write 4"),
        (Count, 4.5, "expected a whole number of at least 1, got 4.5; "
         "write a whole number of at least 1"),
        (Count, 0, "is 0, out of range; write a whole number of at least 1"),
        (CountOrShare, 1e3, "expected a whole number, got 1000.0; write 1000"),
        (CountOrShare, 1.5, "is 1.5, out of range; write a whole number of at least 1 or a number "
         "above 0 and below 1"),
        (Annotated[int, Field(ge=0, le=3)], 4,
         "is 4, out of range; write a whole number from 0 to 3"),
        (Count | None, "None",
         'expected a whole number of at least 1 or null, got the string "None"; write null'),
        (Count | Literal["auto"], "Auto",
         'expected a whole number of at least 1 or auto, got the string "Auto"; '
         "did you mean `auto`?"),
        (Tokens | Literal["auto", "none"], "None",
         "expected a whole number of tokens (such as 4096 or 128k) of at least 1 or auto or none, "
         'got the string "None"; did you mean `none`?'),
        (Positive, 0, "is 0, out of range; write a number above 0"),
        (BelowOne, 1.0, "is 1, out of range; write a number of at least 0 and below 1"),
        (NotNegative, ".nan", 'expected a number of at least 0, got the string ".nan"; '
         "write a finite number"),
        (NotNegative, False, "expected a number of at least 0, got false; "
         "write a number of at least 0"),
        (bool, "on", 'expected true or false, got the string "on"; write true'),
        (bool, "No", 'expected true or false, got the string "No"; write false'),
        (bool, 1, "expected true or false, got 1; write true"),
        (Literal["ulysses_cp", "ring_cp"], "ulyses_cp",
         "unknown value `ulyses_cp`; did you mean `ulysses_cp`? Allowed: ulysses_cp | ring_cp"),
        (Annotated[Literal["cuda", "cpu"], DEVICES], "TPU",
         "unknown value `TPU`; CUDA and CPUs alone are run on: write cuda | cpu"),
        (Annotated[Literal["cuda", "cpu"], DEVICES], "cudo",
         "unknown value `cudo`; did you mean `cuda`? Allowed: cuda | cpu"),
        (Literal["a", "b"], 3, "expected one of a | b, got 3; write a | b"),
        (Literal["a"] | None, "None", "unknown value `None`; write null"),
        (FilePath | None, "None", 'expected a path or null, got the string "None"; write null'),
        (FilePath, 12, 'expected a path, got 12; write "12" in quotes'),
        (FilePath, " ", "is empty; write a path"),
        (MESH, [1], "expected [rows, cols], got 1 items; write [rows, cols]"),
        (MESH, [1, 2, 3], "expected [rows, cols], got 3 items; write [rows, cols]"),
        (MESH | Literal["auto"] | None, [1, 0],
         "is 0, out of range; write a whole number of at least 1"),
        (Free, {"a": ["yes"]}, 'the string "yes" is no value here; write true'),
        (Free, {"a": "128k"}, 'the string "128k" is no value here; write 128000 or 131072'),
    ],
)  # fmt: skip
def test_messages(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(Fault) as caught:
        read(kind, value)
    ((_, what, remedy),) = caught.value.findings
    assert f"{what}; {remedy}" == message


def test_values_that_pass() -> None:
    assert read(Natural, 0) == 0
    assert read(Tokens, "128K") == 131072
    assert read(Tokens, 7) == 7
    assert read(As(ZeroKeys).kind, {"sub_group_size": 5e8}) == {"sub_group_size": 500_000_000}
    assert type(read(NotNegative, 3)) is float
    assert read(Natural, LARGEST) == LARGEST
    assert read(Annotated[str, OneOf(lambda: {"a": "a", "b": "a"})], "b") == "a"
    assert read(bool, False) is False


# Key: what still passes at each end, and the nearest values that do not.
BOUNDS = {
    "seed": ([0, 2**63 - 1], [-1, 2**63]),
    "data.sequence_length": ([2], [1]),
    "data.workers": ([0], [-1]),
    "parallel_config.data_parallel": ([1], [0]),
    "parallel_config.context_parallel": ([1], [0]),
    "parallel_config.ulysses_degree_in_cp": ([1], [0]),
    "optimizer.learning_rate": ([1e-30], [0]),
    "optimizer.eps": ([1e-30], [0]),
    "optimizer.weight_decay": ([0], [-1e-9]),
    "optimizer.betas": ([[0, 0.999]], [[0, 1], [-1e-9, 0]]),
    "lr_schedule.warmup_ratio": ([0, 1], [-1e-9, 1.0001]),
    "lr_schedule.warmup_steps": ([0], [-1]),
    "lr_schedule.min_learning_rate": ([0], [-1e-9]),
    "training.steps": ([1], [0]),
    "training.epochs": ([], [0]),
    "training.eval_every_epochs": ([], [0]),
    "training.global_batch_size": ([1], [0]),
    "training.micro_batch_size": ([1], [0]),
    "training.max_grad_norm": ([1e-9], [0]),
    "memory.loss_tile_tokens": ([1], [0]),
    "memory.mlp_tile_tokens": ([1], [0]),
    "checkpoint.every_steps": ([1, None, 1e-9, 0.999], [0, -0.5]),
    "checkpoint.every_epochs": ([1e-6, 1, 2.5, None], [0, 1e-7]),
    "checkpoint.keep_last": ([1, None], [0]),
    "logging.every_steps": ([1], [0]),
    "launch.processes": ([1], [0]),
    "deepspeed.zero_optimization.stage": ([0, 3], [-1, 4]),
    "deepspeed.zero_optimization.reduce_bucket_size": ([1], [0]),
    "deepspeed.zero_optimization.sub_group_size": ([0], [-1]),
    "deepspeed.aio.block_size": ([1], [0]),
    "deepspeed.flops_profiler.module_depth": ([-1], [-2]),
    "model.rope_scaling": (
        [{"rope_type": "linear", "factor": 1}],
        [{"rope_type": "linear", "factor": 0.99}],
    ),
}


@pytest.mark.parametrize("key", BOUNDS)
def test_bounds(tmp_path: Path, key: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "model: {name_or_path: x}\ndata: {train: x, sequence_length: 8}\n"
        "training: {steps: 3, global_batch_size: 2}\n"
    )
    inside, outside = BOUNDS[key]
    for value in inside:
        load(file, [f"{key}={json.dumps(value)}"])
    for value in outside:
        with pytest.raises(RecipeError) as caught:
            load(file, [f"{key}={json.dumps(value)}"])
        (problem,) = caught.value.problems
        assert problem.key.startswith(key)
        assert "out of range" in problem.what
