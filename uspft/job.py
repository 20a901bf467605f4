"""A job: what a command hands to the ranks, in a folder that exists as long as the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, with_config

from uspft import __version__
from uspft.config import Recipe, as_tree, dump, load
from uspft.config.problems import RunFailed
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

What lies at these places shows in the corpus and the weights.
"""


def placed(recipe: Recipe, places: Mapping[str, str]) -> Recipe:
    """Return a recipe with folders of this host in place of hub ids.

    places: the folder for each key of `model` that is a hub id.
    """
    return recipe.changed(model=dict(places))


class Prices(NamedTuple):
    """The seconds and bytes by which ranks deal out the rows of a step that has several layouts.

    They are those of the cost model on host 0, so that every rank deals alike.
    """

    row_seconds: tuple[float, ...]
    """Of a row of each strategy, whatever its documents, forward and backward."""
    pair_seconds: tuple[float, ...]
    """Of each pair of query and key of such a row."""
    pass_seconds: float
    """Of a micro-batch beyond its rows."""
    step_seconds: float
    """Of what all ranks do together in each micro-batch, as ZeRO's stages 2 and 3 do."""
    row_bytes: tuple[float, ...]
    """Bytes of activations of a row of each strategy on the fullest rank of those that share it."""


class ChunkPrices(NamedTuple):
    """The seconds by which rows are cut into chunks that take equal time; those of the cost model
    on host 0, so that every rank cuts alike."""

    token_seconds: float
    """Of a token, whatever it sees."""
    pair_seconds: tuple[tuple[int | None, float], ...]
    """Of a pair of query and key, by the sliding window of the layers that have it."""


class Serving(NamedTuple):
    """What lies beside trained weights so that they answer as they were trained to."""

    template: str | None
    """The chat template without marks, if there is one."""
    ends: tuple[str, ...]
    """The tokens that end an answer, where conversations were trained on."""
    generation: dict[str, Any]
    """The contents of generation_config.json; empty: there is none."""


@with_config(ConfigDict(arbitrary_types_allowed=True))
@dataclass(frozen=True)
class Job:
    """A resolved recipe with its prepared data, and where the run goes on from."""

    recipe: Recipe
    corpus: Path
    """The folder of the prepared training data."""
    steps: int
    """How many steps the run has in all, over which the learning rate's schedule runs."""
    identity: dict[str, Any]
    """What a resumed run must agree with."""
    evaluation: dict[str, Path] = field(default_factory=dict)
    """The folders of the prepared evaluation sets, by title."""
    resume_from: Path | None = None
    """The checkpoint that the run goes on from, if any."""
    tokenizer: str | None = None
    """The folder whose tokenizer the export copies, if any."""
    serving: Serving = field(default_factory=lambda: Serving(None, (), {}))
    """What the export has beside weights, config and tokenizer."""
    command: str = ""
    """The command that asked for the run."""
    lease: Lease | None = None
    """The hold on the output folder, on host 0."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The folder on this host for each key of `model` that is a hub id."""
    prices: Prices | None = None
    """What rows cost under each strategy, where the recipe has several."""
    chunk_prices: ChunkPrices | None = None
    """What tokens and pairs of a row cost, where its chunks are to take equal time."""
    comments: Mapping[str, str] = field(default_factory=dict)
    """What stands above keys in the recipe that the run leaves: why `auto` became what it is."""

    @property
    def last_step(self) -> int:
        """The step after which the run ends: that of all steps, or `training.stop_step`."""
        return min(self.steps, self.recipe.training.stop_step or self.steps)

    @property
    def here(self) -> Recipe:
        """The recipe as this host reads it, with folders in place of hub ids."""
        return placed(self.recipe, self.places)

    @property
    def output(self) -> Path:
        """The folder in which the run writes."""
        assert self.recipe.output_dir is not None
        return self.recipe.output_dir

    def fingerprint(self) -> int:
        """Return 48 bits of what all ranks must have in common.

        Paths do not count, since they may differ between hosts.
        """
        tree = as_tree(self.recipe)
        for block, key in LOCAL:
            tree[block].pop(key)
        tree.pop("output_dir")
        resumed = self.resume_from and self.resume_from.name
        data = [self.corpus.name, *(folder.name for folder in self.evaluation.values())]
        # Other versions could pack rows or deal out tokens another way.
        versions = [__version__, version("numpy")]
        whole = json.dumps([tree, data, self.steps, resumed, versions], default=str)
        return int.from_bytes(hashlib.blake2b(whole.encode(), digest_size=6).digest(), "little")

    def require_same(self, fingerprints: Sequence[str]) -> None:
        """Require that every rank has the same job. fingerprints: of each rank's, in hexadecimal.

        Raises RunFailed: hosts may differ in files, overrides or versions.
        """
        if len(set(fingerprints)) > 1:
            raise RunFailed(
                f"this host and another run different things (here {self.fingerprint():x}): "
                f"recipe, overrides, data ({self.corpus.name}), steps ({self.steps}) or "
                f"checkpoint ({self.resume_from}) differ"
            )

    def write(self, folder: Path) -> None:
        """Write the job where ranks of this host read it, which may run in another folder."""
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
    """Return what JSON has in place of a value for which it has no type."""
    if isinstance(value, Lease):
        return [str(value.path), value.token]
    return str(value.resolve()) if isinstance(value, Path) else dict(value)
