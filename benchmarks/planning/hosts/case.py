"""The model, the rows and the layouts of the benchmark of layouts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.lab.rows import write_rows

HOSTS = 4
RING, ULYSSES, BOTH = (
    {"context_parallel_algo": name} for name in ("ring_cp", "ulysses_cp", "hybrid_cp")
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 4": {},
    "Ulysses 4": {"context_parallel": 4, **ULYSSES},
    "ring 4": {"context_parallel": 4, **RING},
    "Ulysses 2 × ring 2": {"context_parallel": 4, "ulysses_degree_in_cp": 2, **BOTH},
    "tensor 2 × data 2": {"model_parallel": 2},
    "tensor 4": {"model_parallel": 4},
    "data 2 × stages 2": {"pipeline_stage": 2},
    "tensor 2 × stages 2": {"model_parallel": 2, "pipeline_stage": 2},
}
"""What the four hosts, of one process each, do together: a recipe's `parallel_config` by name."""
ROWS_PER_STEP = 4
WARM_UP = 1
"""So many steps at the start are not timed: they make buffers and Adam's states."""


@dataclass(frozen=True)
class Case:
    """A case has the sizes of a LLaMA-shaped model, a row length, and the timed steps of a run."""

    tokens: int
    steps: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int

    @property
    def all_steps(self) -> int:
        return WARM_UP + self.steps

    @property
    def sentence(self) -> str:
        """It tells the case to a person."""
        model = f"{self.layers} layers × {self.hidden}, {self.heads}/{self.kv_heads} heads"
        return f"{model}, {ROWS_PER_STEP} rows of {self.tokens:,} tokens a step"

    def make(self, folder: Path) -> None:
        """It writes the model's config, and rows of one document each."""
        sizes = {
            "model_type": "llama",
            "vocab_size": 4096,
            "hidden_size": self.hidden,
            "intermediate_size": 11 * self.hidden // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.tokens,
            "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(sizes))
        write_rows(folder / "rows.jsonl", ROWS_PER_STEP * self.all_steps, self.tokens, 4096)

    def recipe(self, folder: Path, layout: str) -> Path:
        """It writes the recipe of a layout, whose run goes into a folder beside it."""
        name = layout.replace(" ", "-").replace("×", "x")
        tree = {
            "output_dir": str(folder / name),
            "model": {"config": str(folder / "config.json"), "dtype": "float32"},
            "data": {
                "train": str(folder / "rows.jsonl"),
                "sequence_length": self.tokens,
                "packing": "none",
                "shuffle": False,
            },
            "parallel_config": LAYOUTS[layout],
            "deepspeed": {"zero_optimization": {"stage": 1}},
            "training": {"steps": self.all_steps, "global_batch_size": ROWS_PER_STEP},
            "memory": {"gradient_checkpointing": False},
            "checkpoint": {"every_steps": None},
            "export": {"huggingface": False},
            "launch": {"device": "cpu", "processes": 1},
        }
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    def as_record(self) -> dict[str, Any]:
        """It returns what the JSON says of the case."""
        return {**asdict(self), "rows_per_step": ROWS_PER_STEP, "zero_stage": 1, "dtype": "float32"}
