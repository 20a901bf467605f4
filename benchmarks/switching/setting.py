"""One launch of two hosts: what runs there, and the recipe of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.switching.contenders import PEER, Contender, contenders
from benchmarks.switching.corpus import write_samples
from uspft.data.corpus.prepare import prepare
from uspft.job import Job
from uspft.prepare.examine import Examined, examine
from uspft.prepare.make_plan import prices_of

HOSTS = 2
VOCABULARY, HEADS, KV_HEADS = 1024, 8, 4
LONGEST = 8
"""Times the hidden size: the tokens of the longest row."""
RATE, CLIP, BETAS, EPS, DECAY = 1e-3, 1.0, (0.9, 0.95), 1e-8, 0.1
WARM_UP = 2
"""Steps before the timed ones: of the first nothing is counted, of the second live bytes."""


@dataclass(frozen=True)
class Setting:
    """A launch.

    mbit: of each host's link. stage: of ZeRO. names: of the contenders. folder: holds the model,
    the samples and a job for each contender. lengths: of a step's samples. hardware: what
    `calibrate` wrote, or None for the shipped figures. chosen: contenders that a planner chose.
    """

    ranks: int
    mbit: int
    stage: int
    rounds: int
    hidden: int
    layers: int
    lengths: tuple[int, ...]
    names: tuple[str, ...]
    folder: str
    hardware: str | None = None
    chosen: Mapping[str, Contender] = field(default_factory=dict)

    @property
    def every(self) -> dict[str, Contender]:
        """The contenders by name, those that are not among `names` too."""
        return {**contenders(self.ranks), **self.chosen}

    @property
    def longest(self) -> int:
        return LONGEST * self.hidden

    @property
    def steps(self) -> int:
        return WARM_UP + self.rounds

    def place(self, name: str) -> Path:
        """It returns the folder of a contender's job."""
        return Path(self.folder) / f"{self.mbit}-zero{self.stage}-{self.names.index(name)}"

    def as_record(self) -> dict[str, Any]:
        """It returns what the JSON keeps of it."""
        kept = asdict(replace(self, folder="", hardware=None))
        return {key: value for key, value in kept.items() if key not in ("folder", "hardware")}

    @classmethod
    def of(cls, record: dict[str, Any]) -> Setting:
        lists = {key: tuple(record[key]) for key in ("lengths", "names")}
        chosen = {name: Contender.of(one) for name, one in record.get("chosen", {}).items()}
        return cls(**{**record, **lists, "chosen": chosen})


def make_model(setting: Setting) -> int:
    """This writes random weights; it returns how many parameters they are."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setting.hidden,
        intermediate_size=11 * setting.hidden // 4,
        num_hidden_layers=setting.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=setting.longest,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(Path(setting.folder) / "model")
    return sum(one.numel() for one in model.parameters())


def make_samples(folder: Path, lengths: Sequence[int], steps: int) -> None:
    """This writes the samples that all take."""
    write_samples(folder / "samples.jsonl", lengths, steps, VOCABULARY)


def make_jobs(setting: Setting) -> dict[str, Examined]:
    """This writes a job for each contender that is ours; it returns their recipes, examined."""
    found = {}
    for name in setting.names:
        if setting.every[name].kind == PEER:
            continue
        place = setting.place(name)
        place.mkdir()
        path = place / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe(setting, name)))
        one = examine(path, [], HOSTS, None)
        corpus = prepare(one.recipe.data, None, VOCABULARY, Path(setting.folder) / "cache")
        job = Job(one.recipe, corpus, setting.steps + 2, {}, prices=prices_of(one))
        job.write(place)
        found[name] = one
    return found


def recipe(setting: Setting, name: str) -> dict[str, Any]:
    """This returns a contender's recipe; one of a single layout has a single strategy, so that it
    takes the same samples in each step as all."""
    one, folder = setting.every[name], Path(setting.folder)
    strategies = [
        {"max_length": setting.longest // share, **degrees}
        for share, degrees in sorted(one.strategies.items(), reverse=True)
    ]
    return {
        "output_dir": str(setting.place(name) / "out"),
        "model": {"name_or_path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "train": str(folder / "samples.jsonl"),
            "sequence_length": setting.longest,
            "shuffle": False,
        },
        "parallel_config": {
            "strategies": strategies,
            "switching": "move" if one.moves else "in_place",
        },
        "deepspeed": {"zero_optimization": {"stage": setting.stage}},
        "optimizer": {
            "learning_rate": RATE,
            "betas": list(BETAS),
            "eps": EPS,
            "weight_decay": DECAY,
        },
        "lr_schedule": {"type": "constant", "warmup_ratio": 0.0},
        "training": {
            "steps": setting.steps,
            "global_batch_size": len(setting.lengths),
            "max_grad_norm": CLIP,
        },
        "memory": {"gradient_checkpointing": False},
        "checkpoint": {"every_steps": None},
        "export": {"huggingface": False},
        "launch": {
            "device": "cpu",
            "processes": setting.ranks // HOSTS,
            "hardware": setting.hardware or "auto",
        },
    }
