"""The verdict on every layout, by tolerances that separate rounding from errors in each compute
dtype; as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from uspft.config import as_tree
from uspft.config.messages import aligned
from uspft.metrics import finite
from uspft.planner.ways import Candidate
from uspft.verify.work import GROUPS, Measured, Result

MAX_TIMES_OWN_ERROR = 4.0
"""How far a layout may be from one process, as a multiple of that process's own distance from
float32: both are rounded, in different ways, and the largest measured ratio was two."""
MAX_TOLERANCE = 0.5
"""The largest tolerance of a gradient: a larger one would pass a gradient unrelated to the right
one (whose difference is about 1.4)."""

ALIKE = 1.1
"""The largest ratio between groups' differences that still counts as one common factor, since
rounding and later steps spread them."""


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that count as rounding."""

    loss: float
    grad_norm: float
    every: float
    """The limit for a gradient whose group is not in `gradient`."""
    gradient: dict[str, float]
    """The limit for the gradients of each group."""

    def of_group(self, group: str) -> float:
        return self.gradient.get(group, self.every)


FIXED = {
    "float32": Tolerance(1e-5, 1e-4, 1e-4, {}),
    "bfloat16": Tolerance(5e-3, 3e-2, 1e-1, {}),
}
"""The tolerance of each compute dtype. That of float32 allows for another order of summation over a
few steps of Adam. That of bfloat16 is the fallback for `measured_tolerance`, which needs a run of
plain transformers."""
PLAIN = {"float32": FIXED["float32"], "bfloat16": Tolerance(2e-2, 1e-1, MAX_TOLERANCE, {})}
"""The tolerance of each compute dtype for one process against plain transformers in float32."""


def measured_tolerance(dtype: str, reference: Measured, plain: Result | None) -> Tolerance:
    """Return the tolerance for layouts, from the difference of one process from plain transformers.

    In float32, or without plain transformers, it is the fixed one. Otherwise it is
    MAX_TIMES_OWN_ERROR times the difference of one process in this dtype from plain transformers in
    float32, at most PLAIN's tolerance for that difference, and at least a quarter of the fixed one,
    because one number may agree by chance.
    """
    fixed, most = FIXED[dtype], PLAIN[dtype]
    if dtype == "float32" or plain is None:
        return fixed
    loss, norm = differences(reference, plain.measured)
    gradient = {
        group: min(MAX_TOLERANCE, max(fixed.every / 4, MAX_TIMES_OWN_ERROR * one.value))
        for group, one in plain.differences.items()
    }
    return Tolerance(
        min(most.loss, max(fixed.loss / 4, MAX_TIMES_OWN_ERROR * loss)),
        min(most.grad_norm, max(fixed.grad_norm / 4, MAX_TIMES_OWN_ERROR * norm)),
        fixed.every,
        gradient,
    )


def differences(got: Measured, want: Measured) -> tuple[float, float]:
    """Return the largest relative difference of the loss and of the gradient norm.

    They are taken over the steps that both have; infinite where there is none, or where one is not
    finite.
    """
    return _largest(got.losses, want.losses), _largest(got.grad_norms, want.grad_norms)


def _largest(got: Sequence[float], want: Sequence[float]) -> float:
    pairs = zip(got, want, strict=False)
    found = [abs(a - b) / abs(b) if b else abs(a) for a, b in pairs]
    return max(found) if found and all(map(math.isfinite, found)) else math.inf


def one_factor(result: Result, reference: Measured, allowed: Tolerance) -> bool:
    """Return whether the differences look like one common factor rather than errors of single
    tokens.

    In that case every group's gradient and the norm are off by the same factor, and the loss by
    that factor or not at all.
    """
    loss, norm = differences(result.measured, reference)
    each = [norm, *(one.value for one in result.differences.values())]
    if loss > allowed.loss:
        each.append(loss)
    return len(result.differences) > 1 and max(each) <= ALIKE * min(each) < math.inf


