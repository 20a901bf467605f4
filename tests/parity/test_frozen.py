"""What is frozen is held in the compute type, in parts under ZeRO-3, and has nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import close, prepared, small_recipe

BF16, FLOAT32 = 2, 4
TRAINED: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"type": "lora", "rank": 2, "alpha": 4}},
    "freeze": {"freeze": ["embed_tokens", "mlp", "self_attn.[qkv]_"]},
    "all": {},
}


def work(rank: int, folder: Path, data: Path) -> dict[tuple[str, int], dict[str, Any]]:
    from uspft.training.loop import train

    found = {}
    for name, trained in TRAINED.items():
        for stage in range(4):
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            recipe = small_recipe(
                folder / "model",
                data,
                48,
                model={"dtype": "bfloat16", **trained},
                parallel_config={"context_parallel": 2, "context_parallel_algo": "ring_cp"},
                deepspeed={"zero_optimization": zero},
                training={"steps": 1},
            )
            run = prepared(recipe, folder / f"{name}-{stage}")
            train(run, lambda: False)
            found[name, stage] = measured(run.engine)
            close(run)
    return found


def measured(engine: Any) -> dict[str, Any]:
    """Bytes on this rank: parameters by what becomes of them, and AdamW's weights and moments."""
    named, trained = engine.module.named(), engine.trained()
    frozen = [value for name, value in named.items() if name not in trained]

    def held(parameters: Any) -> int:
        parts = [getattr(p, "ds_tensor", p) for p in parameters]
        return sum(part.numel() * part.element_size() for part in parts)

    adam = engine.adam
    masters = list(adam.state)  # AdamW's own parameters, which DeepSpeed takes from its groups
    moments = [state[kind] for state in adam.state.values() for kind in ("exp_avg", "exp_avg_sq")]
    counts = [
        sum(getattr(p, "ds_numel", p.numel()) for p in ps) for ps in (trained.values(), frozen)
    ]
    return {
        "trained": counts[0],
        "frozen": counts[1],
        "frozen bytes": held(frozen),
        "gradients of frozen": sum(p.grad is not None for p in frozen),
        "masters": sum(p.numel() * p.element_size() for p in masters),
        "moments": sum(m.numel() * m.element_size() for m in moments),
    }


def test_bytes(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama", heads=4, kv_heads=2)
    data = make_documents(tmp_path / "d.jsonl", [48, 30], masked=[0.0])
    answers = spawn(2, work, tmp_path, data.path)
    assert len(answers[0]) == 12
    for name, stage in answers[0]:
        one, other = (answer[name, stage] for answer in answers)
        trained, frozen = one["trained"], one["frozen"]
        assert (frozen == 0) == (name == "all") and trained > 0
        assert one["gradients of frozen"] == 0
        both = {key: one[key] + other[key] for key in ("frozen bytes", "masters", "moments")}
        copies = 2 if stage == 0 else 1
        padding = 1.1 if name == "lora" else 1.02  # flat groups are padded to whole parts
        wholes = copies * FLOAT32 * trained
        assert wholes <= both["masters"] <= padding * wholes, (name, stage)
        assert 2 * wholes <= both["moments"] <= padding * 2 * wholes, (name, stage)
        whole_base = BF16 * frozen * (1 if stage == 3 else 2)
        assert whole_base <= both["frozen bytes"] <= 1.02 * whole_base, (name, stage)
