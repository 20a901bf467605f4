"""A job: what a command passes to the ranks, in a folder that exists as long as the run."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, with_config

from uspft import __version__
from uspft.config import Recipe, as_tree, dump, load
from uspft.config.problems import RunFailed
from uspft.config.types import exactly
from uspft.lease import Lease

LOCAL = (
    ("model", "name_or_path"),
    ("model", "config"),
    ("model", "tokenizer"),
    ("data", "train"),
    ("data", "eval"),
    ("data", "chat_template"),
    ("data", "cache_dir"),
    ("checkpoint", "resume"),
    ("launch", "hardware"),
)
"""Recipe keys that name places on one host and may differ between hosts.

Differences in their contents show in the corpus and the weights.
"""

SHOWN = 3
"""How many differences between hosts are named."""


def placed(recipe: Recipe, places: Mapping[str, str]) -> Recipe:
    """Return a recipe with folders of this host in place of hub ids.

    places: the folder for each key of `model` that is a hub id.
    """
    return recipe.changed(model=dict(places))


def intervals(length: float | None, steps: int) -> Sequence[int]:
    """Return which of a run's steps end intervals of `length` steps, or below 1 of this share of
    all steps, rounded up; none where it is None."""
    if length is None:
        return ()
    each = math.ceil(exactly(length) * steps) if length < 1 else int(length)
    return range(each, steps + 1, each)


class Prices(NamedTuple):
    """The predicted seconds and bytes by which ranks assign the rows of a step with several
    layouts.

    They come from the cost model on host 0, so that every rank makes the same assignment.
    """

    row_seconds: tuple[float, ...]
    """Seconds of a row of each strategy regardless of its documents, forward and backward."""
    pair_seconds: tuple[float, ...]
    """Seconds of each (query, key) pair of such a row."""
    pass_seconds: float
    """Seconds of a micro-batch in addition to its rows."""
    step_seconds: float
    """Seconds of a micro-batch's collectives of all ranks (ZeRO-2 and 3)."""
    row_bytes: tuple[float, ...]
    """Bytes of activations of a row of each strategy, on the fullest of the ranks that share it."""


class ChunkPrices(NamedTuple):
    """The predicted seconds by which rows are cut into chunks of equal time; from the cost model on
    host 0, so that every rank cuts rows in the same way."""

    token_seconds: float
    """The seconds of a token without attention."""
    pair_seconds: tuple[tuple[int | None, float], ...]
    """The seconds of a (query, key) pair, for the layers of each sliding window."""


class Serving(NamedTuple):
    """The settings that are exported with a model so that servers use it as it was trained."""

    template: str | None
    """The chat template without marks, if there is one."""
    ends: tuple[str, ...]
    """The tokens that end an answer, if conversations were trained on."""
    generation: dict[str, Any]
    """The contents of generation_config.json; empty: there is none."""


