"""Seconds of a block's four products together, by mesh and slices: measured beside predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

from benchmarks.meshslice.hosts.predicted import hardware_of, predicted_seconds, transfer_errors
from benchmarks.meshslice.hosts.setting import MESHES, Setting

MEGATRON, ONE_SLICE, TUNED = "Megatron", "one slice", "tuned"
"""Ways that take turns in the part `tuned`: Megatron's over all ranks, with tokens split between
the blocks (`use_seq_parallel`); the mesh that the tuner picks, in one slice; and in the slices that
it picks."""
Mesh = tuple[int, int]
Seconds = Mapping[tuple[Mesh, int], Mapping[str, float]]
"""Of each product in all its flows, by mesh and slices."""


class Choice(NamedTuple):
    """A mesh and the slices of each product on it."""

    mesh: Mesh
    slices: Mapping[str, int]

    @property
    def name(self) -> str:
        counts = ", ".join(map(str, self.slices.values()))
        return f"{self.mesh[0]} × {self.mesh[1]} in {counts}"


def choose(seconds: Seconds) -> Choice:
    """Return the fastest mesh, each product in the slices that suit it."""

    def suited(mesh: Mesh) -> Choice:
        counts = [count for where, count in seconds if where == mesh]
        return Choice(
            mesh,
            {
                name: min(counts, key=lambda count: seconds[mesh, count][name])
                for name in seconds[mesh, counts[0]]
            },
        )

    meshes = dict.fromkeys(mesh for mesh, _ in seconds)
    return min(map(suited, meshes), key=lambda one: total(seconds, one))


def total(seconds: Seconds, choice: Choice) -> float:
    """Return the seconds of all products under a choice."""
    return sum(seconds[choice.mesh, count][name] for name, count in choice.slices.items())


def tuned(setting: Setting, points: Mapping[str, Any]) -> Choice:
    """Return the mesh and the slices that are predicted to be fastest by a launch's points."""
    hardware = hardware_of(points)
    return choose(
        {
            (mesh, count): predicted_seconds(setting, hardware, mesh, count)
            for mesh in MESHES
            for count in setting.slices
        }
    )


@dataclass(frozen=True)
class Measured:
    """The measurements of `baselines` at one rate."""

    setting: Setting
    points: Mapping[str, Any]
    meshes: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, rate: Mapping[str, Any]) -> Measured:
        """Return what one entry of the JSON's `rates` holds."""
        setting = Setting(**{**rate["setting"], "slices": tuple(rate["setting"]["slices"])})
        return cls(setting, rate["measured"]["points"], rate["measured"]["meshes"])

    def engines(self, mesh: Mesh) -> dict[str, float]:
        """Return the seconds of all flows, the median of each, by engine."""
        every = self._on(mesh)["seconds"]
        return {name: sum(map(median, flows.values())) for name, flows in every.items()}

    @cached_property
    def seconds(self) -> Seconds:
        """What MeshSlice took."""
        return {
            (mesh, count): {
                one.name: sum(median(each) for each in self._flows(mesh, count, one.name))
                for one in self.setting.products
            }
            for mesh in self.every_mesh
            for count in self.setting.slices
        }

    @cached_property
    def predicted(self) -> Seconds:
        """What MeshSlice was predicted to take, from the points of the same launch."""
        hardware = hardware_of(self.points)
        return {
            (mesh, count): predicted_seconds(self.setting, hardware, mesh, count)
            for mesh, count in self.seconds
        }

    @property
    def every_mesh(self) -> list[Mesh]:
        return [(one["mesh"][0], one["mesh"][1]) for one in self.meshes]

    def errors(self) -> list[float]:
        """Return how far the model is from the transfers of the flows, each shard 1 MiB or more."""
        points = [point for one in self.meshes for point in one["transfers"]]
        return [abs(error) for error in transfer_errors(points, hardware_of(self.points))]

    def spread(self, choice: Choice) -> float:
        """Return the most seconds of a round over the least, of all products under a choice."""
        flows = [
            each
            for name, count in choice.slices.items()
            for each in self._flows(choice.mesh, count, name)
        ]
        rounds = [sum(each) for each in zip(*flows, strict=True)]
        return max(rounds) / min(rounds)

    def _on(self, mesh: Mesh) -> Mapping[str, Any]:
        return next(one for one in self.meshes if tuple(one["mesh"]) == mesh)

    def _flows(self, mesh: Mesh, count: int, product: str) -> list[list[float]]:
        every: Mapping[str, list[float]] = self._on(mesh)["seconds"][f"MeshSlice {count}"]
        return [each for name, each in every.items() if name.rpartition(" ")[0] == product]
