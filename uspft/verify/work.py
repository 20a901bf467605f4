"""What ranks are to compare, in a folder that `verify` creates for them; and the results of a
layout's first steps, which they write there for the command."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from uspft.config import ParallelBlock, Recipe, as_tree
from uspft.config.algorithms import CONTEXT, MESH_OPTIONS, every_option
from uspft.config.layout_rules import WITHOUT_STAGES
from uspft.config.strategies import alike
from uspft.job import Job

JOB = "verify.json"
"""The command's file for the ranks, next to the job's own files."""
FOLDER, REPORT = "verify", "verify.json"
"""The subfolder of the output folder, and the report's file in it."""
REFERENCE, PLAIN, LAYOUTS = "one-process.jsonl", "plain.jsonl", "layouts.jsonl"
GRADIENTS, PLAIN_GRADIENTS = "gradients.float32", "plain-gradients.float32"
"""The files of gradients that ranks write to the folder of results."""
GRADIENT_FILES = "*gradients.*"
"""The large files of that folder, which are deleted after the comparison."""


@dataclass(frozen=True)
class VerifyJob:
    """A job, and the layouts to run its first steps in."""

    job: Job
    layouts: tuple[ParallelBlock, ...]
    steps: int
    folder: Path
    """The folder for results."""
    is_reference: bool = False
    """Whether this is the run on one process, whose gradients are the reference."""
    with_plain: bool = False
    """Whether plain transformers runs too."""
    inject: str | None = None

    def under(self, layout: ParallelBlock) -> Job:
        """Return the job in one of the layouts."""
        return replace(self.job, recipe=self.job.recipe.changed(parallel_config=layout))

    def alone(self) -> VerifyJob:
        """Return the reference's job: one process, whole rows, ZeRO-1 (of one rank, no offload), no
        fault."""
        recipe = self.job.recipe
        parallel = alike(
            recipe.parallel_config.changed(
                data_parallel=1,
                model_parallel=1,
                use_seq_parallel=False,
                context_parallel=1,
                context_parallel_algo=None,
                ulysses_degree_in_cp=None,
                expert_parallel=1,
                **WITHOUT_STAGES,
                **dict.fromkeys({*every_option(CONTEXT), *MESH_OPTIONS}),
            )
        )
        recipe = recipe.changed(
            launch={"processes": 1},
            parallel_config=parallel,
            deepspeed={"zero_optimization": {"stage": 1}},
        )
        job = replace(self.job, recipe=recipe)
        return replace(self, job=job, layouts=(parallel,), is_reference=True, inject=None)

    def write(self, folder: Path) -> None:
        self.job.write(folder)
        layouts = [as_tree(layout) for layout in self.layouts]
        rest = {**vars(self), "layouts": layouts, "folder": str(self.folder.resolve())}
        del rest["job"]
        (folder / JOB).write_text(json.dumps(rest))

    @classmethod
    def read(cls, folder: Path) -> VerifyJob:
        rest = json.loads((folder / JOB).read_text())
        layouts = tuple(map(ParallelBlock.model_validate, rest.pop("layouts")))
        return cls(Job.read(folder), layouts, folder=Path(rest.pop("folder")), **rest)


def without_extras(recipe: Recipe) -> Recipe:
    """Return the recipe without what changes no number: evaluation and what compares evaluations,
    DeepSpeed's own reports, and checkpointed layers per stage, which do not fit other layouts."""
    again = isinstance(recipe.memory.gradient_checkpointing, tuple)
    evaluates = ("eval_every_steps", "eval_every_epochs", "eval_micro_batch_size", "patience")
    return recipe.changed(
        deepspeed={"comms_logger": None, "flops_profiler": None, "wall_clock_breakdown": False},
        data={"eval": None},
        training=dict.fromkeys(evaluates),
        checkpoint={"keep_best": False},
        memory={"gradient_checkpointing": True} if again else {},
    )


GROUPS = (
    ("adapter", re.compile(r"lora_")),
    ("embedding", re.compile(r"embed_tokens")),
    ("head", re.compile(r"lm_head")),
    ("norm", re.compile(r"norm")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|expert|moe|router|gate")),
    ("other", re.compile("")),
)
"""The groups in which gradients are reported; the first match counts, and a tied head belongs to
the embedding."""


def group_of(name: str) -> str:
    """The group of a parameter in the report."""
    return next(group for group, pattern in GROUPS if pattern.search(name))


@dataclass
class Measured:
    """The results of each step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    stopped: str | None = None
    """Why there are no more steps, or None."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference in a group, and the parameter that has it."""

    value: float
    parameter: str


@dataclass(frozen=True)
class Result:
    """The results of one layout, and how its gradients differ from the reference's, by group."""

    measured: Measured
    differences: dict[str, Difference]
    seconds: float = 0.0

    def leave(self, path: Path) -> None:
        """Append the result to a file as a line."""
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def results(path: Path) -> list[Result]:
    """Return the results in a file; none where it does not exist."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [TypeAdapter(Result).validate_python(json.loads(line)) for line in lines]
