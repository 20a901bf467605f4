"""The room's table of DeepSpeed fields is the one of the DeepSpeed that is installed."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

from uspft.config import deepspeed_fields as ours
from uspft.config.problems import Fault
from uspft.config.types import As, Open, RecipeBlock, validated


class Of(RecipeBlock):
    zero: Annotated[dict[str, Any], As(ours.ZeroFields)]


def zero_fields(given: Any) -> dict[str, Any]:
    return validated(Of, {"zero": given}).zero


def keys_of(kind: Any) -> set[str]:
    return set(kind.__annotations__)


pytest.importorskip("deepspeed")


def names(config: Any, *, aliases: bool = False) -> set[str]:
    fields = config.model_fields
    return {(field.alias or name) if aliases else name for name, field in fields.items()}


def test_zero_fields_aliases_and_nested_fields() -> None:
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig

    zero = DeepSpeedZeroConfig.model_fields
    assert keys_of(ours.ZeroKeys) == names(DeepSpeedZeroConfig) | names(
        DeepSpeedZeroConfig, aliases=True
    )
    assert {name: f.alias for name, f in zero.items() if f.alias} == ours.ALIASES
    deprecated = {n for n, f in zero.items() if (f.json_schema_extra or {}).get("deprecated")}
    assert deprecated == {*ours.DEPRECATED, "cpu_offload_use_pin_memory"}
    assert len(zero) == 43
    assert keys_of(ours.OffloadParam) == names(offload_config.DeepSpeedZeroOffloadParamConfig)
    assert keys_of(ours.OffloadOptimizer) == names(
        offload_config.DeepSpeedZeroOffloadOptimizerConfig
    )
    assert keys_of(ours.ZenFlow) | {"steps_per_epoch"} == names(ZenFlowConfig)
    assert keys_of(ours.LeafModule) == names(DeepSpeedZeroLeafModuleConfig)


def test_what_deepspeed_had_it_refuses_itself() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    assert len(ours.REMOVED) == 3 and not set(ours.REMOVED) & keys_of(ours.ZeroKeys)
    for key in ours.REMOVED:
        with pytest.raises(DeepSpeedConfigError, match=f"removed; 'zero_optimization.{key}'"):
            DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {key: 1}})


def test_the_other_accepted_blocks() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    assert keys_of(ours.CommsLogger) == names(CommsLoggerConfig)
    assert keys_of(ours.Aio) == set(AIO_DEFAULT_DICT)
    assert keys_of(ours.FlopsProfiler) == set(vars(DeepSpeedFlopsProfilerConfig({})))


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ({}, range(4)),
        ({"offload_optimizer": {"device": "none"}}, range(4)),
        ({"offload_optimizer": {"device": "cpu"}}, range(1, 4)),
        ({"offload_param": {"device": "cpu"}}, range(3, 4)),
    ],
)
def test_an_open_stage_may_become_those_that_the_other_fields_can_have(
    more: dict[str, Any], stages: range
) -> None:
    fields = zero_fields({"stage": "auto", **more})
    assert isinstance(fields["stage"], Open) and ours.stages_for(fields) == stages
    for stage in range(4):
        if stage in stages:
            zero_fields({"stage": stage, **more})
        else:
            with pytest.raises(Fault):
                zero_fields({"stage": stage, **more})


@pytest.mark.parametrize("key", [key for key in sorted(keys_of(ours.ZeroKeys)) if key != "stage"])
def test_our_check_and_deepspeed_agree_on_types(key: str) -> None:
    """What our check lets through, DeepSpeed takes; its defaults pass ours."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for value in (True, 0, 3, -1, 5e8, 0.5, "text", [], {}, None):
        try:
            accepted = zero_fields({"stage": 2, key: value})
        except Fault:
            continue
        DeepSpeedZeroConfig(**accepted)
    name = {alias: name for name, alias in ours.ALIASES.items()}.get(key, key)
    default = getattr(DeepSpeedZeroConfig(), name, None)
    if key not in ours.DEPRECATED and key != "leaf_module":
        zero_fields({key: default})