def mismatches(result: Result, reference: Measured, allowed: Tolerance) -> list[str]:
    """Return a phrase for each number that differs by more than rounding."""
    measured = result.measured
    if measured.stopped:
        return [measured.stopped]
    found = [
        f"{got} target tokens in step {step}, not {want}"
        for step, (got, want) in enumerate(
            zip(measured.targets, reference.targets, strict=False), 1
        )
        if got != want
    ]
    loss, norm = differences(measured, reference)
    if not loss <= allowed.loss:
        found.append(f"loss off by {loss:.1e}")
    if not norm <= allowed.grad_norm:
        found.append(f"gradient norm off by {norm:.1e}")
    for group, one in result.differences.items():
        if not one.value <= allowed.of_group(group):
            found.append(f"gradient of {one.parameter} off by {one.value:.1e}")
    return found


_ORDER = [group for group, _ in GROUPS]


@dataclass(frozen=True)
class LayoutLine:
    """One line of the table."""

    name: str
    candidate: Candidate | None
    """The layout; None: plain transformers."""
    result: Result | None
    wrong: list[str] | None
    """What differs by more than rounding; None: the layout was not tried."""

    @property
    def verdict(self) -> str:
        if self.wrong is None:
            return "not tried"
        return "DIFFERS" if self.wrong else "equal"


