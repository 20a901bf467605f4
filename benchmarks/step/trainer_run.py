"""The other side of the step benchmark: transformers' Trainer, accelerate, DeepSpeed's ALST.

What a user would take instead: ZeRO-3 and Ulysses sequence parallelism (ALST, arXiv 2506.13996)
through `ParallelismConfig(sp_size=2, sp_backend="deepspeed")`. Run as a script it is one rank.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.step.case import (
    BETAS,
    CLIP,
    EPS,
    LEARNING_RATE,
    WARM_UP,
    WEIGHT_DECAY,
    Case,
    Measured,
    run_logged,
)

DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 3},
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
"""ZeRO-3 is as in our recipe; everything else is DeepSpeed's or Trainer's own."""


def run_trainer(
    case: Case, engine: str, ranks: int, folder: Path, environment: dict[str, str]
) -> Measured:
    """This trains on two ranks that share each row, or on one without DeepSpeed.

    Raises RuntimeError.
    """
    folder.mkdir(parents=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = ["-m", "benchmarks.step.trainer_run"]
    arguments = [str(x) for x in (ranks, case.tokens, case.steps, case.folder, folder)]
    run_logged(
        [sys.executable, *(torchrun if ranks > 1 else []), *script, *arguments],
        {**environment, "DS_ACCELERATOR": "cpu"},
        folder / "log",
    )
    found = json.loads((folder / "measured.json").read_text())
    return Measured(engine, found["seconds"][WARM_UP:], found["losses"], found["grad_norms"])


class Clock(TrainerCallback):
    """The clock keeps each step's seconds, without fetching its row, its loss and gradient norm."""

    def __init__(self) -> None:
        self.started = 0.0
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.grad_norms: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.grad_norms.append(logs["grad_norm"])


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """The rows are those of the case, in the order in which they stand there."""

    def __init__(self, path: Path) -> None:
        self.rows = [json.loads(line)["input_ids"] for line in path.read_text().splitlines()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = self.rows[index]
        return {"input_ids": ids, "labels": ids, "position_ids": list(range(len(ids)))}


def arguments(case: Case, ranks: int, folder: Path) -> TrainingArguments:
    """This says what our recipe says; on one rank there is neither DeepSpeed nor sharing."""
    shared: dict[str, Any] = {"use_cpu": True}
    if ranks > 1:
        from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length=case.tokens,
            sp_seq_length_is_variable=False,
            sp_attn_implementation="sdpa",
        )
        parallel = ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", sp_handler=handler)
        shared = {"deepspeed": DEEPSPEED, "parallelism_config": parallel}
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=case.all_steps,
        per_device_train_batch_size=1,
        learning_rate=LEARNING_RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **shared,
    )


def allow_cpu() -> None:
    """This does what a machine without a GPU needs; none of it is called during a step."""
    import deepspeed
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # accelerate knows no backend for DeepSpeed on CPU, and takes each rank for a world of one.
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.NO)
    # DeepSpeed compiles a collective for inference on CPU, which training does not call.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def rank(ranks: int, case: Case, folder: Path) -> None:
    """The process is one rank; the first writes folder/measured.json."""
    if ranks > 1:
        allow_cpu()
    options = arguments(case, ranks, folder)
    model = AutoModelForCausalLM.from_pretrained(
        case.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    clock = Clock()
    trainer = Trainer(model, options, train_dataset=Rows(case.rows), callbacks=[clock])
    trainer.train()
    if options.process_index == 0:
        found = {k: vars(clock)[k] for k in ("seconds", "losses", "grad_norms")}
        (folder / "measured.json").write_text(json.dumps(found))


if __name__ == "__main__":
    count, tokens, steps = (int(word) for word in sys.argv[1:4])
    rank(count, Case(tokens, steps, Path(sys.argv[4])), Path(sys.argv[5]))
