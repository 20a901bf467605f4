"""What is rounding and what is a mistake: tolerances by compute type, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from uspft.verify.work import Measured, Result

MAX_TIMES_OWN_ERROR = 4.0
"""How far a layout may be from one process, as a multiple of that process's own distance from
float32: both are rounded, each in its own way, and one layout's error was measured at up to twice
another's."""
MAX_TOLERANCE = 0.5
"""The largest tolerance of a gradient: one beyond it would pass a gradient that has nothing to do
with the right one (whose difference is about 1.4)."""

ALIKE = 1.1
"""How far the differences of groups may be apart, as a factor, and still count as one scale;
rounding and later steps set them this far apart."""


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
"""The tolerance of each compute type. That of float32 allows for sums in another order over a few
steps of Adam. That of bfloat16 is for where nothing better is known; `measured_tolerance` takes its
place where plain transformers has run beside the reference."""
PLAIN = {"float32": FIXED["float32"], "bfloat16": Tolerance(2e-2, 1e-1, MAX_TOLERANCE, {})}
"""The tolerance of each compute type for one process beside plain transformers in float32."""


def measured_tolerance(dtype: str, reference: Measured, plain: Result | None) -> Tolerance:
    """Return the tolerance for layouts, from the difference of one process from plain transformers.

    In float32, or without plain transformers, it is the fixed one. Otherwise it is
    MAX_TIMES_OWN_ERROR times what one process in this type differs from plain transformers in
    float32, at most what is allowed beside plain transformers, and at least a quarter of the fixed
    one: one number may agree by chance.
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
    """Return whether the differences look like one scale, and not like an error of single tokens.

    Then every group's gradient and the norm are off by one and the same share, and the loss by that
    share or by nothing.
    """
    loss, norm = differences(result.measured, reference)
    each = [norm, *(one.value for one in result.differences.values())]
    if loss > allowed.loss:
        each.append(loss)
    return len(result.differences) > 1 and max(each) <= ALIKE * min(each) < math.inf


def mismatches(result: Result, reference: Measured, allowed: Tolerance) -> list[str]:
    """Return what differs by more than rounding, in words; nothing where all agrees."""
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