@dataclass(frozen=True)
class Report:
    """All results of `verify`."""

    facts: dict[str, Any]
    """What was verified, for the JSON and for the lines above the table."""
    reference: Measured
    plain: LayoutLine | None
    layouts: list[LayoutLine]
    tolerance: Tolerance
    inject: str | None = None

    @classmethod
    def of(
        cls,
        facts: dict[str, Any],
        found: tuple[Measured, Result | None],
        layouts: Sequence[tuple[Candidate, Result | None]],
        inject: str | None,
    ) -> Report:
        """Return the report on these results.

        found: (the reference, plain transformers' result or None). layouts: the first is the
        recipe's; those without a result were not tried.
        """
        reference, plain = found
        tolerance = measured_tolerance(facts["dtype"], reference, plain)
        beside = None
        if plain:
            wrong = mismatches(plain, reference, PLAIN[facts["dtype"]])
            beside = LayoutLine("plain transformers", None, plain, wrong)
        lines = []
        for candidate, result in layouts:
            wrong_here = mismatches(result, reference, tolerance) if result else None
            lines.append(LayoutLine(candidate.name, candidate, result, wrong_here))
        return cls(facts, reference, beside, lines, tolerance, inject)

    @property
    def tried(self) -> list[LayoutLine]:
        return [line for line in self.layouts if line.wrong is not None]

    @property
    def ok(self) -> bool:
        """Whether nothing differs; with an injected fault, whether every layout differs, and
        nothing else."""
        plain_is_off = bool(self.plain and self.plain.wrong)
        if plain_is_off or self.reference.stopped or not self.tried:
            return False
        return all(bool(line.wrong) == bool(self.inject) for line in self.tried)

    def as_json(self) -> dict[str, Any]:
        return {
            **self.facts,
            "verdict": self._verdict(),
            "injected": self.inject,
            "tolerance": asdict(self.tolerance),
            "one_process": asdict(self.reference),
            "plain_transformers": self._entry(self.plain) if self.plain else None,
            "layouts": [self._entry(line) for line in self.layouts],
        }

    def _verdict(self) -> str:
        right, wrong = ("caught", "not caught") if self.inject else ("equal", "differs")
        return right if self.ok else wrong

    def _entry(self, line: LayoutLine) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": line.name, "verdict": line.verdict}
        if line.candidate:
            entry["parallel_config"] = as_tree(line.candidate.parallel)
            entry["reason"] = line.candidate.reason
        if line.result:
            loss, norm = differences(line.result.measured, self.reference)
            entry |= {
                "wrong": line.wrong,
                **asdict(line.result.measured),
                "loss_difference": finite(loss),
                "grad_norm_difference": finite(norm),
                "gradient_differences": {
                    group: {"value": finite(one.value), "parameter": one.parameter}
                    for group, one in line.result.differences.items()
                },
                "seconds": line.result.seconds,
            }
        return entry

    def text(self) -> str:
        """Return the table and its explanation."""
        lines = [line for line in (self.plain, *self.tried) if line]
        groups = {group for line in lines if line.result for group in line.result.differences}
        columns = [group for group in _ORDER if group in groups]
        rows = [["largest relative difference", "loss", "grad_norm", *columns]]
        rows += [self._row(line, columns) for line in lines]
        limits = [f"{self.tolerance.of_group(group):.0e}" for group in columns]
        ends = [f"{self.tolerance.loss:.0e}", f"{self.tolerance.grad_norm:.0e}", *limits]
        rows.append(["rounding (layouts)", *ends])
        verdicts = ["", *(f"  {line.verdict}" for line in lines), ""]
        told = map(str.__add__, aligned(rows).splitlines(), verdicts)
        return "\n".join([*told, *self._left_out(), *self._meaning()])

    def _left_out(self) -> list[str]:
        """Return a line for each reason for skipping layouts: how many, and an example."""
        by_key: dict[str | None, list[Candidate]] = {}
        for line in self.layouts:
            if line.candidate and line.wrong is None:
                by_key.setdefault(line.candidate.key, []).append(line.candidate)
        told = []
        for key, some in by_key.items():
            count = f"{len(some)} of {len(self.layouts)} layouts"
            if key is None:
                remedy = f"`{self.facts['command']} --all` tries them too"
                told.append(f"not tried: {count}, {some[0].reason}; {remedy}")
            else:
                such = f"{'such as ' * (len(some) > 1)}{some[0].name}: {some[0].reason}"
                told.append(f"not tried: {count} by {key}, {such}")
        tried = [line.candidate for line in self.tried if line.candidate]
        splits = any(one.layout.tensor > 1 for one in tried)
        if splits and not any(one.parallel.on_a_mesh for one in tried):
            remedy = "a recipe with parallel_config.tensor_parallel_algo: meshslice has them"
            told.append(f"not in the list: matrices on meshes; {remedy}")
        return told

    def _row(self, line: LayoutLine, columns: Sequence[str]) -> list[str]:
        assert line.result
        loss, norm = differences(line.result.measured, self.reference)
        each = [line.result.differences.get(group) for group in columns]
        cells = [f"{value:.1e}" for value in (loss, norm)]
        own = " (the recipe's)" if line is self.layouts[0] else ""
        cells += [f"{one.value:.1e}" if one else "–" for one in each]
        return [line.name + own, *cells]

    def _meaning(self) -> list[str]:
        """Return lines on what differs, what that may mean, and the verdict."""
        wrong, count = [line for line in self.tried if line.wrong], len(self.tried)
        told = [f"one process: {self.reference.stopped}"] if self.reference.stopped else []
        if self.plain and self.plain.wrong:
            what = "; ".join(self.plain.wrong[:4])
            told.append(
                f"one process beside plain transformers: {what}: model, weights, attention kernel "
                "or loss are off, and no layout is the reason"
            )
        if self.inject:
            missed = ", ".join(line.name for line in self.tried if not line.wrong)
            shows = f"--inject {self.inject} shows in {len(wrong)} of {count} layouts"
            return [
                *told,
                f"NOT CAUGHT: {shows}, not in {missed}" if missed else f"caught: {shows}",
            ]
        told += [f"{line.name}: {'; '.join((line.wrong or [])[:4])}" for line in wrong]
        if not told:
            return [f"equal: {count} of {count} layouts give what one process gives"]
        scaled = all(
            one_factor(line.result, self.reference, self.tolerance) for line in wrong if line.result
        )
        return [*told, *_hints(self.tried, scaled), f"DIFFERS: {len(wrong)} of {count} layouts"]


def _hints(tried: Sequence[LayoutLine], scaled: bool) -> list[str]:
    """Return the likely causes of a mismatch, judged by which layouts show it.

    scaled: whether all are off by one factor.
    """
    wrong = [line for line in tried if line.wrong]
    if not wrong:
        return []
    shared = [line for line in tried if line.candidate and line.candidate.layout.context > 1]
    algorithms = {line.candidate.parallel.context_parallel_algo for line in wrong if line.candidate}
    if any(line not in shared for line in wrong):
        hint = (
            "layouts with whole rows differ too: look at ZeRO, the gradients' reduction or "
            "versions that differ between ranks, before sequence parallelism"
        )
    elif len(wrong) < len(shared):
        others = ", ".join(sorted(map(str, algorithms)))
        hint = f"only some layouts differ: train with another one than {others}, and report it"
    elif scaled:
        hint = "every layout that shares rows differs"
    else:
        hint = "every layout that shares rows differs: attention kernel, mask or order of tokens"
    if scaled:
        return [
            hint,
            "all gradients are off by one factor, as by a wrong scale: the count of targets that "
            "the loss is divided by, or the average over ranks; not attention",
        ]
    return [hint]
