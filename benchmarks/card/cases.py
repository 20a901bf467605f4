"""The steps that are measured on one GPU: a model's shape, a row, and how memory is saved."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.results import ROOT

MODELS = ROOT / "configs" / "models"
LLAMA = "meta-llama--Llama-3.1-8B"
FOUR: dict[str, Any] = {"num_hidden_layers": 4}
"""Four of its layers leave room for rows on one card, with all of a layer's width."""
MOST_SAVED = {"recompute": "attention", "mlp_tile_tokens": "auto", "offload_activations": "cpu"}
STEPS = 3
"""Of a case; the first warms up, and the best of the others counts."""


@dataclass(frozen=True)
class Case:
    """A step of one GPU."""

    tokens: int = 32 << 10
    model: str = LLAMA
    overrides: dict[str, Any] = field(default_factory=lambda: dict(FOUR))
    blocks: dict[str, Any] = field(default_factory=dict)
    """What the recipe says beside the model and the row."""
    documents: int = 1
    """Of a row, all of the same length."""
    steps: int = STEPS
    profiled: bool = False
    """Whether a further step says which of the GPU's kernels took its time."""
    plain: bool = False
    """Whether transformers and DeepSpeed run it by themselves, as most users begin."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Case:
        return cls(**record)

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def recipe(self, folder: Path, device: str = "cuda") -> dict[str, Any]:
        """Return the recipe, whose data `write` puts into the folder."""
        blocks = dict(self.blocks)
        return {
            "output_dir": str(folder / "out"),
            "data": {
                "train": str(folder / "rows.jsonl"),
                "sequence_length": self.tokens,
                "packing": "best_fit",
                "shuffle": False,
            },
            "training": {"steps": self.steps + self.profiled, "global_batch_size": 1},
            "checkpoint": {"every_steps": None},
            "export": {"huggingface": False},
            "launch": {"device": device, "processes": 1},
            **blocks,
            "model": {
                "attention": "torch",
                "config": str(MODELS / f"{self.model}.json"),
                "overrides": self.overrides,
                **blocks.get("model", {}),
            },
        }

    def vocabulary(self) -> int:
        """Return the number of the model's tokens."""
        shape = json.loads((MODELS / f"{self.model}.json").read_text())
        return int((shape.get("text_config") or shape)["vocab_size"])

    def write(self, folder: Path) -> None:
        """Write rows of random tokens, as many as steps."""
        draw, most = random.Random(0), min(self.vocabulary(), 30_000)
        length = self.tokens // self.documents
        with (folder / "rows.jsonl").open("w") as file:
            for _ in range((self.steps + self.profiled) * self.documents):
                ids = draw.choices(range(1, most), k=length)
                file.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


def _memory(**keys: Any) -> dict[str, Any]:
    return {"memory": keys}


WHOLE = _memory(recompute="nothing")
LORA = {"model": {"adapter": {"rank": 16}}}
CASES: dict[str, Case] = {
    "8B, 4 layers, 8k": Case(8 << 10, blocks=WHOLE),
    "8B, 4 layers, 32k": Case(blocks=WHOLE, profiled=True),
    "8B, 4 layers, 64k": Case(64 << 10, blocks=WHOLE),
    "plain, 8B, 4 layers, 8k": Case(8 << 10, plain=True),
    "plain, 8B, 4 layers, 32k": Case(plain=True, profiled=True),
    "recompute: attention": Case(blocks=_memory(recompute="attention")),
    "without checkpointing, 8k": Case(8 << 10, blocks=_memory(gradient_checkpointing=False)),
    "MLP in tiles": Case(blocks=_memory(recompute="attention", mlp_tile_tokens="auto")),
    "flash-attn 4": Case(blocks={**WHOLE, "model": {"attention": "flash_attn_4"}}),
    "all away": Case(blocks={"memory": MOST_SAVED}, profiled=True),
    "all away, 128k": Case(128 << 10, blocks={"memory": MOST_SAVED}, steps=2),
    "all away, groups of 4 heads": Case(
        blocks={"memory": {**MOST_SAVED, "attention_heads": 4}}, profiled=True
    ),
    "LoRA": Case(blocks={**LORA, **WHOLE}),
    "64 documents": Case(blocks=WHOLE, documents=64),
    "Llama-3.2-1B": Case(model="meta-llama--Llama-3.2-1B", overrides={}, blocks=WHOLE),
    "Qwen3-30B-A3B, 2 layers": Case(
        model="Qwen--Qwen3-30B-A3B", overrides={"num_hidden_layers": 2}, blocks=WHOLE
    ),
    "Qwen3.5-9B, 4 layers": Case(16 << 10, model="Qwen--Qwen3.5-9B", overrides=FOUR, blocks=WHOLE),
}
