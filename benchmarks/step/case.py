"""The model and the rows that every engine of the step benchmark trains on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
WARM_UP = 2
"""So many steps at the start are not timed: they make buffers, caches and Adam's states."""
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Case:
    """A case has a row length, the timed steps of a run, and a folder that holds model and rows."""

    tokens: int
    steps: int
    folder: Path

    @property
    def all_steps(self) -> int:
        return WARM_UP + self.steps

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    def make(self) -> None:
        """It writes random weights, and one document a row: a new row for every step."""
        torch.manual_seed(0)
        config = LlamaConfig(
            **SHAPE,
            max_position_embeddings=self.tokens,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(self.model)
        generator = torch.Generator().manual_seed(1)
        uniform = torch.rand(self.all_steps, self.tokens, generator=generator)
        # Small ids are common, so that the loss falls and its course can be compared.
        ids = (uniform**3 * SHAPE["vocab_size"]).long()
        lines = (json.dumps({"input_ids": row}) + "\n" for row in ids.tolist())
        self.rows.write_text("".join(lines))


@dataclass(frozen=True)
class Measured:
    """This is one run: each step's seconds (warm-up left out), loss and gradient norm."""

    engine: str
    seconds: list[float]
    losses: list[float]
    grad_norms: list[float]


def run_logged(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """This runs a command to its end, its output in log; raises RuntimeError with the end of it."""
    with log.open("w") as output:
        code = subprocess.run(
            command, env=environment, stdout=output, stderr=output, check=False
        ).returncode
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{log.read_text()[-4000:]}")