@with_config(ConfigDict(arbitrary_types_allowed=True))
@dataclass(frozen=True)
class Job:
    """A resolved recipe with its prepared data, and the checkpoint to resume."""

    recipe: Recipe
    corpus: Path
    """The folder of the prepared training data."""
    steps: int
    """How many steps the whole run has, over which the learning rate schedule spans."""
    identity: dict[str, Any]
    """The settings and contents that a resumed run must share."""
    evaluation: dict[str, Path] = field(default_factory=dict)
    """The folders of the prepared evaluation sets, by title."""
    resume_from: Path | None = None
    """The checkpoint to resume, if any."""
    tokenizer: str | None = None
    """The folder whose tokenizer the export copies, if any."""
    serving: Serving = field(default_factory=lambda: Serving(None, (), {}))
    """The settings to export with weights, config and tokenizer."""
    command: str = ""
    """The command that started the run."""
    lease: Lease | None = None
    """The lease on the output folder, on host 0."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The folder on this host for each key of `model` that is a hub id."""
    prices: Prices | None = None
    """The costs of rows under each strategy, if the recipe has several."""
    chunk_prices: ChunkPrices | None = None
    """The costs of tokens and pairs, if a row's chunks should take equal time."""
    saved_by_epochs: tuple[int, ...] = ()
    """The steps in which intervals of `checkpoint.every_epochs` end."""
    evaluated_by_epochs: tuple[int, ...] = ()
    """The steps in which intervals of `training.eval_every_epochs` end."""
    comments: Mapping[str, str] = field(default_factory=dict)
    """Comments above keys in the run's resolved recipe: why `auto` became what it is."""

    @property
    def last_step(self) -> int:
        """The step after which the run ends: the last one, or `training.stop_step`."""
        return min(self.steps, self.recipe.training.stop_step or self.steps)

    @property
    def saved_steps(self) -> Sequence[int]:
        """The steps after which an interval of checkpoints ends."""
        every = self.recipe.checkpoint.every_steps
        return self._taken(self.saved_by_epochs or intervals(every, self.steps))

    @property
    def saves(self) -> int:
        """How many checkpoints the run saves at most: at its intervals, after its last step, and
        with `checkpoint.keep_best` after evaluations."""
        best = self.evaluated_steps if self.recipe.checkpoint.keep_best else ()
        return sum(bisect_left(steps, self.last_step) for steps in (self.saved_steps, best)) + 1

    @property
    def evaluated_steps(self) -> Sequence[int]:
        """The steps after which an interval of evaluations ends."""
        every = self.recipe.training.eval_every_steps
        return self._taken(self.evaluated_by_epochs or intervals(every, self.steps))

    def _taken(self, steps: Sequence[int]) -> Sequence[int]:
        """Return those of these steps that come before `training.stop_step`, or are it."""
        return steps[: bisect_right(steps, self.last_step)]

    @property
    def here(self) -> Recipe:
        """The recipe as this host reads it, with folders in place of hub ids."""
        return placed(self.recipe, self.places)

    @property
    def output(self) -> Path:
        """The folder in which the run writes."""
        assert self.recipe.output_dir is not None
        return self.recipe.output_dir

    def shared(self) -> dict[str, Any]:
        """Return by name what all ranks must have in common: recipe, data, steps and versions.

        Paths are left out, since they may differ between hosts. Values have the types of JSON.
        """
        tree = as_tree(self.recipe)
        for block, key in LOCAL:
            tree[block].pop(key)
        tree.pop("output_dir")
        found: dict[str, Any] = {}
        for block, value in tree.items():
            inside = value.items() if isinstance(value, dict) else [("", value)]
            found |= {f"{block}.{key}".rstrip("."): one for key, one in inside}
        found["the data's tokens"] = self.corpus.name
        found["the evaluation data's tokens"] = [one.name for one in self.evaluation.values()]
        found["the number of steps"] = self.steps
        found["the checkpoint to resume"] = self.resume_from and self.resume_from.name
        # Other versions could pack rows or assign tokens differently.
        found |= {"uspft's version": __version__, "numpy's version": version("numpy")}
        found = json.loads(json.dumps(found, default=str))
        return found

    def fingerprint(self) -> int:
        """Return 48 bits of a hash of what all ranks must have in common."""
        whole = json.dumps(self.shared())
        return int.from_bytes(hashlib.blake2b(whole.encode(), digest_size=6).digest(), "little")

    def require_same(self, said_by_all: Callable[[str], Sequence[str]]) -> None:
        """Check that every rank has the same job; collective.

        said_by_all: returns the message of each rank, in rank order. Raises RunFailed with what
        differs: hosts may differ in files, overrides or versions.
        """
        if len(set(said_by_all(f"{self.fingerprint():x}"))) == 1:
            return
        own, differ = self.shared(), []
        every = [json.loads(text) for text in said_by_all(json.dumps(own))]
        for key, value in own.items():
            ranks = (rank for rank, one in enumerate(every) if one.get(key) != value)
            if (rank := next(ranks, None)) is not None:
                here, there = json.dumps(value), json.dumps(every[rank].get(key))
                differ.append(f"{key} is {here} here and {there} on rank {rank}")
        told = "; ".join(differ[:SHOWN])
        if len(differ) > SHOWN:
            told += f"; and {len(differ) - SHOWN} more"
        remedy = "start every host with the same recipe, overrides, data and versions"
        raise RunFailed(f"hosts run different things: {told}; {remedy}")

    def write(self, folder: Path) -> None:
        """Write the job to a folder from which this host's ranks read it; they may run in another
        working directory."""
        (folder / "recipe.yaml").write_text(dump(self.recipe))
        places = {key: str(Path(place).resolve()) for key, place in self.places.items()}
        rest = {**vars(self), "places": places}
        del rest["recipe"]
        (folder / "job.json").write_text(json.dumps(rest, default=_as_json))

    @classmethod
    def read(cls, folder: Path) -> Job:
        rest = json.loads((folder / "job.json").read_text())
        if rest["lease"]:
            rest["lease"] = Lease(Path(rest["lease"][0]), rest["lease"][1])
        job = {**rest, "recipe": load(folder / "recipe.yaml").recipe}
        return TypeAdapter(cls).validate_python(job)


def _as_json(value: Path | Lease | Mapping[str, Any]) -> object:
    """Return the JSON form of a value of a type that JSON lacks."""
    if isinstance(value, Lease):
        return [str(value.path), value.token]
    return str(value.resolve()) if isinstance(value, Path) else dict(value)
